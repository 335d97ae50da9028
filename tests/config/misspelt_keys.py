"""Misspelt sections and keys, each of which must be an error of the type checker: `scripts/test.sh` runs pyright here.

A line without an error makes its ignore comment unnecessary, which is an error too.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from embodyrl.algorithms.estimators import GaeSettings
from embodyrl.algorithms.policy_losses import DualClipSettings
from embodyrl.plan.schema import Config


def right(cfg: Config, estimator: GaeSettings, loss: DualClipSettings) -> None:
    assert [cfg.rollout.mode, cfg.collect.out, estimator.gae_lambda, loss.clip_ratio_low]


def misspelt(cfg: Config, estimator: GaeSettings, loss: DualClipSettings) -> None:
    assert cfg.rolout  # pyright: ignore[reportAttributeAccessIssue]
    assert cfg.rollout.mod  # pyright: ignore[reportAttributeAccessIssue]
    assert cfg.colect  # pyright: ignore[reportAttributeAccessIssue]
    assert estimator.gae_lamda  # pyright: ignore[reportAttributeAccessIssue]
    assert loss.clip_ratio_lo  # pyright: ignore[reportAttributeAccessIssue]
