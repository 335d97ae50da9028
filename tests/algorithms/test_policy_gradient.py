import math
from dataclasses import fields, replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from algorithm_cases import (
    GAE_RAW,
    GAE_RETURNS,
    GAE_WHITENED,
    GRPO_REFERENCE,
    LENGTHS,
    VALID,
    make_episode,
    reference_episodes,
)
from settings import algorithm_of

from embodyrl.algorithms.metrics import compute_metrics, merge_metrics
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import LOSSES, LossInputs, LossTerms, LossUnits, PolicyLoss
from embodyrl.algorithms.settings import AggregationMode, AlgorithmSettings, RewardLevel, TokenLevel
from embodyrl.errors import ConfigError, NonFiniteError
from embodyrl.types import Episode, PolicyScores, PreparedBatch

K, D = 3, 2


def gae_config(**changes) -> AlgorithmSettings:
    return algorithm_of(adv_type="gae", group_size=1, gamma=0.9, gae_lambda=0.8, **changes)


def ragged_episodes(value_dim: int) -> list[Episode]:
    """Four episodes in two groups with K = 3; the last ends after the first action of its second chunk."""
    rng = np.random.default_rng(3)
    episodes = []
    for i, chunks in enumerate((2, 1, 3, 2)):
        valid = np.ones((chunks, K), dtype=bool)
        valid[-1, 1:] = i != 3
        episodes.append(
            make_episode(
                np.where(valid, rng.normal(size=(chunks, K)), 0),
                episode_id=i,
                group=i // 2,
                valid=valid,
                value=rng.normal(size=(chunks, value_dim)),
                bootstrap=rng.normal(size=value_dim),
                terminated=i != 2,
                first_record=10 * i,
            )
        )
    return episodes


