"""Metrics of batches and losses against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import make_episode
from settings import algorithm_of

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import LOSSES, LossUnits
from embodyrl.types import Episode


def test_explained_variance_is_relative_to_targets():
    """lambda = gamma = 1: targets are returns-to-go, 3 and 2 of one episode and 1 of the other."""
    first = make_episode([[1.0], [2.0]], value=[[2.0], [2.0]], bootstrap=[0.0])
    second = make_episode([[1.0]], value=[[3.0]], bootstrap=[0.0], episode_id=1, first_record=2)
    metrics = Algorithm(algorithm_of(adv_type="gae", group_size=1)).prepare([first, second]).metrics
    assert metrics["train/value_mean"] == pytest.approx(7 / 3)
    assert metrics["train/value_target_mean"] == pytest.approx(2.0)
    gap = np.array([3.0, 2.0, 1.0]) - np.array([2.0, 2.0, 3.0])
    assert metrics["train/explained_variance"] == pytest.approx(1 - gap.var() / (2 / 3))


def groups(*returns: tuple[float, float]) -> list[Episode]:
    """Groups of two episodes with two actions; in episodes with return 0 the second action was not executed."""
    return [
        make_episode([[r, 0.0]], valid=[[True, r > 0]], episode_id=2 * g + k, group=g, first_record=2 * g + k)
        for g, pair in enumerate(returns)
        for k, r in enumerate(pair)
    ]


def test_advantage_metrics_use_executed_actions():
    batch = Algorithm(algorithm_of(group_size=2, normalize_advantages=False)).prepare(groups((4.0, 0.0)))
    assert batch.metrics["train/advantage_mean"] == pytest.approx((2 + 2 - 2) / 3)
    assert batch.metrics["train/advantage_std"] == pytest.approx(np.std([2, 2, -2]))
    assert batch.metrics["train/advantage_abs_max"] == 2.0


def test_filtered_groups_count_as_groups_without_learning_signal():
    """Of four groups, one has different returns, two have equal returns, and one is filtered: three give no signal."""
    episodes = [replace(e, success=e.reward > 0) for e in groups((1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))]
    batch = Algorithm(algorithm_of(group_size=2, filter_rewards=[0.5, 1.0])).prepare(episodes)
    assert batch.metrics["train/groups_filtered"] == 0.5
    assert batch.metrics["train/groups_without_signal"] == 0.75


def units(ratio: list[float], advantage: list[float]) -> LossUnits:
    """Samples of one token."""
    logprob = torch.tensor(ratio).double().log()[:, None, None]
    valid = torch.ones(len(ratio), 1, 1, dtype=torch.bool)
    given = torch.tensor(advantage).double()[:, None, None]
    return LossUnits(logprob=logprob, old_logprob=torch.zeros_like(logprob), advantage=given, valid=valid)


def test_clip_cov_skips_tokens_clipped_by_ppo():
    """Two units with equal covariances: the first is already clipped, so the second loses its gradient."""
    given = units([3.0, 1.0, 1e-3, 1e-3], [4.0, 5.5, -1.0, -1.0])
    cfg = algorithm_of(loss_type="clip_cov", cov_share=0.25, cov_bounds=[1.0, 100.0])
    for seed in range(20):
        torch.manual_seed(seed)
        clipped = LOSSES.get("clip_cov").compute(given, cfg.loss).clipped.flatten()
        assert clipped[0]
        assert clipped[1:].sum() == 1 + (LOSSES.get("ppo_clip").compute(given, cfg.loss).clipped.flatten()[1:].sum())
