import zlib

import numpy as np
import pytest

from embodyrl.plan.seeds import derive


def by_numpy(seed: int, *path: int | str) -> int:
    key = [zlib.crc32(p.encode()) if isinstance(p, str) else p for p in path]
    high, low = np.random.SeedSequence([seed, *key]).generate_state(2, np.uint32)
    return (int(high) << 31 | int(low) >> 1) & (2**63 - 1)


@pytest.mark.parametrize(
    ("seed", "path"), [(0, ()), (5, ("noise", 3, 7)), (2**40 + 3, ("x", 0, 1, 2, 3, 4)), (2**33, (2**35, "b", 9))]
)
def test_derived_seeds_match_numpy_seed_sequence(seed, path):
    assert derive(seed, *path) == by_numpy(seed, *path)


def test_batched_seeds_match_single_seeds():
    episodes = np.arange(100) * 7919
    found = derive(3, "noise", 4, episodes, episodes // 3)
    assert found.tolist() == [by_numpy(3, "noise", 4, int(e), int(e) // 3) for e in episodes]
