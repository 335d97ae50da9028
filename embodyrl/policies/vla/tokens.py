"""Loading of `tokenizer.json` with the package `tokenizers`, and padding of token ids. No remote code is executed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from embodyrl.errors import CheckpointError
from embodyrl.types import IntArray

WIDTH_STEP = 16


def read_tokenizer(file: Path, fix: str) -> Tokenizer:
    """Read `tokenizer.json`, without a length limit.

    Raises:
        CheckpointError: the file is missing or damaged; the message ends with the sentence `fix`.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {error}. {fix}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def compute_padded_width(known: int, longest: int) -> int:
    """Return the padded width of a batch: the width for known tasks, or a multiple of 16 for longer prompts."""
    # Every new width is a new tensor shape, for which kernels are compiled and CUDA graphs are captured.
    return known if longest <= known else -(-longest // WIDTH_STEP) * WIDTH_STEP


def pad_right(rows: Sequence[Sequence[int]], width: int) -> IntArray:
    """Pad lists of token ids with zeros on the right; return [B, W]."""
    ids = np.zeros((len(rows), width), np.int64)
    for row, encoded in zip(ids, rows, strict=True):
        row[: len(encoded)] = encoded
    return ids
