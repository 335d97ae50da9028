import numpy as np

from embodyrl.workers.rollout_worker import token_noise


def test_noise_depends_on_episode_and_chunk_only():
    batch = token_noise([(11, 0), (12, 3), (11, 1)], 56)
    assert np.array_equal(batch[1], token_noise([(12, 3)], 56)[0])
    assert np.array_equal(batch[0], token_noise([(99, 5), (11, 0)], 56)[1])
    assert len({row.tobytes() for row in batch}) == 3


def test_noise_is_uniform():
    noise = token_noise([(seed, 0) for seed in range(2000)], 7)
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    counts, _ = np.histogram(noise, bins=10, range=(0, 1))
    assert abs(counts - 1400).max() < 150  # 4 standard deviations of a fair bin