def compute_scores(batch: PreparedBatch, value_dim: int) -> tuple[torch.Tensor, PolicyScores]:
    """A differentiable policy output for every sample; the leaf is [B, 3, L]."""
    size, tokens = len(batch.records), K * D
    raw = torch.randn(size, 3, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = (0.2 * raw).requires_grad_()
    return leaf, PolicyScores(logprob=leaf[:, 0] - 1.0, entropy=leaf[:, 1] + 1.0, value=leaf[:, 2, :value_dim])


def inputs_of(algorithm: Algorithm, batch: PreparedBatch, value_dim: int) -> LossInputs:
    generator = torch.Generator().manual_seed(1)
    size, tokens = len(batch.records), K * D
    weights = algorithm.weights(batch, range(size))

    def noise(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    return LossInputs(
        old_logprob=noise(size, tokens) - 1.0,
        ref_logprob=noise(size, tokens) - 1.0,
        advantage=torch.from_numpy(batch.advantage).double(),
        returns=torch.from_numpy(batch.returns).double(),
        old_value=noise(size, value_dim),
        valid=torch.from_numpy(batch.valid),
        weight=torch.from_numpy(weights.policy).double(),
        value_weight=torch.from_numpy(weights.value).double(),
        positive_weight=torch.from_numpy(weights.positive).double(),
    )


def rows(inputs: LossInputs, part: list[int]) -> LossInputs:
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return LossInputs(
        **{name: value[part] if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    )


def run_split(algorithm: Algorithm, batch: PreparedBatch, value_dim: int, parts: list[list[int]]):
    leaf, scores = compute_scores(batch, value_dim)
    inputs = inputs_of(algorithm, batch, value_dim)
    measured, total = [], torch.zeros((), dtype=torch.float64)
    for part in parts:
        own = PolicyScores(logprob=scores.logprob[part], entropy=scores.entropy[part], value=scores.value[part])
        loss, found = algorithm.loss(own, rows(inputs, part))
        total = total + loss
        measured.append(found)
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.item(), gradient, merge_metrics(compute_metrics(measured))


@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("level", list(TokenLevel))
def test_loss_and_metrics_are_micro_batch_independent(mode: str, level: TokenLevel):
    cfg = gae_config(
        loss_agg_func=mode, logprob_type=level, entropy_type=level, kl_beta=0.1, entropy_bonus=0.01, huber_delta=0.5
    )
    algorithm = Algorithm(cfg)
    batch = algorithm.prepare(ragged_episodes(1))
    assert len(batch.records) == 8
    whole = run_split(algorithm, batch, 1, [list(range(8))])
    for parts in ([[i] for i in range(8)], [[5, 0, 7], [1, 6], [4, 3, 2]]):
        loss, gradient, metrics = run_split(algorithm, batch, 1, parts)
        assert loss == pytest.approx(whole[0], abs=1e-12)
        torch.testing.assert_close(gradient, whole[1], atol=1e-12, rtol=1e-9)
        assert metrics == pytest.approx(whole[2], abs=1e-12)
    assert whole[1].abs().sum() > 0


WHOLE_BATCH_STATISTICS = {"clip_cov", "kl_cov"}
"""Losses with micro-batch statistics, which depend on the micro-batch size."""


@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("loss_type", [name for name in LOSSES.names() if name not in WHOLE_BATCH_STATISTICS])
def test_two_ranks_match_the_gradient_of_one(mode: str, loss_type: str):
    """Ranks with different numbers of valid tokens; gradients are averaged, so each rank multiplies its loss by 2."""
    own = {"ratio_max": 1.1} if loss_type.startswith("aipo") else {}
    cfg = gae_config(
        loss_type=loss_type, loss_agg_func=mode, positive_nll_coef=0.3, off_policy_masking_delta=0.01, **own
    )
    algorithm = Algorithm(cfg)
    batch = algorithm.prepare(ragged_episodes(1))
    loss, gradient, _ = run_split(algorithm, batch, 1, [list(range(8))])
    ranks = [run_split(algorithm, batch, 1, parts) for parts in ([[0], [7, 1]], [[2, 3, 4], [5, 6]])]
    assert np.mean([2 * rank[0] for rank in ranks]) == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close((2 * ranks[0][1] + 2 * ranks[1][1]) / 2, gradient, atol=1e-12, rtol=1e-9)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("level", list(TokenLevel))
def test_unexecuted_actions_do_not_affect_the_loss(level: TokenLevel):
    cfg = gae_config(logprob_type=level, entropy_type=level, kl_beta=0.1, entropy_bonus=0.01)
    algorithm = Algorithm(cfg)
    batch = algorithm.prepare(ragged_episodes(1))
    leaf, scores = compute_scores(batch, 1)
    inputs = inputs_of(algorithm, batch, 1)
    dead = ~torch.from_numpy(batch.valid).repeat_interleave(D, dim=1)
    assert dead.sum() == 2 * D
    with_nan = LossInputs(
        **{name: getattr(inputs, name) for name in inputs.__slots__ if name != "old_logprob"},
        old_logprob=inputs.old_logprob.masked_fill(dead, float("nan")),
    )
    loss, _ = algorithm.loss(scores, inputs)
    poisoned, _ = algorithm.loss(scores, with_nan)
    assert poisoned.item() == loss.item()
    (gradient,) = torch.autograd.grad(poisoned, leaf)
    assert (gradient[:, 0][dead] == 0).all()
    assert (gradient[:, 0][~dead] != 0).any()


def two_sample_loss(level: TokenLevel, mode: str = "token-mean") -> dict[str, float]:
    """One episode of two chunks, K = D = 2; the second chunk ended after one action; no clipping."""
    cfg = algorithm_of(logprob_type=level, loss_agg_func=mode, clip_ratio_low=0.99, clip_ratio_high=10.0)
    algorithm = Algorithm(cfg, longest_episode=2)
    episodes = [
        make_episode([[0, 0], [1, 0]], valid=[[True, True], [True, False]], episode_id=0),
        make_episode([[0, 0]], episode_id=1, first_record=5),
    ]
    batch = algorithm.prepare(episodes)
    weights = algorithm.weights(batch, range(2))  # the optimizer step holds episode 0 only
    new = torch.log(torch.tensor([[2.0, 1.0, 1.0, 3.0], [0.5, 1.0, 9.0, 9.0]], dtype=torch.float64))
    inputs = LossInputs(
        old_logprob=torch.zeros(2, 4, dtype=torch.float64),
        ref_logprob=None,
        advantage=torch.from_numpy(batch.advantage[:2]).double(),
        returns=torch.zeros(2, 0),
        old_value=torch.zeros(2, 0),
        valid=torch.from_numpy(batch.valid[:2]),
        weight=torch.from_numpy(weights.policy).double(),
        value_weight=torch.from_numpy(weights.value).double(),
        positive_weight=torch.from_numpy(weights.positive).double(),
    )
    scores = PolicyScores(logprob=new, entropy=torch.ones(2, 4).double(), value=torch.zeros(2, 0))
    loss, measured = algorithm.loss(scores, inputs)
    return {"total": loss.item(), **merge_metrics(compute_metrics([measured]))}


ADVANTAGE = (1 - 0.5) / (math.sqrt(0.5) + 1e-6)


@pytest.mark.parametrize(
    ("level", "mode", "ratio_sum"),
    [
        # tokens 2 1 1 3 | 0.5 1; actions 2 3 | 0.5; chunks 6 | 0.5
        (TokenLevel.token_level, "token-mean", (2 + 1 + 1 + 3 + 0.5 + 1) / 6),
        (TokenLevel.action_level, "token-mean", (2 + 3 + 0.5) / 3),
        (TokenLevel.chunk_level, "token-mean", (6 + 0.5) / 2),
        (TokenLevel.token_level, "token-sum", 8.5),
        (TokenLevel.action_level, "token-sum", 5.5),
        (TokenLevel.chunk_level, "token-sum", 6.5),
        (TokenLevel.token_level, "seq-mean-token-sum-norm", 8.5 / 8),
        (TokenLevel.action_level, "seq-mean-token-sum-norm", 5.5 / 4),
        (TokenLevel.chunk_level, "seq-mean-token-sum-norm", 6.5 / 2),
    ],
)
def test_ratios_of_every_level_match_hand_computed_values(level: TokenLevel, mode: str, ratio_sum: float):
    metrics = two_sample_loss(level, mode)
    assert metrics["total"] == pytest.approx(-ADVANTAGE * ratio_sum, rel=1e-6)


def test_seq_mean_token_sum_norm_is_batch_independent():
    """Dr.GRPO (arXiv 2503.20783): the time limit of 10 chunks, independent of filtered and sampled episodes."""
    cfg = algorithm_of(loss_agg_func="seq-mean-token-sum-norm", normalize_advantages=False)
    algorithm = Algorithm(cfg, longest_episode=10)
    batch = algorithm.prepare([make_episode([[r]] * n, episode_id=n, first_record=9 * n) for n, r in ((1, 1), (3, 0))])
    for samples, sequences in (([0], 1), ([1, 2, 3], 1), ([0, 1, 2], 2)):
        np.testing.assert_allclose(algorithm.weights(batch, samples).policy, 1 / (sequences * 10), rtol=1e-6)


def test_metrics_are_means_for_every_aggregation():
    mean, total = (two_sample_loss(TokenLevel.token_level, mode) for mode in ("token-mean", "token-sum"))
    for name in ("ratio", "kl", "entropy", "logprob_gap", "clip_fraction"):
        assert total[name] == pytest.approx(mean[name], rel=1e-6)
    assert mean["ratio"] == pytest.approx(8.5 / 6)
    assert mean["ratio_max"] == pytest.approx(3.0)
    assert mean["logprob_gap"] == pytest.approx((math.log(2) * 2 + math.log(3)) / 6)
    assert mean["kl"] == pytest.approx(8.5 / 6 - 1 - (math.log(2) + math.log(3) - math.log(2)) / 6)


@pytest.mark.parametrize(
    ("entropy_type", "expected"),
    [(TokenLevel.token_level, 1.0), (TokenLevel.action_level, 2.0), (TokenLevel.chunk_level, 3.0)],
)
def test_entropy_bonus_uses_the_entropy_level(entropy_type: TokenLevel, expected: float):
    """K = D = 2: two chunks of entropy 1 per token, one with both actions executed and one with the first only."""
    episodes = [
        make_episode([[0, 1]], episode_id=0),
        make_episode([[0, 0]], episode_id=1, valid=[[True, False]], first_record=1),
    ]
    losses = []
    for bonus in (0.0, 0.5):
        cfg = algorithm_of(logprob_type=TokenLevel.chunk_level, entropy_type=entropy_type, entropy_bonus=bonus)
        algorithm = Algorithm(cfg)
        batch = algorithm.prepare(episodes)
        weights = algorithm.weights(batch, [0, 1])
        zeros, empty = torch.zeros(2, 4), torch.zeros(2, 0)
        loss, measured = algorithm.loss(
            PolicyScores(logprob=zeros, entropy=torch.ones(2, 4), value=empty),
            LossInputs(
                old_logprob=zeros,
                ref_logprob=None,
                advantage=torch.from_numpy(batch.advantage),
                returns=empty,
                old_value=empty,
                valid=torch.from_numpy(batch.valid),
                weight=torch.from_numpy(weights.policy),
                value_weight=torch.from_numpy(weights.value),
                positive_weight=torch.from_numpy(weights.positive),
            ),
        )
        losses.append(loss.item())
        assert compute_metrics([measured])[0]["entropy"] == pytest.approx(expected)
    assert losses[1] - losses[0] == pytest.approx(-0.5 * expected, abs=1e-6)


def test_metrics_skip_tokens_without_logprob():
    """Records of a flow, or of a correction, contain more tokens per action than log-probabilities."""
    new = torch.log(torch.tensor([[2.0, 1.0, 1.0, 3.0]])).reshape(1, 2, 2)
    found = []
    for padding, scored in ((0, 0), (3, 2)):
        algorithm = Algorithm(algorithm_of(clip_ratio_low=0.2, clip_ratio_high=0.2), scored=scored)
        batch = algorithm.prepare([make_episode([[0, 1]]), make_episode([[0, 0]], episode_id=1, first_record=1)])
        weights = algorithm.weights(batch, [0])
        logprob, entropy = (F.pad(part, (0, padding)).flatten(1) for part in (new, 2 * torch.ones_like(new)))
        inputs = LossInputs(
            old_logprob=torch.zeros_like(logprob),
            ref_logprob=None,
            advantage=torch.from_numpy(batch.advantage[:1]),
            returns=torch.zeros(1, 0),
            old_value=torch.zeros(1, 0),
            valid=torch.from_numpy(batch.valid[:1]),
            weight=torch.from_numpy(weights.policy),
            value_weight=torch.from_numpy(weights.value),
            positive_weight=torch.from_numpy(weights.positive),
        )
        _, measured = algorithm.loss(PolicyScores(logprob=logprob, entropy=entropy, value=torch.zeros(1, 0)), inputs)
        found.append(merge_metrics(compute_metrics([measured])))
    for name in ("kl", "clip_fraction", "logprob_gap", "entropy", "ratio", "ratio_max"):
        assert found[1][name] == pytest.approx(found[0][name]), name
    assert (found[1]["clip_fraction"], found[1]["entropy"]) == (0.5, 2.0)


def test_grpo_prepare_matches_reference():
    batch = Algorithm(algorithm_of(group_size=3)).prepare(reference_episodes())
    expected = np.repeat(GRPO_REFERENCE, LENGTHS)[:, None]
    np.testing.assert_allclose(batch.advantage, expected, atol=1e-5)
    np.testing.assert_array_equal(batch.episode, np.repeat(np.arange(6), LENGTHS))
    np.testing.assert_array_equal(batch.records[:8], [0, 1, 2, 3, 4, 10, 11, 12])
    assert batch.returns.shape == (20, 0)
    assert batch.has_signal
    assert batch.metrics["train/groups_without_signal"] == 0


@pytest.mark.parametrize(("normalize", "expected"), [(False, GAE_RAW), (True, GAE_WHITENED)])
def test_gae_prepare_matches_reference(normalize: bool, expected: list[list[float]]):
    batch = Algorithm(gae_config(normalize_advantages=normalize)).prepare(reference_episodes())
    np.testing.assert_allclose(batch.advantage[:, 0], np.array(expected)[VALID], atol=1e-5)
    np.testing.assert_allclose(batch.returns[:, 0], np.array(GAE_RETURNS)[VALID], atol=1e-5)


def test_action_level_gae_continues_across_chunks():
    """T = 2, K = 2, the second chunk stops after one action; the hand computation runs over three steps."""
    for terminated, after in ((True, 0.0), (False, 4.0)):
        episode = make_episode(
            [[1, 2], [3, 0]],
            valid=[[True, True], [True, False]],
            value=[[0.1, 0.2], [0.3, 99]],
            bootstrap=[4, 77],
            terminated=terminated,
        )
        cfg = gae_config(reward_type=RewardLevel.action_level, normalize_advantages=False)
        batch = Algorithm(cfg).prepare([episode])
        a2 = 3 + 0.9 * after - 0.3
        a1 = 2 + 0.9 * 0.3 - 0.2 + 0.72 * a2
        a0 = 1 + 0.9 * 0.2 - 0.1 + 0.72 * a1
        np.testing.assert_allclose(batch.advantage, [[a0, a1], [a2, 0]], rtol=1e-6)
        np.testing.assert_allclose(batch.returns, [[a0 + 0.1, a1 + 0.2], [a2 + 0.3, 0]], rtol=1e-6)
        weights = Algorithm(cfg).weights(batch, [0, 1])
        np.testing.assert_allclose(weights.value, [[1 / 3, 1 / 3], [1 / 3, 0]], rtol=1e-6)


def test_chunk_level_gae_sums_the_rewards_of_a_chunk():
    for terminated, after in ((True, 0.0), (False, 4.0)):
        episode = make_episode(
            [[1, 2], [3, 0]],
            valid=[[True, True], [True, False]],
            value=[[0.1], [0.3]],
            bootstrap=[4],
            terminated=terminated,
        )
        batch = Algorithm(gae_config(normalize_advantages=False)).prepare([episode])
        a1 = 3 + 0.9 * after - 0.3
        a0 = 3 + 0.9 * 0.3 - 0.1 + 0.72 * a1
        np.testing.assert_allclose(batch.advantage, [[a0, a0], [a1, 0]], rtol=1e-6)
        np.testing.assert_allclose(batch.returns, [[a0 + 0.1], [a1 + 0.3]], rtol=1e-6)


def success_groups(*wins: int) -> list[Episode]:
    """Groups of four with the given number of successes."""
    return [
        make_episode([[float(i < won)]], episode_id=4 * g + i, group=g, success=i < won, first_record=4 * g + i)
        for g, won in enumerate(wins)
        for i in range(4)
    ]


def test_group_filter_keeps_groups_within_the_bounds():
    batch = Algorithm(algorithm_of(filter_rewards=[0.3, 0.8])).prepare(success_groups(0, 1, 2, 3, 4))
    np.testing.assert_array_equal(np.unique(batch.episode // 4), [2, 3])
    assert batch.metrics["train/groups_filtered"] == pytest.approx(3 / 5)
    assert batch.metrics["train/groups_without_signal"] == pytest.approx(3 / 5)


def test_groups_are_filtered_by_unshaped_rewards():
    groups = success_groups(0, 1, 2, 3, 4)
    earned = [float(np.mean([e.reward[e.valid].sum() for e in groups[i : i + 4]])) for i in range(0, 20, 4)]
    assert len(set(earned)) == 5, "or this shows nothing"
    bounds = [sorted(earned)[1], sorted(earned)[2]]
    batch = Algorithm(algorithm_of(filter_returns=bounds, reward_scale=10.0, reward_norm="batch")).prepare(groups)
    wanted = [i for i, value in enumerate(earned) if bounds[0] <= value <= bounds[1]]
    np.testing.assert_array_equal(np.unique(batch.episode // 4), wanted)


def test_filtering_all_groups_gives_an_empty_batch():
    cfg = algorithm_of(filter_rewards=[0.3, 0.8], entropy_bonus=0.1)
    batch = Algorithm(cfg).prepare(success_groups(0, 4))
    assert batch.advantage.shape == (0, 1)
    assert not batch.has_signal
    assert batch.metrics["train/groups_without_signal"] == 1.0


def test_groups_with_zero_advantage_count_in_the_denominator():
    batch = Algorithm(algorithm_of()).prepare(success_groups(0, 2))
    assert batch.metrics["train/groups_without_signal"] == 0.5
    assert batch.has_signal
    assert len(batch.records) == 8


@pytest.mark.parametrize(
    ("changes", "signal"), [({}, False), ({"kl_beta": 0.1}, True), ({"entropy_bonus": 0.01}, True)]
)
def test_groups_with_equal_rewards_contribute_only_to_other_loss_terms(changes: dict, signal: bool):
    batch = Algorithm(algorithm_of(**changes)).prepare(success_groups(0, 4))
    assert batch.has_signal is signal
    assert batch.metrics["train/groups_without_signal"] == 1.0


def test_values_give_a_training_signal_only_with_value_coef():
    episode = make_episode([[0.0], [0.0]], value=[[0.0], [0.0]], bootstrap=[0.0])
    for coefficient, signal in ((0.5, True), (0.0, False)):
        assert Algorithm(gae_config(value_coef=coefficient)).prepare([episode]).has_signal is signal


@pytest.mark.parametrize("level", list(TokenLevel))
def test_batch_with_zero_advantages_has_zero_gradient(level: TokenLevel):
    algorithm = Algorithm(algorithm_of(logprob_type=level))
    flat = [make_episode(np.ones((2, K)) / K, episode_id=i, first_record=2 * i) for i in range(3)]
    batch = algorithm.prepare(flat)
    assert not batch.has_signal
    leaf, scores = compute_scores(batch, 0)
    loss, _ = algorithm.loss(scores, inputs_of(algorithm, batch, 0))
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl_beta": 0.1},
        {"entropy_bonus": 0.01},
        {"entropy_bonus": -0.01},
        pytest.param({"loss_type": "dro"}),
        pytest.param({"loss_type": "kl_cov", "cov_share": 1.0}),
    ],
)
def test_samples_without_gradient_are_detected_exactly(changes: dict):
    algorithm = Algorithm(algorithm_of(**changes))
    rewards, groups = (1.0, 0.0, 1.0, 1.0), (0, 0, 1, 1)
    episodes = [
        make_episode(np.full((2, K), reward / (2 * K)), episode_id=i, group=group, first_record=2 * i)
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]
    batch = algorithm.prepare(episodes)
    leaf, scores = compute_scores(batch, 0)
    loss, _ = algorithm.loss(scores, inputs_of(algorithm, batch, 0))
    (gradient,) = torch.autograd.grad(loss, leaf)
    without = (gradient == 0).flatten(1).all(dim=1).numpy()
    np.testing.assert_array_equal(algorithm.zero_gradient_mask(batch), without)
    assert without.sum() == (0 if changes else 4)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("reward", {"reward": [[float("nan")]]}),
        ("value", {"value": [[float("inf")]]}),
        ("bootstrap value", {"bootstrap": [float("-inf")]}),
    ],
)
def test_non_finite_input_names_the_episode(field: str, changes: dict):
    episodes = [
        make_episode([[0.0]], value=[[0.0]], episode_id=0),
        make_episode(**({"reward": [[0.0]], "value": [[0.0]], "bootstrap": [0.0]} | changes), episode_id=41, group=5),
    ]
    with pytest.raises(NonFiniteError, match=rf"{field} is .*episode 41 .*reset id 105"):
        Algorithm(gae_config()).prepare(episodes)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_overflowing_advantage_is_an_error():
    episode = make_episode([[3e38], [3e38]], value=[[0.0], [0.0]], episode_id=7)
    with pytest.raises(NonFiniteError, match="advantage is inf in episode 7"):
        Algorithm(gae_config(normalize_advantages=False)).prepare([episode])


def test_rewards_of_unexecuted_actions_are_ignored():
    episode = make_episode([[1.0, float("nan")]], valid=[[True, False]], value=[[0.0]])
    batch = Algorithm(gae_config(normalize_advantages=False)).prepare([episode])
    np.testing.assert_array_equal(batch.advantage, [[1.0, 0.0]])


def test_kl_without_reference_fails_an_assertion():
    algorithm = Algorithm(algorithm_of(kl_beta=0.1))
    assert algorithm.needs_reference
    batch = algorithm.prepare(ragged_episodes(0))
    _, scores = compute_scores(batch, 0)
    inputs = inputs_of(algorithm, batch, 0)
    without = LossInputs(**{name: getattr(inputs, name) for name in inputs.__slots__} | {"ref_logprob": None})
    with pytest.raises(AssertionError, match="needs reference"):
        algorithm.loss(scores, without)


def test_reference_kl_is_scaled_by_kl_beta():
    losses = []
    for beta in (0.0, 0.3):
        algorithm = Algorithm(algorithm_of(kl_beta=beta))
        batch = algorithm.prepare(ragged_episodes(0))
        _, scores = compute_scores(batch, 0)
        inputs = inputs_of(algorithm, batch, 0)
        loss, measured = algorithm.loss(scores, inputs)
        losses.append(loss.item())
    mask = inputs.valid.repeat_interleave(D, dim=1)
    gap = (scores.logprob - inputs.ref_logprob)[mask]
    expected = (torch.exp(-gap) + gap - 1).mean().item()
    assert compute_metrics([measured])[0]["ref_kl"] == pytest.approx(expected, rel=1e-6)
    assert losses[1] - losses[0] == pytest.approx(0.3 * expected, rel=1e-5)


def test_contradictory_policy_gradient_settings_are_rejected():
    with pytest.raises(ConfigError, match="logprob_type=chunk_level"):
        Algorithm(gae_config(reward_type=RewardLevel.action_level, logprob_type=TokenLevel.chunk_level))


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (lambda terms: replace(terms, loss=terms.loss.mean()), r"LossTerms.loss has shape \(\), expected \(8, 3, 2\)"),
        (lambda terms: replace(terms, ratio=terms.ratio[:1]), r"LossTerms.ratio has shape \(1, 3, 2\), expected"),
        (lambda terms: terms.loss, r"the loss returned Tensor, expected LossTerms"),
    ],
)
def test_loss_with_wrong_shape_is_rejected(reduce, message):
    def compute(units: LossUnits, _: object) -> LossTerms:
        ratio = (units.logprob - units.old_logprob).exp()
        return reduce(LossTerms(loss=-units.advantage * ratio, ratio=ratio, clipped=ratio > 2))

    algorithm = Algorithm(gae_config(reward_type=RewardLevel.action_level))
    batch = algorithm.prepare(ragged_episodes(K))
    algorithm._loss = PolicyLoss(compute=compute)
    with pytest.raises(ConfigError, match=message):
        algorithm.loss(compute_scores(batch, K)[1], inputs_of(algorithm, batch, K))
