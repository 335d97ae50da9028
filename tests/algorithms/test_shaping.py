import json
from dataclasses import replace

import numpy as np
import pytest
from algorithm_cases import LENGTHS, OLD_LOGPROB, REF_LOGPROB, REWARDS, VALID, make_episode, reference_episodes
from settings import algorithm_of

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import EstimatorInputs
from embodyrl.algorithms.settings import AlgorithmSettings, RewardNorm, TruncatedEpisodes
from embodyrl.algorithms.shaping import (
    ReturnScale,
    TaskOutcomes,
    adapt_beta,
    shape_rewards,
    subtract_kl,
)

REFERENCE = EstimatorInputs(
    logprob=tuple(OLD_LOGPROB[i, :length, None].astype(np.float32) for i, length in enumerate(LENGTHS)),
    ref_logprob=tuple(REF_LOGPROB[i, :length, None].astype(np.float32) for i, length in enumerate(LENGTHS)),
)


def outcomes(cfg: AlgorithmSettings) -> list[float]:
    return [episode.episode_return for episode in shape_rewards(reference_episodes(), cfg)]


def test_default_shaping_keeps_the_rewards():
    episodes = reference_episodes()
    assert shape_rewards(episodes, algorithm_of()) == episodes


def test_shaping_applies_bias_scale_and_clip():
    cfg = algorithm_of(reward_bias=0.5, reward_scale=2.0, reward_clip=3.0)
    np.testing.assert_allclose(outcomes(cfg), np.clip((np.array(REWARDS) + 0.5) * 2, -3, 3))
    np.testing.assert_allclose(outcomes(algorithm_of(reward_bias=-9.0, reward_clip=3.0)), -3)


def test_shaping_skips_outcomes_of_unfinished_episodes():
    """Fails if each part of a continued episode gets the bias of the whole episode."""
    first, last = make_episode([[1.0], [2.0]]), make_episode([[4.0]])
    shaped = shape_rewards([replace(first, cut=True, truncated=True), last], algorithm_of(reward_bias=10.0))
    assert [episode.episode_return for episode in shaped] == [3.0, 14.0]


def test_reward_scale_zero_leaves_only_the_kl():
    cfg = algorithm_of(reward_scale=0.0, kl_beta=1.0, group_size=3)
    batch = Algorithm(cfg).prepare(reference_episodes())
    assert not batch.advantage.any()
    assert batch.has_signal


def test_curriculum_ignores_unfinished_episodes():
    from embodyrl.plan.task_weights import record_outcomes

    won, lost = make_episode([[1.0]], success=True), make_episode([[0.0]])
    seen: TaskOutcomes = {}
    record_outcomes(seen, [won, lost, replace(lost, cut=True), replace(lost, cut=True)], by_task=True)
    assert seen == {"3": [1.0, 2.0]}
    record_outcomes(seen, [won], by_task=True)
    assert seen == {"3": [0.5 * 1.0 + 1.0, 0.5 * 2.0 + 1.0]}, "what was found earlier counts less"


def test_outcome_shaping_changes_the_last_action_only():
    episode = make_episode([[1.0, 2.0], [3.0, 9.0]], valid=[[True, True], [True, False]])
    (shaped,) = shape_rewards([episode], algorithm_of(reward_scale=2.0, reward_bias=1.0))
    np.testing.assert_allclose(shaped.reward, [[2, 4], [6 + 2, 0]])


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (RewardNorm.group, [0.999998, -0.999998, 0, 0.57735, -1.1547, 0.57735]),
        (RewardNorm.batch, (np.array(REWARDS) - np.mean(REWARDS)) / (np.std(REWARDS, ddof=1) + 1e-6)),
    ],
)
def test_reward_norm_standardizes_outcomes(norm: RewardNorm, expected):
    np.testing.assert_allclose(outcomes(algorithm_of(reward_norm=norm)), expected, atol=1e-5)


