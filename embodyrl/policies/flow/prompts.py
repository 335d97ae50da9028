"""Tokenization of instructions, and of states for pi0.5."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.vla.tokens import compute_padded_width, pad_right
from embodyrl.text.model_folder import read_tokenizer
from embodyrl.types import FloatArray, IntArray

STATE_BINS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """Format of a model's prompts."""

    template: str
    """Template with {task} and, if the state is text, {state}."""
    max_tokens: int
    """Maximum number of tokens."""
    bos: str | None = None
    """Start token of the prompt; None: no start token."""
    suffix: str = ""
    """Text at the end of the prompt, tokenized separately."""
    normalizes_text: bool = True
    """True if the instruction is stripped, and underscores and newlines are replaced by spaces."""

    @property
    def reads_state(self) -> bool:
        """True if the prompt contains the state."""
        return "{state}" in self.template

    def text(self, task: str, state: str = "") -> str:
        """Return the prompt of an instruction, without `suffix`."""
        task = task.strip().replace("_", " ").replace("\n", " ") if self.normalizes_text else task.removesuffix("\n")
        return self.template.format(task=task, state=state)


PI0_PROMPT = PromptFormat(template="{task}", max_tokens=48, bos="<bos>", suffix="\n")
PI05_PROMPT = PromptFormat(template="Task: {task}, State: {state};\nAction: ", max_tokens=200, bos="<bos>")
SMOLVLA_PROMPT = PromptFormat(template="{task}\n", max_tokens=48, normalizes_text=False)


def format_state(state: npt.ArrayLike) -> str:
    """Format a normalized state [S] in -1..1 as indices 0..255 of equal bins; -1 below the range."""
    edges = np.linspace(-1.0, 1.0, STATE_BINS + 1)[:-1]
    return " ".join(map(str, np.digitize(np.asarray(state), edges) - 1))


class FlowPromptEncoder:
    """Encoder of prompts of one format with one tokenizer."""

    def __init__(self, tokenizer_file: Path, prompt_format: PromptFormat, *, tasks: Sequence[str] = ()) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_file: `tokenizer.json` of a checkpoint.
            prompt_format: prompt format of the checkpoint.
            tasks: the expected instructions; without states, the longest one sets the padded width.

        Raises:
            CheckpointError: the file is missing, damaged, or lacks the start token of the prompts.
        """
        fix = "Put the tokenizer.json of the language model into the checkpoint's folder"
        self._tokenizer = read_tokenizer(tokenizer_file, f"{fix} (pi0 and pi0.5: PaliGemma's; SmolVLA: SmolVLM2's).")
        self.prompt_format = prompt_format
        bos = None if prompt_format.bos is None else self._tokenizer.token_to_id(prompt_format.bos)
        if prompt_format.bos is not None and bos is None:
            raise CheckpointError(
                f"{tokenizer_file} has no token '{prompt_format.bos}', the start token of prompts; use the tokenizer "
                f"of this model."
            )
        self._prefix_ids = () if bos is None else (bos,)
        self._suffix_ids = self._tokenize(prompt_format.suffix) if prompt_format.suffix else ()
        self._encode_cached = lru_cache(maxsize=4096)(self._encode_uncached)
        self.width = 0 if prompt_format.reads_state else max((len(self.encode(task)) for task in tasks), default=0)

    def encode(self, task: str, state: npt.ArrayLike | None = None) -> tuple[int, ...]:
        """Return the token ids of an instruction and, in formats with state, of the normalized state [S].

        Raises:
            ConfigError: the prompt exceeds the model's maximum length.
        """
        ids = self._encode_cached(self.prompt_format.text(task, "" if state is None else format_state(state)))
        if len(ids) > self.prompt_format.max_tokens:
            raise ConfigError(
                f"The prompt of '{task}' has {len(ids)} tokens, but this model supports "
                f"{self.prompt_format.max_tokens}. Shorten the instruction."
            )
        return ids

    def batch(self, tasks: Sequence[str], states: FloatArray | None = None) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return token ids [B, W], padded on the right with zeros, and a mask that is False for padding.

        W is the width of the known tasks; a longer row widens the batch to a multiple of 16.
        """
        state_rows = [None] * len(tasks) if states is None else list(states)
        assert not (self.prompt_format.reads_state and states is None), "these prompts need the state"
        rows = [self.encode(task, state) for task, state in zip(tasks, state_rows, strict=True)]
        width = min(compute_padded_width(self.width, max(map(len, rows))), self.prompt_format.max_tokens)
        return pad_right(rows, width), np.arange(width) < np.array([[len(row)] for row in rows])

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return (*self._prefix_ids, *self._tokenize(text), *self._suffix_ids)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
