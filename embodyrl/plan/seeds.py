"""Every random stream is derived from the one seed by name, never from worker counts or arrival order."""

import zlib

import numpy as np


def derive(seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for a named stream, e.g. `derive(seed, "noise", step, episode)`."""
    key = [zlib.crc32(p.encode()) if isinstance(p, str) else int(p) for p in path]
    high, low = np.random.SeedSequence([seed, *key]).generate_state(2, np.uint32)
    return (int(high) << 31 | int(low) >> 1) & (2**63 - 1)


def derive_small(seed: int, *path: int | str) -> int:
    """Like `derive`, but below 2**31: what simulators accept as a seed."""
    return derive(seed, *path) % (2**31)
