"""Padding of token ids."""

from collections.abc import Sequence

import numpy as np

from embodyrl.types import IntArray

WIDTH_STEP = 16


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
