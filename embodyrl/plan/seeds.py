"""Seeds of named random streams, derived from the run's seed; independent of worker count and order of completion."""

import zlib
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 2**32 - 1
_POOL = 4


def _compute_hash_constants(first: int, factor: int, count: int) -> list[int]:
    return list(accumulate(repeat(factor, count), lambda value, multiplier: value * multiplier & _MASK, initial=first))


_MIXING, _DRAWING = (
    _compute_hash_constants(0x43B0D7E5, 0x931E8875, 64),
    _compute_hash_constants(0x8B51F9DD, 0x58F38DED, 2),
)


def derive(seed: int, *path: int | str | npt.NDArray[np.int64]) -> Any:
    """Return a 63-bit seed for a named stream, e.g. `derive(seed, "noise", step, episode)`.

    Arrays of numbers below 2**32 with equal shapes give an array of seeds. The numbers are those of numpy's
    `SeedSequence([seed, *path]).generate_state(2)`, which does not support arrays.
    """
    key = [zlib.crc32(p.encode()) if isinstance(p, str) else p for p in path]
    words = [word for number in (seed, *key) for word in _split_into_32_bit(number)]
    words += [0] * (_POOL - len(words))
    # Each use of a constant takes the next value, so the order of the calls below must not change.
    constants = iter(_MIXING)
    constant = next(constants)

    def mix(value: Any) -> Any:
        nonlocal constant
        value, constant = value ^ constant, next(constants)
        value = value * constant & _MASK
        return value ^ value >> 16

    def join(x: Any, y: Any) -> Any:
        value = (0xCA01F9DD * x & _MASK) - (0x4973F715 * y & _MASK) & _MASK
        return value ^ value >> 16

    pool = [mix(word) for word in words[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = join(pool[target], mix(pool[source]))
    for word in words[_POOL:]:
        pool = [join(value, mix(word)) for value in pool]
    high, low = ((pool[i] ^ _DRAWING[i]) * _DRAWING[i + 1] & _MASK for i in range(2))
    high, low = high ^ high >> 16, low ^ low >> 16
    return (high << 31 | low >> 1) & (2**63 - 1)


def _split_into_32_bit(number: int | npt.NDArray[np.int64]) -> list[int | npt.NDArray[np.int64]]:
    """Return the 32-bit words of a number, lowest first."""
    if not isinstance(number, int):
        return [number]
    return [number >> shift & _MASK for shift in range(0, max(number.bit_length(), 1), 32)]


def derive_small(seed: int, *path: int | str | npt.NDArray[np.int64]) -> Any:
    """Return a seed below 2**31, as simulators require (see `derive`)."""
    return derive(seed, *path) % (2**31)
