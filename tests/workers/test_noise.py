import numpy as np
import pytest

from embodyrl.workers.noise import generate_token_noise


def test_noise_depends_on_episode_and_chunk_only():
    batch = generate_token_noise([11, 12, 11], [0, 3, 1], 56)
    assert np.array_equal(batch[1], generate_token_noise([12], [3], 56)[0])
    assert np.array_equal(batch[0], generate_token_noise([99, 11], [5, 0], 56)[1])
    assert len({row.tobytes() for row in batch}) == 3


def test_token_noise_is_uniform():
    noise = generate_token_noise(range(2000), [0] * 2000, 7)
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    counts, _ = np.histogram(noise, bins=10, range=(0, 1))
    assert abs(counts - 1400).max() < 150  # 4 standard deviations of a fair bin


@pytest.mark.parametrize("repeats", [1, 20])
@pytest.mark.parametrize("tokens", [1, 7, 8, 56])
def test_noise_matches_philox(tokens, repeats):
    philox = np.random.Philox(key=0)
    seeds, chunks = [0, 11, 2**63 - 1] * repeats, [0, 3, 2**20] * repeats
    for row, seed, chunk in zip(generate_token_noise(seeds, chunks, tokens), seeds, chunks, strict=True):
        state = philox.state
        state["state"]["key"][0], state["state"]["counter"][:] = seed, [0, 0, 0, chunk]
        state["buffer_pos"], state["has_uint32"] = 4, 0
        philox.state = state
        assert np.array_equal(row, np.random.Generator(philox).random(tokens, dtype=np.float32))
