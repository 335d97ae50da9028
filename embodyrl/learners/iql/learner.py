"""Learner of implicit Q-learning: critics on precomputed features, and advantage-weighted SFT of the policy."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.iql.estimator import IqlSettings
from embodyrl.algorithms.iql.losses import advantage_weights
from embodyrl.channels.messages import UpdateRequest
from embodyrl.checkpoint.tensors import load_state, save_state
from embodyrl.data.recap.value import features_of, observations
from embodyrl.data.shown import load_shown
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.learners.iql.transitions import transitions_of
from embodyrl.learners.iql.values import IqlValues
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UNCHANGED, InParts, deal, mean_metrics
from embodyrl.policies.protocol import LearnsStatistics, weights_changed
from embodyrl.policies.tensors import on_device
from embodyrl.policies.vla.conditioning import HasFeatures
from embodyrl.types import ImitationScores, IntArray

CRITICS = "critics"
"""Name of the checkpoint file with the critics and the value network."""


class IqlLearner(Learner):
    """Learner that trains critics and the policy on data sets; the records of rollouts are not used."""

    def __init__(self, context: LearnerContext) -> None:
        assert context.algorithm is not None
        rules = context.algorithm.settings
        assert isinstance(rules, IqlSettings)
        self._trainer, self._policy, self._seed = context.trainer, context.trainer.policy, context.seed
        self._rules, self._batch_size = rules, context.actor.global_batch_size
        if not isinstance(self._policy, HasFeatures):
            raise ConfigError(
                f"adv_type 'iql': model '{self._policy.spec.name}' has no features for critics. Choose another model."
            )
        spec = self._policy.spec
        self._horizon = spec.imitated or spec.num_action_chunks
        parts = [load_shown([folder], spec, executed=True) for folder in rules.demonstrations]
        self._demos, self._steps = transitions_of(parts, spec.num_action_chunks, rules.gamma, rules.reward_scale)
        if not len(self._steps.start):
            raise ConfigError(
                f"algorithm.demonstrations: no episode is longer than {spec.num_action_chunks} steps. "
                "Lower model.num_action_chunks."
            )
        with torch.no_grad():
            features = features_of(self._policy, self._demos)
        chunks = self._demos.chunks(np.arange(len(self._demos.action)), spec.num_action_chunks)
        actions = on_device(chunks.reshape(len(chunks), -1), features.device)
        self._values = IqlValues(features, actions, rules, context.actor.optim, context.seed)
        self._device = features.device

    def update(self, request: UpdateRequest) -> InParts[dict[str, float]]:
        """Run `updates_per_sample` updates for each chunk of the request; return metrics averaged over the updates."""
        if request.step == 0 and isinstance(self._policy, LearnsStatistics):
            self._policy.take_statistics(observations(self._demos, np.arange(len(self._demos.action))))
            weights_changed(self._policy.module)
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, request.step, 0x1C1]))
        count = max(1, round(self._rules.updates_per_sample * len(request.tickets)))
        self._policy.module.train()
        steps: list[dict[str, float]] = []
        for done in range(count):
            chosen = rng.integers(len(self._steps.start), size=self._batch_size)
            if isinstance(found := self._evaluate(chosen), str):
                # The loss of the critics depends on the updated value network: check it after that update.
                after = "policy and critics are unchanged, but the value network was updated"
                what = {"value": "value network"}.get(found, found)
                self._trainer.refuse(f"loss or gradient of the {what}", kept=after if found == "critics" else UNCHANGED)
                continue
            weights, metrics = found
            frames = self._steps.start[chosen]
            taken = yield from self._trainer.run_optimizer_step(
                self._deal(),
                request.step + done / count,
                lambda rows, frames=frames: self._imitate(frames[rows]),
                lambda scores, rows, weights=weights: ((weights[rows] * scores.loss).sum() / self._batch_size, None),
                kept="the policy is unchanged, but critics and value network were updated",
            )
            if taken is not None:
                steps.append(taken[0] | metrics)
        self._policy.module.eval()
        self._trainer.optimization.zero_grad()
        result = {"optimizer_steps": float(len(steps)), "skipped_nonfinite": float(count - len(steps))}
        return result | {"lr": self._trainer.optimization.lr} | mean_metrics(steps)

    def _evaluate(self, chosen: IntArray) -> tuple[Tensor, dict[str, float]] | str:
        """Update the critics on the transitions `chosen` [B]; return the advantage weights [B] and metrics.

        Return the name of a network whose loss or gradient is not finite (see `IqlValues.update`).
        """
        steps = self._steps
        parts = (steps.start[chosen], steps.after[chosen], steps.reward[chosen], steps.discount[chosen])
        found = self._values.update(*(on_device(part, self._device) for part in parts))
        if isinstance(found, str):
            return found
        advantage, metrics = found
        weights = advantage_weights(advantage, self._rules.temperature, self._rules.weight_clip)
        clipped = (weights >= self._rules.weight_clip).float().mean().item()
        means = {"advantage": advantage.mean().item(), "weight": weights.mean().item(), "weight_clipped": clipped}
        return weights, metrics | means

    def _imitate(self, frames: IntArray) -> ImitationScores:
        """Return the SFT losses of the chunks that start at `frames`."""
        obs = observations(self._demos, frames)
        return self._policy.imitate(obs, self._demos.chunks(frames, self._horizon))

    def _deal(self) -> list[tuple[IntArray, bool]]:
        """Return the batch indices of each micro-batch of this process (see `deal`)."""
        costs = np.ones(self._batch_size, np.int64)
        return deal(costs, self._trainer.ranks.rank_info, self._trainer.cfg.micro_batch_size, None)

    def save(self, folder: Path) -> None:
        """Save the critics, the value network, their optimizers, and the features of the data."""
        save_state(folder, CRITICS, self._values.state())

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        try:
            self._values.load_state(load_state(folder, CRITICS))
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} was written with different critics or data ({error}): a resumed run needs the same "
                "algorithm.demonstrations, algorithm.critic_width and model. To change them, start a new run."
            ) from error
