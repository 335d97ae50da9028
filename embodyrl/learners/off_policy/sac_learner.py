"""Learner of soft actor-critic: rollouts fill a replay buffer, and updates sample from the buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.off_policy.estimator import ReplaySettings
from embodyrl.algorithms.off_policy.replay import Frames, ReplayBuffer, Transitions
from embodyrl.algorithms.off_policy.sac import actor_loss, critic_loss, soft_target, temperature_loss
from embodyrl.channels.arena import read_observation
from embodyrl.channels.messages import UpdateRequest
from embodyrl.data.augment import shift
from embodyrl.data.rl_demonstrations import load_rl_demonstrations
from embodyrl.learners.off_policy.critic_learner import FEATURES, CriticLearner
from embodyrl.learners.off_policy.hindsight import Hindsight, UnfinishedEpisodes
from embodyrl.learners.protocol import LearnerContext
from embodyrl.learners.training import UpdateGenerator, backward, update_targets
from embodyrl.policies.soft_actor.protocol import SoftActor
from embodyrl.policies.tensors import to_device
from embodyrl.types import FloatArray, IntArray, Observation

OPEN = "open"
"""Key of the unfinished episodes in the checkpoint file `REPLAY`."""


class SacLearner(CriticLearner[SoftActor, ReplaySettings]):
    """Learner that trains the SAC critics, the policy and the temperature on a replay buffer."""

    def __init__(self, context: LearnerContext) -> None:
        assert context.algorithm is not None
        policy, settings = context.trainer.policy, context.algorithm.settings
        assert isinstance(settings, ReplaySettings)
        assert isinstance(policy, SoftActor), "checked by the run plan"
        # Only the critic loss trains the shared encoder: policy gradients would harm it (arXiv 1910.01741).
        super().__init__(context, policy, settings, policy.encoder)
        self._log_alpha = torch.tensor(math.log(settings.alpha_init), device=self._device, requires_grad=True)
        self._tensors["log_alpha"] = self._log_alpha
        self._optimizers["alpha"] = self._build_adam([self._log_alpha], self._optim.lr)
        self._target_entropy = float(-policy.width if settings.target_entropy is None else settings.target_entropy)
        self._hindsight = None if context.goal_env is None else Hindsight(settings, context.goal_env, context.env)
        self._open = UnfinishedEpisodes()
        self._demonstrations = None
        if settings.demonstrations:
            demos = load_rl_demonstrations(settings.demonstrations, policy.spec, context.env)
            frames = self._build_frames(demos, demos.executed)
            self._demonstrations = ReplayBuffer(len(frames.acted), settings.gamma, settings.n_step)
            self._demonstrations.add(frames)

    def _run_update(
        self, rng: np.random.Generator, step: int, *, updates_policy: bool
    ) -> UpdateGenerator[dict[str, float]]:
        sources = [(self._replay, self._starts, self._batch_size)]
        if self._demonstrations is not None:
            num_demonstrations = round(self._settings.demonstration_share * self._batch_size)
            sources = [
                (self._replay, self._starts, self._batch_size - num_demonstrations),
                (self._demonstrations, self._demonstrations.starts, num_demonstrations),
            ]
        batches = [buffer.transitions(rng.choice(indices, size)) for buffer, indices, size in sources if size]
        if self._hindsight is not None:
            batches = [self._hindsight.relabel(batch, rng) for batch in batches]
        metrics = self._step(batches, self._choose_target_critics(rng), step, updates_policy=updates_policy)
        yield
        return metrics

    def _step(
        self, batches: Sequence[Transitions], target_critics: IntArray, step: int, *, updates_policy: bool = True
    ) -> dict[str, float]:
        """Update temperature, critics, actor and target critics, in this order; return metrics (empty: not updated).

        Without `updates_policy`, temperature and actor are not updated. `target_critics`: indices of the critics whose
        minimum is the bootstrapped value.
        """
        # Images are shifted before all forward passes, so that the order of random numbers does not change.
        observations = [self._get_observations(batch, batch.indices) for batch in batches]
        next_observations = [self._get_observations(batch, batch.after) for batch in batches]
        features = torch.cat([self._compute_features(batch) for batch in observations])
        action, reward, discount = (
            to_device(np.concatenate(parts), features.device)
            for parts in (
                [batch.buffer["action"][batch.indices] for batch in batches],
                [batch.reward for batch in batches],
                [batch.discount for batch in batches],
            )
        )
        # Sampled once for temperature and policy; detached, so that no gradient reaches the shared features.
        sampled_action, logprob = self._policy.sample(features.detach())
        alpha = self._log_alpha.detach().exp()
        alpha_loss = temperature_loss(self._log_alpha, logprob, self._target_entropy)
        with torch.no_grad():
            after = torch.cat([self._compute_features(batch) for batch in next_observations])
            next_action, next_logprob = self._policy.sample(after)
            next_value = self._targets(after, next_action)[target_critics]
            target = soft_target(reward, discount, next_value, next_logprob, alpha * self._settings.backup_entropy)
        value = self._critics(features, action)
        loss = critic_loss(value, target)
        # Check both losses before the first optimizer step, so that a skipped update changes no weights.
        if not math.isfinite(loss.item() + alpha_loss.item()):
            self._trainer.reject_step(f"loss {loss.item()} of the critics")
            return {}
        norms = {
            "critics": backward(self._optimizers["critics"], loss, self._optim.value_clip_grad),
            "alpha": backward(self._optimizers["alpha"], alpha_loss),
        }
        if non_finite := [name for name, norm in norms.items() if not math.isfinite(norm)]:
            self._trainer.reject_step(f"gradient norm {norms[non_finite[0]]} of the {non_finite[0]}")
            return {}
        for name in ("alpha", "critics") if updates_policy else ("critics",):
            self._optimizers[name].step()
        metrics = {"value_loss": loss.item(), "value": value.mean().item(), "entropy": -logprob.mean().item()}
        if updates_policy:
            policy_loss = self._actor_loss(features.detach(), sampled_action, logprob, alpha)
            self._trainer.optimization.zero_grad()
            policy_loss.backward()
            grad_norm = self._trainer.optimization.step(float(step))
            if not math.isfinite(grad_norm):
                # This gradient depends on the updated critics, so it cannot be checked earlier.
                self._trainer.reject_step(
                    f"gradient norm {grad_norm}",
                    weights_status="the policy is unchanged, but critics and temperature were updated",
                )
                return {}
            metrics |= {"loss": policy_loss.item(), "grad_norm": grad_norm}
        update_targets(self._targets, self._critics, self._settings.tau)
        return metrics | {"alpha": alpha.item()}

    def _actor_loss(self, features: Tensor, sampled_action: Tensor, logprob: Tensor, alpha: Tensor) -> Tensor:
        """Return the policy loss under the updated critics, whose gradients are not computed."""
        self._critics.requires_grad_(False)
        loss = actor_loss(self._critics(features, sampled_action), logprob, alpha)
        self._critics.requires_grad_(True)
        return loss

    def _compute_features(self, observations: Observation | FloatArray) -> Tensor:
        """Return the features [B, F] of observations; stored features are returned unchanged."""
        if isinstance(observations, Observation):
            return self._policy.features(observations)
        return to_device(observations, self._device)

    def _get_observations(self, transitions: Transitions, indices: IntArray) -> Observation | FloatArray:
        """Return the observations at the buffer indices `indices`, with relabeled goals and random image shifts.

        All images of an observation have the same shift (DrQ, arXiv 2004.13649). For a frozen policy, the stored
        features are returned instead.
        """
        if self._policy.frozen:
            return transitions.buffer[FEATURES][indices]
        observations = read_observation(transitions.buffer, indices)
        if self._hindsight is not None and len(transitions.relabeled):
            observations.state[transitions.relabeled, self._hindsight.desired] = transitions.goal
        pixels, (count, cameras) = self._settings.image_shift, observations.images.shape[:2]
        if not (pixels and observations.images.size and self._policy.spec.inputs.num_images):
            return observations
        down, right = torch.rand(2, count).repeat_interleave(cameras, dim=1)
        shifted = shift(torch.from_numpy(observations.images).flatten(0, 1), down, right, pixels)
        return replace(observations, images=shifted.unflatten(0, (count, cameras)).numpy())

    def _add(self, frames: Frames, request: UpdateRequest | None = None) -> None:
        """Add frames to the buffer, or store frames of unfinished episodes until these end (hindsight)."""
        episodes = [frames]
        if self._hindsight is not None and request is not None:
            episodes = self._open.append_frames(frames, dict(request.earlier), dict(request.open))
        for episode in episodes:
            super()._add(episode)

    def _get_replay_state(self) -> dict[str, Any]:
        return super()._get_replay_state() | {OPEN: self._open.state()}

    def _load_replay_state(self, state: dict[str, Any]) -> None:
        unfinished = state.pop(OPEN, None)
        super()._load_replay_state(state)
        if unfinished:
            self._replay.add(Frames(**unfinished))

    def close(self) -> None:
        """Close the environment that computes goal rewards; idempotent."""
        if self._hindsight is not None:
            self._hindsight.close()
