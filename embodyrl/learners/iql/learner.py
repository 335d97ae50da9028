"""Learner of implicit Q-learning: critics on precomputed features, and advantage-weighted SFT of the policy."""

from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.iql.estimator import IqlSettings
from embodyrl.algorithms.iql.losses import compute_advantage_weights
from embodyrl.channels.messages import UpdateRequest
from embodyrl.checkpoint.tensors import load_state, save_state
from embodyrl.data.reader import Demonstrations
from embodyrl.data.rl_demonstrations import load_rl_demonstrations
from embodyrl.errors import ConfigError
from embodyrl.learners.iql.transitions import build_transitions
from embodyrl.learners.iql.values import IqlValues
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UNCHANGED, UpdateGenerator, reject_other_state, summarize_updates
from embodyrl.policies.protocol import LearnsStatistics, Policy, mark_weights_changed
from embodyrl.policies.tensors import to_device
from embodyrl.types import ROWS_AT_A_TIME, ImitationLoss, IntArray, Observation

CRITICS = "critics"
"""Name of the checkpoint file with the critics and the value network."""


@runtime_checkable
class HasFeatures(Policy, Protocol):
    """Interface of a policy that computes features of observations as inputs of critics."""

    def features(self, obs: Observation) -> Tensor:
        """Return features [B, F] of observations, without gradients."""
        ...


class IqlLearner(Learner):
    """Learner that trains critics and the policy on data sets; the records of rollouts are not used."""

    def __init__(self, context: LearnerContext) -> None:
        assert context.algorithm is not None
        settings = context.algorithm.settings
        assert isinstance(settings, IqlSettings)
        self._trainer, self._policy, self._seed = context.trainer, context.trainer.policy, context.seed
        self._settings, self._batch_size = settings, context.trainer.cfg.global_batch_size
        if not isinstance(self._policy, HasFeatures):
            raise ConfigError(
                f"adv_type 'iql': model '{self._policy.spec.name}' has no features for critics. Choose another model."
            )
        spec = self._policy.spec
        self._horizon = spec.imitated or spec.num_action_chunks
        parts = [load_rl_demonstrations([folder], spec, context.env) for folder in settings.demonstrations]
        parts = [replace(part, action=part.executed) for part in parts]
        self._demos, self._steps = build_transitions(
            parts, spec.num_action_chunks, settings.gamma, settings.reward_scale
        )
        if not len(self._steps.start):
            raise ConfigError(
                f"algorithm.demonstrations: no episode is longer than {spec.num_action_chunks} steps. "
                "Lower model.num_action_chunks."
            )
        with torch.no_grad():
            features = _compute_features(self._policy, self._demos)
        chunks = self._demos.chunks(np.arange(len(self._demos.action)), spec.num_action_chunks)
        actions = to_device(chunks.reshape(len(chunks), -1), features.device)
        self._values = IqlValues(features, actions, settings, context.trainer.cfg.optim, context.seed)
        self._device = features.device

    def update(self, request: UpdateRequest) -> UpdateGenerator[dict[str, float]]:
        """Run `updates_per_sample` updates for each chunk of the request; return metrics averaged over the updates."""
        if request.step == 0 and isinstance(self._policy, LearnsStatistics):
            self._policy.update_statistics(self._demos.observations(np.arange(len(self._demos.action))))
            mark_weights_changed(self._policy.module)
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, request.step, 0x1C1]))
        count = max(1, round(self._settings.updates_per_sample * len(request.record_refs)))
        self._policy.module.train()
        steps: list[dict[str, float]] = []
        for done in range(count):
            indices = rng.integers(len(self._steps.start), size=self._batch_size)
            if isinstance(result := self._evaluate(indices), str):
                # The loss of the critics depends on the updated value network, so it is checked after that update.
                state = "policy and critics are unchanged, but the value network was updated"
                network = {"value": "value network"}.get(result, result)
                self._trainer.reject_step(
                    f"loss or gradient of the {network}", weights_status=state if result == "critics" else UNCHANGED
                )
                continue
            weights, metrics = result
            frames = self._steps.start[indices]
            step_result = yield from self._trainer.run_optimizer_step(
                self._trainer.split_micro_batches(self._batch_size),
                request.step + done / count,
                lambda rows, frames=frames: self._imitate(frames[rows]),
                lambda losses, rows, weights=weights: ((weights[rows] * losses.loss).sum() / self._batch_size, None),
                weights_status="the policy is unchanged, but critics and value network were updated",
            )
            if step_result is not None:
                steps.append(step_result[0] | metrics)
        self._policy.module.eval()
        self._trainer.optimization.zero_grad()
        return summarize_updates(steps, count, self._trainer.optimization.lr)

    def _evaluate(self, indices: IntArray) -> tuple[Tensor, dict[str, float]] | str:
        """Update the critics on the transitions `indices` [B]; return the advantage weights [B] and metrics.

        Return the name of a network whose loss or gradient is not finite (see `IqlValues.update`).
        """
        steps = self._steps
        parts = (steps.start[indices], steps.after[indices], steps.reward[indices], steps.discount[indices])
        result = self._values.update(*(to_device(part, self._device) for part in parts))
        if isinstance(result, str):
            return result
        advantage, metrics = result
        weights = compute_advantage_weights(advantage, self._settings.temperature, self._settings.weight_clip)
        clipped = (weights >= self._settings.weight_clip).float().mean().item()
        means = {"advantage": advantage.mean().item(), "weight": weights.mean().item(), "weight_clipped": clipped}
        return weights, metrics | means

    def _imitate(self, frames: IntArray) -> ImitationLoss:
        """Return the SFT losses of the chunks that start at `frames`."""
        return self._policy.imitate(self._demos.observations(frames), self._demos.chunks(frames, self._horizon))

    def save(self, folder: Path) -> None:
        """Save the critics, the value network, their optimizers, and the features of the data."""
        save_state(folder, CRITICS, self._values.state())

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        with reject_other_state(folder, "algorithm.demonstrations, algorithm.critic_width and model"):
            self._values.load_state(load_state(folder, CRITICS))


def _compute_features(policy: HasFeatures, demos: Demonstrations) -> Tensor:
    """Return the policy's features of all frames, concatenated with the state: [N, F]."""
    parts: list[Tensor] = []
    for start in range(0, len(demos.action), ROWS_AT_A_TIME):
        obs = demos.observations(np.arange(start, min(start + ROWS_AT_A_TIME, len(demos.action))))
        features = policy.features(obs).float()
        parts.append(torch.cat([features, torch.from_numpy(obs.state).to(features)], 1))
    return torch.cat(parts)
