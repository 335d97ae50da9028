"""Tokenization of instructions, and of states for pi0.5."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.vla.tokens import pad_right, padded_width, read_tokenizer
from embodyrl.types import FloatArray, IntArray

STATE_BINS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """Format of a model's prompts."""

    template: str
    """Template with {task} and, if the state is text, {state}."""
    limit: int
    """Maximum number of tokens."""
    bos: str | None = None
    """Start token of the prompt; None: no start token."""
    tail: str = ""
    """Text at the end of the prompt, tokenized separately."""
    cleans: bool = True
    """True if the instruction is stripped, and underscores and newlines are replaced by spaces."""

    @property
    def reads_state(self) -> bool:
        """True if the prompt contains the state."""
        return "{state}" in self.template

    def text(self, task: str, state: str = "") -> str:
        """Return the prompt of an instruction, without `tail`."""
        task = task.strip().replace("_", " ").replace("\n", " ") if self.cleans else task.removesuffix("\n")
        return self.template.format(task=task, state=state)


PI0_PROMPT = PromptForm(template="{task}", limit=48, bos="<bos>", tail="\n")
PI05_PROMPT = PromptForm(template="Task: {task}, State: {state};\nAction: ", limit=200, bos="<bos>")
SMOLVLA_PROMPT = PromptForm(template="{task}\n", limit=48, cleans=False)


def state_text(state: npt.ArrayLike) -> str:
    """Format a normalised state [S] in -1..1 as indices 0..255 of equal bins; -1 below the range."""
    edges = np.linspace(-1.0, 1.0, STATE_BINS + 1)[:-1]
    return " ".join(map(str, np.digitize(np.asarray(state), edges) - 1))


class FlowPrompts:
    """Encodes prompts of one format with one tokenizer."""

    def __init__(self, tokenizer_file: Path, form: PromptForm, *, tasks: Sequence[str] = ()) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_file: `tokenizer.json` of a checkpoint.
            form: prompt format of the checkpoint.
            tasks: the expected instructions; without states, the longest one sets the padded width.

        Raises:
            CheckpointError: the file is missing, damaged, or lacks the start token of the prompts.
        """
        fix = "Put the tokenizer.json of the language model into the checkpoint's folder"
        self._tokenizer = read_tokenizer(tokenizer_file, f"{fix} (pi0 and pi0.5: PaliGemma's; SmolVLA: SmolVLM2's).")
        self.form = form
        bos = None if form.bos is None else self._tokenizer.token_to_id(form.bos)
        if form.bos is not None and bos is None:
            raise CheckpointError(
                f"{tokenizer_file} has no token '{form.bos}', the start token of prompts; use the tokenizer of this "
                f"model."
            )
        self._head = () if bos is None else (bos,)
        self._tail = self._ids(form.tail) if form.tail else ()
        self._encode = lru_cache(maxsize=4096)(self._encode_text)
        self.width = 0 if form.reads_state else max((len(self.encode(task)) for task in tasks), default=0)

    def encode(self, task: str, state: npt.ArrayLike | None = None) -> tuple[int, ...]:
        """Return the token ids of an instruction and, in formats with state, of the normalised state [S].

        Raises:
            ConfigError: the prompt exceeds the model's maximum length.
        """
        ids = self._encode(self.form.text(task, "" if state is None else state_text(state)))
        if len(ids) > self.form.limit:
            raise ConfigError(
                f"The prompt of '{task}' has {len(ids)} tokens, but this model supports {self.form.limit}. "
                "Shorten the instruction."
            )
        return ids

    def batch(self, tasks: Sequence[str], states: FloatArray | None = None) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return token ids [B, W], padded on the right with zeros, and a mask that is False for padding.

        W is the width of the known tasks; a longer row widens the batch to a multiple of 16.
        """
        given = [None] * len(tasks) if states is None else list(states)
        assert not (self.form.reads_state and states is None), "these prompts need the state"
        rows = [self.encode(task, state) for task, state in zip(tasks, given, strict=True)]
        width = min(padded_width(self.width, max(map(len, rows))), self.form.limit)
        return pad_right(rows, width), np.arange(width) < np.array([[len(row)] for row in rows])

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return (*self._head, *self._ids(text), *self._tail)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
