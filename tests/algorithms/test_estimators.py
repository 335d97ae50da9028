"""Advantage estimators on whole episodes, through `prepare`."""

from dataclasses import replace

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
from settings import algorithm_of

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import ADVANTAGES, EstimatorInputs
from embodyrl.algorithms.settings import RewardLevel


@pytest.mark.parametrize("level", list(RewardLevel))
def test_reinforce_pp_matches_reference(level: RewardLevel):
    """With one action per chunk both levels are the token level of the reference."""
    cfg = algorithm_of(adv_type="reinforce_pp", group_size=1, gamma=GAMMA, reward_type=level)
    batch = Algorithm(cfg).prepare(reference_episodes())
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
def test_outcome_estimators_assign_one_advantage_per_episode(adv_type: str, expected: list[float]):
    batch = Algorithm(algorithm_of(adv_type=adv_type, group_size=3)).prepare(reference_episodes())
    np.testing.assert_allclose(batch.advantage[:, 0], np.repeat(expected, LENGTHS), atol=2e-6)


@pytest.mark.parametrize("adv_type", [n for n in ADVANTAGES.names() if ADVANTAGES.get(n).needs_groups])
def test_single_remaining_episode_of_a_crashed_group_has_zero_advantage(adv_type: str):
    rewards, groups = (1.0, 0.0, 1.0), (0, 0, 1)
    episodes = [
        make_episode([[reward]], episode_id=i, group=group, first_record=i)
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]
    algorithm = Algorithm(algorithm_of(adv_type=adv_type, group_size=2))
    batch = algorithm.prepare(episodes, EstimatorInputs(states=tuple(np.array([i]) for i in range(3))))
    assert batch.advantage[0, 0] > 0.4
    assert batch.advantage[2, 0] == 0


def test_gigpo_compares_steps_with_equal_states_within_a_group():
    """Two episodes of a group visit state 7; their returns-to-go there are 1 and 0."""
    episodes = [
        make_episode([[0.0], [1.0]], episode_id=0, first_record=0),
        make_episode([[0.0], [0.0]], episode_id=1, first_record=2),
    ]
    cfg = algorithm_of(adv_type="gigpo", group_size=2, gamma=0.5, normalize_advantages=False, step_advantage_weight=2.0)
    states = (np.array([5, 7]), np.array([6, 7]))
    algorithm = Algorithm(cfg)
    assert algorithm.estimator.needs_states
    batch = algorithm.prepare(episodes, EstimatorInputs(states=states))
    np.testing.assert_allclose(batch.advantage[:, 0], [0.5, 0.5 + 2 * 0.5, -0.5, -0.5 - 2 * 0.5])


def test_gigpo_skips_chunks_without_an_executed_action():
    """The third episode ended before its second chunk, whose record also contains state 7."""
    episodes = [
        make_episode([[0.0], [1.0]], episode_id=0),
        make_episode([[0.0], [0.0]], episode_id=1, first_record=2),
        make_episode([[0.5], [0.0]], episode_id=2, first_record=4, valid=[[True], [False]]),
    ]
    cfg = algorithm_of(adv_type="gigpo", group_size=3, gamma=0.5, normalize_advantages=False)
    batch = Algorithm(cfg).prepare(episodes, EstimatorInputs(states=tuple(np.array([i, 7]) for i in range(3))))
    np.testing.assert_allclose(batch.advantage[:, 0], [0.5, 0.5 + 0.5, -0.5, -0.5 - 0.5, 0.0])


def test_remax_applies_reward_shaping_to_the_greedy_episode():
    """Returns of the six episodes are 1, 0, 0.5, 2, -1, 2; one greedy episode was lost."""
    greedy = [make_episode([[r]]) for r in (1.0, 0.5, 1.0, 1.0, 1.0)]
    scores = EstimatorInputs(greedy=(*greedy, None))
    for scale in (1.0, 3.0):
        cfg = algorithm_of(adv_type="remax", loss_type="pg", group_size=1, reward_scale=scale)
        algorithm = Algorithm(cfg)
        assert algorithm.estimator.needs_greedy
        batch = algorithm.prepare(reference_episodes(), scores)
        expected = scale * np.repeat([0.0, -0.5, -0.5, 1.0, -2.0, 0.0], LENGTHS)
        np.testing.assert_allclose(batch.advantage[:, 0], expected, atol=1e-6)