def test_truncated_episodes_are_masked_or_get_zero_reward():
    episodes = [
        make_episode([[reward]], episode_id=i, terminated=i != 2, first_record=i)
        for i, reward in enumerate((1.0, 0.0, 1.0))
    ]
    kept = {
        way: Algorithm(algorithm_of(group_size=3, truncated_episodes=way, normalize_advantages=False)).prepare(episodes)
        for way in TruncatedEpisodes
    }
    np.testing.assert_allclose(kept[TruncatedEpisodes.train].advantage[:, 0], [1 / 3, -2 / 3, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(kept[TruncatedEpisodes.zero_reward].advantage[:, 0], [2 / 3, -1 / 3, -1 / 3], atol=1e-6)
    np.testing.assert_array_equal(kept[TruncatedEpisodes.mask].episode, [0, 1])
    np.testing.assert_allclose(kept[TruncatedEpisodes.mask].advantage[:, 0], [1 / 3, -2 / 3], atol=1e-6)


def test_masked_failures_count_in_group_statistics():
    """Most failures end at the time limit: without masked failures, a group would contain only successes."""
    cfg = algorithm_of(
        group_size=3, truncated_episodes=TruncatedEpisodes.mask, filter_rewards=[0.1, 0.9], normalize_advantages=False
    )
    algorithm = Algorithm(cfg)
    episodes = [
        make_episode([[float(won)]], episode_id=i, terminated=won, success=won, first_record=i)
        for i, won in enumerate((True, False, False))
    ]
    # A refill hands on what was selected, to be selected again.
    batch = algorithm.prepare([episodes[i] for i in algorithm.select(episodes)])
    np.testing.assert_array_equal(batch.episode, [0])
    np.testing.assert_allclose(batch.advantage[:, 0], [2 / 3], atol=1e-6)


@pytest.mark.parametrize("adv_type", ["sac", "td3_bc", "filtered_bc", "iql"])
def test_unused_keys_do_not_change_the_batch_of_replay_algorithms(adv_type: str):
    episodes = [
        make_episode([[0.0], [reward]], episode_id=i, terminated=False, first_record=2 * i)
        for i, reward in enumerate((-2.0, 0.0, 3.0))
    ]
    unused = {"reward_bias": 10.0, "reward_clip": 1.0, "advantage_clip": [-1.0, 1.0], "reward_norm": RewardNorm.batch}
    unused |= {"truncated_episodes": TruncatedEpisodes.mask, "kl_beta": 0.1, "kl_in_reward": True}
    algorithm = Algorithm(algorithm_of(adv_type, **unused))
    batch, expected = algorithm.prepare(episodes), Algorithm(algorithm_of(adv_type)).prepare(episodes)
    np.testing.assert_array_equal(batch.records, expected.records)
    np.testing.assert_array_equal(batch.advantage, expected.advantage)
    assert batch.has_signal
    assert not algorithm.needs_reference


@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl"])
def test_kl_is_subtracted_from_the_rewards(kind: str):
    """GAE with lambda = gamma = 1 and zero values: the advantage is the return-to-go of r - beta KL."""
    beta = 0.5
    cfg = algorithm_of(
        adv_type="gae", group_size=1, normalize_advantages=False, kl_beta=beta, kl_in_reward=True, kl_penalty_type=kind
    )
    algorithm = Algorithm(cfg)
    assert algorithm.needs_reference_in_prepare
    batch = algorithm.prepare(reference_episodes(), REFERENCE)
    gap = OLD_LOGPROB - REF_LOGPROB
    cost = {"k1": gap, "k2": 0.5 * gap**2, "low_var_kl": np.exp(-gap) + gap - 1}[kind]
    reward = np.where(VALID, -beta * cost, 0.0)
    reward[np.arange(6), np.array(LENGTHS) - 1] += REWARDS
    to_go = reward[:, ::-1].cumsum(1)[:, ::-1]
    np.testing.assert_allclose(batch.returns[:, 0], to_go[VALID], atol=1e-5)
    assert batch.metrics["train/reward_kl"] == pytest.approx(cost[VALID].mean(), abs=1e-6)


def test_adaptive_kl_controller_matches_reference():
    assert adapt_beta(0.2, 0.3, target=0.1, samples=64, horizon=10000) == pytest.approx(0.200256)


def test_adaptive_kl_coefficient_is_saved_in_the_state():
    cfg = algorithm_of(group_size=3, kl_beta=0.2, kl_in_reward=True, kl_target=1e-4, kl_horizon=100)
    algorithm = Algorithm(cfg)
    first = algorithm.prepare(reference_episodes(), REFERENCE).metrics["train/kl_beta"]
    second = algorithm.prepare(reference_episodes(), REFERENCE).metrics["train/kl_beta"]
    assert (first, second) == (0.2, pytest.approx(0.2 * (1 + 0.2 * 6 / 100)))
    resumed = Algorithm(cfg)
    resumed.load_state(algorithm.state())
    assert resumed.state() == algorithm.state() != Algorithm(cfg).state()


def test_normalize_returns_uses_the_running_deviation():
    draw = np.random.default_rng(0)
    parts = [[make_episode(draw.normal(50, 20, (n, 1)).tolist()) for n in (7, 12)] for _ in range(3)]
    scale, sums = ReturnScale(0.9), []
    for number, episodes in enumerate(parts):
        if number == 2:  # as after a resume
            state, scale = scale.state(), ReturnScale(0.9)
            scale.load_state(state)
        shaped = scale.apply(episodes)
        for episode in episodes:
            total = 0.0
            for reward in episode.reward[:, 0]:
                total = 0.9 * total + float(reward)
                sums.append(total)
        for before, after in zip(episodes, shaped, strict=True):
            np.testing.assert_allclose(after.reward, before.reward / np.std(sums), rtol=1e-5)


def test_episode_continued_across_training_steps_counts_once():
    """Parts of the episode end in separate training steps, two of them in the last step."""
    rewards = np.random.default_rng(0).normal(3, 1, (12, 1)).tolist()
    whole, parts = ReturnScale(0.9), ReturnScale(0.9)
    whole.apply([make_episode(rewards)])
    first = replace(make_episode(rewards[:4]), cut=True)
    second = replace(make_episode(rewards[4:9], episode_id=1), cut=True, earlier=first.summary)
    parts.apply([first])
    parts.apply([second, replace(make_episode(rewards[9:], episode_id=2), earlier=second.summary)])
    ours, theirs = ({**scale.state(), "returns_cut": None} for scale in (parts, whole))
    assert ours == pytest.approx(theirs)


def test_unfinished_episode_is_not_truncated():
    """The episode is neither masked nor without reward: the value estimates the remaining return."""
    one = [[0.0]]
    cut = replace(make_episode([[1.0], [2.0]], value=one * 2, bootstrap=[0.5], terminated=False), cut=True)
    limited = make_episode([[4.0]], episode_id=1, value=one, bootstrap=[0.5], terminated=False, first_record=2)
    batch = Algorithm(algorithm_of("gae", truncated_episodes="mask")).prepare([cut, limited])
    assert batch.episode.tolist() == [0, 0]
    shaped = shape_rewards([cut, limited], algorithm_of("gae", truncated_episodes="zero_reward"))
    assert [episode.episode_return for episode in shaped] == [3.0, 0.0]


def test_returns_of_unfinished_episodes_are_saved_in_the_state():
    """A step repeated after a resume continues the episodes as the interrupted step did."""
    first, other = ReturnScale(0.9), ReturnScale(0.9)
    cut = replace(make_episode([[5.0], [7.0]], terminated=False), cut=True)
    first.apply([cut])
    other.load_state(json.loads(json.dumps(first.state())))
    last = replace(make_episode([[1.0]]), earlier=cut.summary)
    mine, theirs = (scale.apply([last])[0].reward for scale in (first, other))
    np.testing.assert_array_equal(mine, theirs)


def test_curriculum_outcomes_are_saved_in_the_state():
    from embodyrl.plan.task_weights import record_outcomes

    algorithm, other = (Algorithm(algorithm_of(curriculum=1.0)) for _ in range(2))
    record_outcomes(algorithm.task_outcomes, [make_episode([[1.0]], success=True)], by_task=True)
    other.load_state(json.loads(json.dumps(algorithm.state())))
    assert other.task_outcomes == algorithm.task_outcomes == {"3": [1.0, 1.0]}


def test_kl_is_subtracted_per_action():
    """Two actions of two tokens; the last one was not executed."""
    episode = make_episode([[1.0, 1.0], [1.0, 1.0]], valid=[[True, True], [True, False]])
    own = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 9.0, 9.0]], np.float32)
    (shaped,), kl = subtract_kl(
        [episode], EstimatorInputs(logprob=(own,), ref_logprob=(np.zeros_like(own),)), beta=2.0, kind="k1"
    )
    np.testing.assert_allclose(shaped.reward, 1 - 2 * np.array([[0.3, 0.7], [1.1, 0.0]]), rtol=1e-5)
    assert kl == pytest.approx(2.1 / 6)


def test_normalized_rewards_are_clipped():
    """One reward among a thousand zeros would be 31 deviations."""
    episodes = [make_episode([[0.0]] * 999), make_episode([[-50.0]], episode_id=1)]
    first, last = ReturnScale(0.9).apply(episodes)
    assert not first.reward.any()
    assert last.reward.tolist() == [[-10.0]]
