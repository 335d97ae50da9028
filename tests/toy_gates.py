"""Advantage estimators and a policy that tests register by path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from toy_env import wait_at_gate

from embodyrl.algorithms.estimators import GRPO
from embodyrl.algorithms.protocol import Credit, EstimatorInputs
from embodyrl.algorithms.settings import AlgorithmSettings
from embodyrl.policies.actor_critic import CNN as FACTORY
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.settings import ModelSettings
from embodyrl.types import Episode

GATE = "TOY_GATE"
"""Environment variable with the gate of updates (`GATED_GRPO`) and checkpoints (`GATED_CNN`)."""
OPEN_CALLS = "TOY_GATE_OPEN_CALLS"
"""Environment variable with the number of first updates or checkpoints that do not wait; 0 by default."""
_calls = count()


def _wait() -> None:
    if next(_calls) >= int(os.environ.get(OPEN_CALLS, "0")):
        wait_at_gate(Path(os.environ[GATE]))


def _gated(episodes: Sequence[Episode], scores: EstimatorInputs, cfg: AlgorithmSettings) -> list[Credit]:
    _wait()
    return GRPO.compute(episodes, scores, cfg)


def _negated(episodes: Sequence[Episode], scores: EstimatorInputs, cfg: AlgorithmSettings) -> list[Credit]:
    return [Credit(advantage=-c.advantage, returns=c.returns) for c in GRPO.compute(episodes, scores, cfg)]


GATED_GRPO = replace(GRPO, compute=_gated)


def _shuffled(episodes: Sequence[Episode], scores: EstimatorInputs, cfg: AlgorithmSettings) -> list[Credit]:
    credits = GRPO.compute(episodes, scores, cfg)
    order = np.random.default_rng(len(credits)).permutation(len(credits))
    return [
        Credit(advantage=np.full_like(own.advantage, credits[other].advantage.flat[0]), returns=own.returns)
        for own, other in zip(credits, order, strict=True)
    ]


SHUFFLED_GRPO = replace(GRPO, compute=_shuffled)
"""Estimator with shuffled advantages: gradients of the same size without information."""
NEGATED_GRPO = replace(GRPO, compute=_negated)


class _GatedFactory:
    """Factory of the convolutional policy, whose `save` waits at the gate."""

    def __getattr__(self, name: str) -> Any:
        return getattr(FACTORY, name)

    def build(self, cfg: ModelSettings, request: PolicyRequest) -> Policy:
        policy = FACTORY.build(cfg, request)
        save = policy.save

        def gated(folder: Path) -> None:
            _wait()
            save(folder)

        policy.save = gated
        return policy


GATED_CNN = _GatedFactory()