def test_remax_uses_the_return_to_go():
    cfg = algorithm_of(adv_type="remax", loss_type="pg", group_size=1)
    batch = Algorithm(cfg).prepare([make_episode([[3.0], [1.0]])], EstimatorInputs(greedy=(make_episode([[2.0]]),)))
    np.testing.assert_allclose(batch.advantage[:, 0], [4.0 - 2.0, 1.0 - 2.0])


def test_remax_baselines_stay_aligned_after_masking():
    """The first episode was truncated; its greedy return of 5 must not affect the second episode."""
    episodes = [make_episode([[1.0]], terminated=False), make_episode([[4.0]], episode_id=1, first_record=1)]
    greedy = make_episode([[5.0]]), make_episode([[1.0]])
    batch = Algorithm(algorithm_of("remax", "pg", truncated_episodes="mask")).prepare(
        episodes, EstimatorInputs(greedy=greedy)
    )
    assert batch.episode.tolist() == [1]
    assert batch.advantage.tolist() == [[3.0]]


def test_gigpo_states_stay_aligned_after_filtering():
    """Both members of the first group succeed; the second group gets the credit that it would get alone."""
    outcomes = ((0, True), (0, True), (1, True), (1, False))
    episodes = [
        make_episode([[float(won)], [2.0 * won]], episode_id=i, group=group, success=won, first_record=2 * i)
        for i, (group, won) in enumerate(outcomes)
    ]
    states = tuple(np.array(own) for own in ([1, 2], [1, 2], [3, 3], [3, 4]))
    algorithm = Algorithm(algorithm_of("gigpo", filter_rewards=[0.4, 0.6], group_size=2))
    whole = algorithm.prepare(episodes, EstimatorInputs(states=states))
    alone = algorithm.prepare(episodes[2:], EstimatorInputs(states=states[2:]))
    np.testing.assert_array_equal(whole.episode, [2, 2, 3, 3])
    np.testing.assert_allclose(whole.advantage, alone.advantage)
    assert len(set(alone.advantage[:, 0].tolist())) > 2


