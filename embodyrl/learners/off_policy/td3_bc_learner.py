"""Learner of TD3+BC: critics on the features of the current policy train all trained weights of that policy."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.off_policy.replay import Frames, Transitions
from embodyrl.algorithms.off_policy.sac import critic_loss, soft_target
from embodyrl.algorithms.off_policy.td3_bc import Td3BcSettings, policy_loss, smooth_actions
from embodyrl.channels.arena import read_observation
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.data.rl_demonstrations import load_rl_demonstrations
from embodyrl.learners.off_policy.critic_learner import CriticLearner
from embodyrl.learners.off_policy.weight_average import WeightAverage
from embodyrl.learners.protocol import LearnerContext
from embodyrl.learners.training import UpdateGenerator, backward, update_targets
from embodyrl.policies.soft_actor.protocol import RegressionActor
from embodyrl.policies.tensors import to_device
from embodyrl.types import ImitationLoss, IntArray

SUCCESS, TARGET = "success", "target"
"""Fields of the buffer: True for observations of episodes with a return above `imitate_above`; the imitated chunk."""


class Td3BcLearner(CriticLearner[RegressionActor, Td3BcSettings]):
    """Learner that trains critics and a deterministic policy; the policy also imitates successful episodes.

    Features and next actions are computed once per training step, with the policy at its start, for all stored
    observations. Therefore the target policy is the policy of the last training step (with averaged weights if
    `average` is set), and critic updates are cheap.
    """

    def __init__(self, context: LearnerContext) -> None:
        assert context.algorithm is not None
        policy, settings = context.trainer.policy, context.algorithm.settings
        assert isinstance(settings, Td3BcSettings)
        assert isinstance(policy, RegressionActor), "checked by the run plan"
        super().__init__(context, policy, settings)
        self._encoded: tuple[Tensor, Tensor] | None = None
        """Features [N, F] and greedy chunks [N, L] of all stored observations; None: not computed yet."""
        self._task: IntArray = np.zeros(0, np.int64)
        """[N] checksums of the instructions of all stored observations."""
        self._average = WeightAverage(context.trainer, settings.average)
        if settings.demonstrations:
            # Critics train on the executed actions; the policy imitates the labels, which have no noise.
            demos = load_rl_demonstrations(settings.demonstrations, policy.spec, context.env)
            frames, labels = (self._build_frames(demos, actions) for actions in (demos.executed, demos.action))
            self._add(replace(frames, seen={**frames.seen, TARGET: labels.action}))

    def _add(self, frames: Frames, request: UpdateRequest | None = None) -> None:
        _, episode = np.unique(frames.episode, return_inverse=True)
        success = np.bincount(episode, frames.reward) > self._settings.imitate_above
        super()._add(replace(frames, seen={TARGET: frames.action, **frames.seen, SUCCESS: success[episode]}))
        self._encoded = None
        instructions = self._replay[Record.instruction][: len(self._replay)]
        self._task = np.array([zlib.crc32(row) for row in instructions], np.int64)

    def _run_update(
        self, rng: np.random.Generator, step: int, *, updates_policy: bool
    ) -> UpdateGenerator[dict[str, float]]:
        if self._encoded is None:
            self._encoded = yield from self._encode()
        features, proposed = self._encoded
        batch = self._replay.transitions(self._sample(rng, 0.5))
        normal = to_device(rng.standard_normal((self._batch_size, self._policy.width), np.float32), self._device)
        next_action = smooth_actions(proposed[batch.after], normal, self._settings.target_noise)
        metrics = self._update_critics(batch, features, next_action, self._choose_target_critics(rng))
        if metrics and updates_policy:
            result = yield from self._update_policy(self._sample(rng, self._settings.success_share), features, step)
            return {} if result is None else metrics | result
        yield
        return metrics

    def _sample(self, rng: np.random.Generator, success_share: float) -> IntArray:
        """Sample indices [B] of transitions, `success_share` of them from successful episodes (if there are both).

        Each task with a successful episode has the same share of these, because rarely solved tasks would have few.
        """
        success = self._replay[SUCCESS][self._starts]
        if not success.any():
            return rng.choice(self._starts, self._batch_size)
        successes, failures = self._starts[success], self._starts[~success]
        count = round(success_share * self._batch_size) if len(failures) else self._batch_size
        _, task, frequency = np.unique(self._task[successes], return_inverse=True, return_counts=True)
        share = 1.0 / (len(frequency) * frequency[task])
        return np.concatenate([rng.choice(successes, count, p=share), rng.choice(failures, self._batch_size - count)])

    def _encode(self) -> UpdateGenerator[tuple[Tensor, Tensor]]:
        """Return the features [N, F] and greedy chunks [N, L] of all stored observations; yield after each batch."""
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(self._replay), size := self._trainer.cfg.micro_batch_size):
            rows = np.arange(start, min(start + size, len(self._replay)))
            with torch.no_grad():
                parts.append(self._policy.propose(read_observation(self._replay, rows)))
            yield
        features, chunks = zip(*parts, strict=True)
        return torch.cat(features), torch.cat(chunks)

    def _update_critics(
        self, batch: Transitions, features: Tensor, next_action: Tensor, target_critics: IntArray
    ) -> dict[str, float]:
        """Update critics and target critics; return metrics (empty: not updated)."""
        action, reward, discount = (
            to_device(part, self._device)
            for part in (self._replay["action"][batch.indices], batch.reward, batch.discount)
        )
        with torch.no_grad():
            next_value = self._targets(features[batch.after], next_action)[target_critics]
            # The target of TD3 is that of SAC without entropy.
            target = soft_target(reward, discount, next_value, torch.zeros_like(reward), torch.zeros(()))
        value = self._critics(features[batch.indices], action)
        loss = critic_loss(value, target)
        norm = backward(self._optimizers["critics"], loss, self._optim.value_clip_grad)
        if not math.isfinite(loss.item() + norm):
            self._trainer.reject_step(f"loss {loss.item()} or gradient norm {norm} of the critics")
            return {}
        self._optimizers["critics"].step()
        update_targets(self._targets, self._critics, self._settings.tau)
        return {"value_loss": loss.item(), "value": value.mean().item()}

    def _update_policy(self, rows: IntArray, features: Tensor, step: int) -> UpdateGenerator[dict[str, float] | None]:
        """Take one optimizer step of the policy on the buffer indices `rows` [B]; return metrics or None."""
        targets = to_device(self._replay[TARGET][rows], self._device)
        imitated = to_device(self._replay[SUCCESS][rows], self._device).float()
        with torch.no_grad():
            scale = self._critics(features[rows], targets).mean(0).abs().mean().clamp(min=1e-6)
        self._critics.requires_grad_(False)
        self._average.swap()

        def compute(part: IntArray) -> ImitationLoss:
            _, chunk = self._policy.propose(read_observation(self._replay, rows[part]))
            value = self._critics(features[rows[part]], chunk.clamp(-1.0, 1.0)).mean(0)
            loss = policy_loss(value, scale, chunk, targets[part], imitated[part], self._settings.bc_weight)
            return ImitationLoss(loss=loss, accuracy=value.detach())

        result = yield from self._trainer.run_optimizer_step(
            self._trainer.split_micro_batches(len(rows)),
            float(step),
            compute,
            lambda losses, _: (losses.loss.sum() / len(rows), None),
            weights_status="the policy is unchanged, but the critics were updated",
        )
        if result is not None:
            self._average.add()
        self._average.swap()
        self._critics.requires_grad_(True)
        return None if result is None else result[0]

    def save(self, folder: Path) -> None:
        """Save the state of the critics and the replay buffer, and the trained weights if they are averaged."""
        super().save(folder)
        self._average.save(folder)

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        super().load(folder)
        self._average.load(folder)
