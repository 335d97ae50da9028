"""Instructions to token ids, read from tokenizer.json with the `tokenizers` package: no remote code."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from embodyrl.errors import CheckpointError
from embodyrl.types import IntArray

EMPTY_PIECE = "▁"
TEMPLATE = "In: What action should the robot take to {instruction}?\nOut:"
WIDTH_STEP = 16


class PromptEncoder:
    """Encodes instructions with one tokenizer, at a width fixed by the known tasks."""

    def __init__(self, tokenizer_file: Path, *, bos_token_id: int, tasks: Sequence[str] = ()) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_file: `tokenizer.json` of a checkpoint.
            bos_token_id: id put before every prompt.
            tasks: the instructions to expect; the longest one sets the padded width.

        Raises:
            CheckpointError: the file is missing or is not a Llama tokenizer.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{tokenizer_file} cannot be read: {error}. Fetch the file again.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        empty = self._tokenizer.token_to_id(EMPTY_PIECE)
        if empty is None:
            raise CheckpointError(
                f"{tokenizer_file} has no piece '{EMPTY_PIECE}', so it is not a Llama tokenizer; every prompt of "
                f"OpenVLA-OFT ends in it. Take tokenizer.json from the checkpoint's own repository."
            )
        self.empty_token_id: int = empty
        self._bos = bos_token_id
        self.encode = lru_cache(maxsize=4096)(self._encode)
        self.width = max((len(self.encode(task)) for task in tasks), default=0)

    def _encode(self, instruction: str) -> tuple[int, ...]:
        """Token ids of one instruction, from BOS to the empty token that stands for the space after `Out:`."""
        text = TEMPLATE.format(instruction=instruction.lower())
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        tail = [] if ids[-1] == self.empty_token_id else [self.empty_token_id]
        return (self._bos, *ids, *tail)

    def batch(self, instructions: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Return ids [B, W] padded right with zeros, and lengths [B].

        W is the fixed width; only a longer, unexpected instruction widens the batch, to a multiple of 16.
        """
        rows = [self.encode(instruction) for instruction in instructions]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        longest = int(lengths.max())
        width = self.width if longest <= self.width else -(-longest // WIDTH_STEP) * WIDTH_STEP
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for row, encoded in zip(ids, rows, strict=True):
            row[: len(encoded)] = encoded
        return ids, lengths
