"""Random numbers for sampling actions, as a function of episode and chunk only, not of worker or batch composition."""

import threading
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from embodyrl.types import FloatArray


def generate_token_noise(seeds: npt.ArrayLike, chunks: npt.ArrayLike, tokens_per_chunk: int) -> FloatArray:
    """Return uniform random numbers [B, L] in [0, 1) for episode noise seeds [B] and chunk indices [B].

    Philox 4x64-10 is counter-based (Salmon et al. 2011): the episode is the key and the chunk the counter, so the noise
    of any chunk is computed directly. The numbers equal those of numpy's float32 generator, which has only one stream;
    this function computes all rows together.
    """
    seeds, chunks = np.asarray(seeds, np.uint64), np.asarray(chunks, np.uint64)
    if len(seeds) < _MIN_VECTORIZED_ROWS:
        return _generate_rows(seeds, chunks, tokens_per_chunk)
    blocks = -(-tokens_per_chunk // 8)
    # Words 0 and 2 of the counter, and 3 and 1. The first word counts the blocks of a chunk, from 1.
    even, odd, key = np.zeros((3, 2, len(seeds) * blocks), np.uint64)
    even[0] = np.tile(np.arange(1, blocks + 1, dtype=np.uint64), len(seeds))
    odd[0], key[1] = chunks.repeat(blocks), seeds.repeat(blocks)
    factors, upper, lower, steps = np.repeat(_CONSTANTS, len(seeds) * blocks, axis=2)
    for _ in range(10):
        # The upper 64 bits of the 128-bit products, in place, because few arrays fit in the cache.
        above, below = even >> _HALF, even & _LOW
        across = lower * below
        across >>= _HALF
        across += upper * below
        high = upper * above
        high += across >> _HALF
        above *= lower
        across &= _LOW
        above += across
        above >>= _HALF
        high += above
        # Both halves of a round in one operation: `[::-1]` swaps the products between the words.
        high ^= odd
        high ^= key
        even, odd = high[::-1], factors * even
        key += steps
    # Each 64-bit number gives two 32-bit numbers, the low one first, of which 24 bits are used.
    bits = np.stack([even[0], odd[1], even[1], odd[0]], axis=-1).astype("<u8").view("<u4").reshape(len(seeds), -1)
    return (bits[:, :tokens_per_chunk] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


_MIN_VECTORIZED_ROWS = 32
"""Number of rows above which array operations are faster than a generator per row."""
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_FACTORS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)[:, None]
_KEY_STEPS = np.array([0xBB67AE8584CAA73B, 0x9E3779B97F4A7C15], np.uint64)[:, None]
_CONSTANTS = np.stack([_FACTORS, _FACTORS >> _HALF, _FACTORS & _LOW, _KEY_STEPS])


def _generate_rows(seeds: npt.NDArray[np.uint64], chunks: npt.NDArray[np.uint64], tokens_per_chunk: int) -> FloatArray:
    philox, generator, state = _get_generator(threading.get_ident())
    key, counter = state["state"]["key"], state["state"]["counter"]
    noise = np.empty((len(seeds), tokens_per_chunk), dtype=np.float32)
    for row, (seed, chunk) in enumerate(zip(seeds.tolist(), chunks.tolist(), strict=True)):
        key[0], counter[3] = seed, chunk
        philox.state = state
        generator.random(out=noise[row], dtype=np.float32)
    return noise


@lru_cache(maxsize=8)
def _get_generator(thread: int) -> tuple[np.random.Philox, np.random.Generator, Any]:
    """Return a thread's cached generator and its state; creating a generator would read system entropy."""
    philox = np.random.Philox(key=0)
    state = cast(Any, philox.state)
    # Lists: the setter reads single numbers, which takes twice as long with arrays.
    state["state"], state["buffer"] = {"key": [0, 0], "counter": [0, 0, 0, 0]}, [0, 0, 0, 0]
    return philox, np.random.Generator(philox), state