def test_gdpo_uses_the_reward_components():
    parts = [(1.0, 0.0), (0.0, 0.0), (1.0, 40.0), (1.0, 0.0)]
    episodes = [
        replace(make_episode([[0.0]], episode_id=i, group=i // 2, first_record=i), components=np.array([part]))
        for i, part in enumerate(parts)
    ]
    algorithm = Algorithm(algorithm_of(adv_type="gdpo", group_size=2))
    batch = algorithm.prepare(episodes, EstimatorInputs(part_weights=(1.0, 0.5)))
    # Within pairs both parts become +-1/sqrt(2), whatever their size; the second one counts half.
    np.testing.assert_allclose(batch.advantage[:, 0] / batch.advantage[2, 0], [2.0, -2.0, 1.0, -1.0], atol=1e-4)


def test_advantage_clip_bounds_advantages():
    cfg = algorithm_of(group_size=3, advantage_clip=[-1.0, 0.5])
    batch = Algorithm(cfg).prepare(reference_episodes())
    assert batch.advantage.min() == -1.0
    assert batch.advantage.max() == 0.5


@pytest.mark.parametrize("per_task", [False, True])
def test_whitening_counts_executed_actions_only(per_task: bool):
    """Advantages of actions; the first episode ends within its second chunk, whose last reward does not count."""
    keys = {"gamma": 1.0, "reward_type": RewardLevel.action_level, "normalize_per_task": per_task}
    cfg = algorithm_of(adv_type="gae", group_size=1, normalize_advantages=True, **keys)
    ran, zeros = [[True, True], [True, False]], np.zeros((2, 2))
    first = make_episode([[1.0, 0.0], [2.0, 5.0]], valid=ran, value=zeros, bootstrap=[0.0, 0.0])
    second = make_episode([[0.0, 1.0]], episode_id=1, value=zeros[:1], bootstrap=[0.0, 0.0], first_record=2)
    earned = np.array([3.0, 2.0, 2.0, 1.0, 1.0])
    white = (earned - earned.mean()) / earned.std(ddof=1)
    found = Algorithm(cfg).prepare([first, second]).advantage
    np.testing.assert_allclose(found, [white[:2], [white[2], 0.0], white[3:]], atol=1e-6)


def test_normalize_per_task_balances_reward_scales():
    """Rewards of one task are a hundred times larger; whitened together, the other task would have almost no weight."""
    episodes = []
    for i, (task, scale) in enumerate([(3, 1.0), (5, 100.0), (3, 2.0), (5, 300.0)]):
        episode = make_episode(
            [[scale], [0.0], [2 * scale]], episode_id=i, value=[[0.0]] * 3, bootstrap=[0.0], first_record=3 * i
        )
        episodes.append(replace(episode, spec=replace(episode.spec, task_id=task)))
    small = np.repeat([True, False, True, False], 3)
    together, apart = (
        Algorithm(algorithm_of(adv_type="gae", group_size=1, gamma=0.9, normalize_per_task=each)).prepare(episodes)
        for each in (False, True)
    )
    assert np.abs(together.advantage[small]).max() < 1
    assert together.advantage[small].std() < 0.02
    for own in (small, ~small):
        np.testing.assert_allclose(apart.advantage[own].mean(), 0, atol=1e-6)
        np.testing.assert_allclose(apart.advantage[own].std(ddof=1), 1, atol=1e-5)
    np.testing.assert_array_equal(apart.returns, together.returns)


def test_filtered_bc_weights_all_actions_of_successful_episodes():
    """Only the return of executed actions is compared with the threshold."""
    from embodyrl.algorithms.off_policy.filtered_bc import FilteredSettings, compute_filtered_credits

    good, bad = (make_episode([[reward], [reward]], valid=[[True], [reward > 0.5]]) for reward in (0.6, 0.5))
    credits = compute_filtered_credits([good, bad], EstimatorInputs(), FilteredSettings(imitate_above=1.0))
    assert [credit.advantage.tolist() for credit in credits] == [[[1.0], [1.0]], [[0.0], [0.0]]]


def test_opo_baseline_is_weighted_by_executed_actions():
    """Lengths 1 and 4 with one chunk each: the baseline of returns 1 and 0 is 1 / 5."""
    episodes = [
        make_episode([[1.0, 0, 0, 0]], valid=[[True, False, False, False]], episode_id=0),
        make_episode([[0.0, 0, 0, 0]], episode_id=1, first_record=1),
    ]
    batch = Algorithm(algorithm_of(adv_type="opo", group_size=2)).prepare(episodes)
    np.testing.assert_allclose(batch.advantage[:, 0], [1 - 0.2, -0.2], rtol=1e-6)


@pytest.mark.parametrize(("unbiased", "scale"), [(True, np.sqrt(1 / 2)), (False, 1 / 2)])
def test_std_unbiased_selects_the_denominator(unbiased: bool, scale: float):
    """Returns 1 and 0, each half of their difference from the mean; steps of one state use the same denominator."""
    episodes = [make_episode([[won]], episode_id=i, first_record=i) for i, won in enumerate((1.0, 0.0))]
    found = Algorithm(algorithm_of(group_size=2, std_unbiased=unbiased)).prepare(episodes)
    np.testing.assert_allclose(found.advantage[:, 0], np.array([0.5, -0.5]) / scale, rtol=1e-5)
    same = EstimatorInputs(states=(np.array([7]), np.array([7])))
    found = Algorithm(algorithm_of(adv_type="gigpo", group_size=2, std_unbiased=unbiased)).prepare(episodes, same)
    np.testing.assert_allclose(found.advantage[:, 0], np.array([1.0, -1.0]) / scale, rtol=1e-5)
