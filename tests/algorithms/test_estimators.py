"""Estimators from episodes to credits, through `prepare`."""

import numpy as np
import pytest
from algorithm_cases import (
    GAMMA,
    LENGTHS,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    VALID,
    make_episode,
    reference_episodes,
)

from embodyrl.algorithms import ADVANTAGES, build_algorithm
from embodyrl.algorithms.protocol import Scores
from embodyrl.config.schema import AlgorithmConfig, RewardLevel


@pytest.mark.parametrize("level", list(RewardLevel))
def test_reinforce_pp_reference(level: RewardLevel):
    """With one action per chunk both levels are the token level of the reference."""
    cfg = AlgorithmConfig(adv_type="reinforce_pp", group_size=1, gamma=GAMMA, reward_type=level)
    batch = build_algorithm(cfg).prepare(reference_episodes())
    np.testing.assert_allclose(batch.advantage[:, 0], np.array(REINFORCE_PP)[VALID], atol=2e-6)


@pytest.mark.parametrize(
    ("adv_type", "expected"),
    [
        ("reinforce_pp_baseline", REINFORCE_PP_BASELINE),
        ("rloo", [0.75, -0.75, 0, 1.5, -3, 1.5]),
        ("opo", [0.416667, -0.583333, -0.083333, 1.875, -1.125, 1.875]),
        ("gpg", [0.6, -0.6, 0, 1.2, -2.4, 1.2]),
        ("pass_at_k", [0.5 / 0.5, 0, 0, 0, 0, 0]),
    ],
)
def test_one_number_per_episode(adv_type: str, expected: list[float]):
    batch = build_algorithm(AlgorithmConfig(adv_type=adv_type, group_size=3)).prepare(reference_episodes())
    np.testing.assert_allclose(batch.advantage[:, 0], np.repeat(expected, LENGTHS), atol=2e-6)


@pytest.mark.parametrize("adv_type", [n for n in ADVANTAGES.names() if ADVANTAGES.get(n).needs_groups])
def test_the_last_member_of_a_group_lost_to_crashes_gets_no_advantage(adv_type: str):
    rewards, groups = (1.0, 0.0, 1.0), (0, 0, 1)
    episodes = [
        make_episode([[reward]], episode_id=i, group=group, first_record=i)
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]
    algorithm = build_algorithm(AlgorithmConfig(adv_type=adv_type, group_size=2, std_unbiased=True))
    batch = algorithm.prepare(episodes, Scores(states=tuple(np.array([i]) for i in range(3))))
    assert batch.advantage[0, 0] > 0.4
    assert batch.advantage[2, 0] == 0


def test_gigpo_compares_steps_from_equal_states_within_a_group():
    """Two episodes of one group meet in state 7; returns-to-go there are 1 and 0."""
    episodes = [
        make_episode([[0.0], [1.0]], episode_id=0, first_record=0),
        make_episode([[0.0], [0.0]], episode_id=1, first_record=2),
    ]
    cfg = AlgorithmConfig(
        adv_type="gigpo", group_size=2, gamma=0.5, normalize_advantages=False, step_advantage_weight=2.0
    )
    states = (np.array([5, 7]), np.array([6, 7]))
    algorithm = build_algorithm(cfg)
    assert algorithm.needs_states
    batch = algorithm.prepare(episodes, Scores(states=states))
    np.testing.assert_allclose(batch.advantage[:, 0], [0.5, 0.5 + 2 * 0.5, -0.5, -0.5 - 2 * 0.5])


def test_advantages_are_clipped_where_asked():
    cfg = AlgorithmConfig(adv_type="rloo", group_size=3, advantage_clip=[-1.0, 0.5])
    batch = build_algorithm(cfg).prepare(reference_episodes())
    assert batch.advantage.min() == -1.0
    assert batch.advantage.max() == 0.5
