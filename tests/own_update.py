"""A user-defined algorithm with its own update: reward-weighted regression on the episodes of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import PositiveFloat
from torch import Tensor

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, EstimatorInputs
from embodyrl.algorithms.settings import BufferSettings
from embodyrl.channels.arena import read_observation
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UpdateGenerator, split_micro_batches
from embodyrl.specs import convert_gripper
from embodyrl.types import Episode, ImitationLoss, IntArray, Observation


class RegressionSettings(BufferSettings):
    """Key of the algorithm."""

    sharpness: PositiveFloat = 1.0
    """Factor in the weights exp(sharpness x return)."""


def credits_of(episodes: Sequence[Episode], _: EstimatorInputs, cfg: RegressionSettings) -> list[Credit]:
    """Return weights of episodes with mean 1."""
    weight = np.exp([cfg.sharpness * e.episode_return for e in episodes])
    parts = zip(episodes, weight / weight.mean(), strict=True)
    return [Credit(advantage=np.full(e.reward.shape, w, np.float32), returns=np.zeros_like(e.value)) for e, w in parts]


class Regression(Learner):
    """Learner that trains on each chunk of the step once, weighted by its episode; counts its chunks."""

    def __init__(self, context: LearnerContext) -> None:
        self.context, self.imitated = context, 0

    def update(self, request: UpdateRequest) -> UpdateGenerator[dict[str, float]]:
        trainer, arena, policy = self.context.trainer, self.context.arena, self.context.trainer.policy
        records = arena.read(request.record_refs)
        obs, actions = read_observation(arena, records), arena[Record.action][records].copy()
        convert_gripper(actions, self.context.env.action.gripper, policy.spec.gripper)
        weight = arena[Record.advantage][records].max(1)

        def imitate(rows: IntArray) -> ImitationLoss:
            words = tuple(obs.instructions[row] for row in rows)
            part = Observation(images=obs.images[rows], state=obs.state[rows], instructions=words)
            return policy.imitate(part, actions[rows])

        def weighted(scores: ImitationLoss, rows: IntArray) -> tuple[Tensor, None]:
            return (scores.loss * scores.loss.new_tensor(weight[rows])).sum() / len(records), None

        parts = split_micro_batches(
            np.ones(len(records), np.int64), trainer.ranks.rank_info, trainer.cfg.micro_batch_size, None
        )
        trainer.ranks.shard_weights()
        taken = yield from trainer.run_optimizer_step(parts, request.step, imitate, weighted)
        trainer.ranks.reshard()
        self.imitated += len(records)
        return {"imitated": float(self.imitated)} | (taken[0] if taken else {})

    def save(self, folder: Path) -> None:
        (folder / "imitated.json").write_text(json.dumps(self.imitated))

    def load(self, folder: Path) -> None:
        self.imitated = json.loads((folder / "imitated.json").read_text())


REGRESSION = AdvantageEstimator(compute=credits_of, settings=RegressionSettings, learner="own_update:Regression")
