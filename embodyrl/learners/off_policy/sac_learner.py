"""Learner of soft actor-critic: rollouts fill a replay buffer, and updates sample from the buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.off_policy.estimator import ReplaySettings
from embodyrl.algorithms.off_policy.replay import Frames, ReplayBuffer, Transitions
from embodyrl.algorithms.off_policy.sac import actor_loss, critic_loss, soft_target, temperature_loss
from embodyrl.channels.arena import Fields, read_observation
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.checkpoint.tensors import load_state, save_state
from embodyrl.data.augment import shift
from embodyrl.data.rl_demonstrations import ends_with_success, load_rl_demonstrations, observed, sum_rewards
from embodyrl.errors import CheckpointError
from embodyrl.learners.adam import build_adam
from embodyrl.learners.off_policy.hindsight import Hindsight, UnfinishedEpisodes
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UpdateGenerator, backward, load_parts, summarize_updates, update_targets
from embodyrl.policies.soft_actor.protocol import SoftActor
from embodyrl.policies.tensors import on_device
from embodyrl.types import FloatArray, IntArray, Observation

CRITICS, REPLAY = "critics", "replay"
"""Names of the checkpoint files with the critics and with the replay buffer."""
OPEN = "open"
"""Key of the unfinished episodes in the checkpoint file `REPLAY`."""
FEATURES = "features"
"""Field of the buffer with the features of a frozen base policy, stored instead of observations."""


class SacLearner(Learner):
    """Learner that trains the SAC critics, the policy and the temperature on a replay buffer."""

    def __init__(self, context: LearnerContext) -> None:
        assert context.algorithm is not None
        trainer, settings, seed = context.trainer, context.algorithm.settings, context.seed
        assert isinstance(settings, ReplaySettings)
        assert isinstance(trainer.policy, SoftActor), "checked by the run plan"
        self._trainer, self._policy, self._arena = trainer, trainer.policy, context.arena
        self._settings, self._seed = settings, seed
        self._batch_size, self._optim = trainer.cfg.global_batch_size, trainer.cfg.optim
        self._critics, self._targets = (
            self._policy.build_critics(settings.critics, seed, layer_norm=settings.critic_layer_norm) for _ in range(2)
        )
        # Target critics are built with the seed of the critics, so that they start as copies.
        self._targets.requires_grad_(False)
        device = next(self._critics.parameters()).device
        self._log_alpha = torch.tensor(math.log(settings.alpha_init), device=device, requires_grad=True)
        adam = self._optim.adam | {"weight_decay": 0.0}
        # Only the critic loss trains the shared encoder: policy gradients would harm it (arXiv 1910.01741).
        trained = [*self._critics.parameters(), *self._policy.encoder]
        self._optimizers = {
            "critics": build_adam([{"params": trained}], lr=self._optim.value_lr, **adam),
            "alpha": build_adam([{"params": [self._log_alpha]}], lr=self._optim.lr, **adam),
        }
        self._target_entropy = float(
            -self._policy.width if settings.target_entropy is None else settings.target_entropy
        )
        self._hindsight = None if context.goal_env is None else Hindsight(settings, context.goal_env, context.env)
        self._open = UnfinishedEpisodes()
        self._replay = ReplayBuffer(settings.replay_size, settings.gamma, settings.n_step)
        self._demonstrations = self._load_demonstrations() if settings.demonstrations else None

    def update(self, request: UpdateRequest) -> UpdateGenerator[dict[str, float]]:
        """Store the observations, run `updates_per_sample` updates for each new chunk, and yield after each update.

        Returns metrics averaged over the updates.
        """
        # Read the records before the updates, because they may be reused after the reply to this request.
        records = self._store(request)
        self._trainer.update_statistics(self._arena, records)
        starts = self._replay.starts
        result = {"replay_size": float(len(starts)), "optimizer_steps": 0.0}
        if len(starts) < max(self._settings.learning_starts, 1):
            return result
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, request.step, 0x0FF]))
        count = max(1, round(self._settings.updates_per_sample * len(request.record_refs)))
        sources = [(self._replay, starts, self._batch_size)]
        if self._demonstrations is not None:
            num_demonstrations = round(self._settings.demonstration_share * self._batch_size)
            sources = [
                (self._replay, starts, self._batch_size - num_demonstrations),
                (self._demonstrations, self._demonstrations.starts, num_demonstrations),
            ]
        steps: list[dict[str, float]] = []
        for done in range(1, count + 1):
            batches = [buffer.transitions(rng.choice(indices, size)) for buffer, indices, size in sources if size]
            if self._hindsight is not None:
                batches = [self._hindsight.relabel(batch, rng) for batch in batches]
            target_critics = rng.permutation(self._settings.critics)[: self._settings.critics_in_target]
            # The last update of a step always includes the policy, except during the warm-up of the critics.
            updates_policy = done % self._settings.policy_interval == 0 or done == count
            updates_policy &= request.step >= self._settings.critic_warmup
            if metrics := self._step(batches, target_critics, request.step, updates_policy=updates_policy):
                steps.append(metrics)
            yield
        return result | summarize_updates(steps, count, self._trainer.optimization.lr)

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
            on_device(np.concatenate(parts), features.device)
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
            # Only a few critics are used, because the minimum of all critics would be far too low.
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
        return on_device(observations, next(self._critics.parameters()).device)

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

    def _store(self, request: UpdateRequest) -> IntArray:
        """Add the records of finished and interrupted episodes to the buffer; return the records."""
        arena, finals = self._arena, dict(request.finals)
        chunk_records = arena.read(request.record_refs)
        episode = np.asarray(request.episode, dtype=np.int64)
        # Records of an episode are consecutive.
        ends = np.flatnonzero(np.append(episode[1:] != episode[:-1], True)) + 1
        positions = [end for end in ends if int(episode[end - 1]) in finals]
        final_records = arena.read([finals[int(episode[end - 1])] for end in positions])
        records = np.insert(chunk_records, positions, final_records)
        is_action = np.insert(np.ones(len(chunk_records), np.bool_), positions, False)
        valid = arena[Record.valid][records]
        new = Frames(
            seen=self._get_stored_fields(records),
            action=np.where(
                is_action[:, None], self._policy.tokens_to_chunks(arena[Record.tokens][records]).cpu(), 0.0
            ),
            reward=np.where(valid, arena[Record.advantage][records], 0.0).sum(1, dtype=np.float32),
            acted=is_action,
            terminated=is_action & (arena[Record.terminated][records] & valid).any(1),
            episode=np.insert(episode, positions, [episode[end - 1] for end in positions]),
        )
        episodes = [new]
        if self._hindsight is not None:
            episodes = self._open.whole(new, dict(request.earlier), dict(request.open))
        for frames in episodes:
            self._replay.add(frames)
        return chunk_records

    def _get_stored_fields(self, records: IntArray) -> dict[str, np.ndarray]:
        """Return the arrays that the buffer stores for the given records: observation fields or features."""
        if not self._policy.frozen:
            return {str(name): self._arena[name][records] for name in OBSERVATION}
        return self._compute_stored_features(self._arena, records)

    def _compute_stored_features(self, fields: Fields, records: IntArray) -> dict[str, np.ndarray]:
        """Return the features of a frozen policy for the observations of the given records."""
        with torch.no_grad():
            features = [self._policy.features(read_observation(fields, part)) for part in self._split_records(records)]
        return {FEATURES: torch.cat(features).cpu().numpy()}

    def _split_records(self, records: IntArray) -> list[IntArray]:
        """Split records into batches for one forward pass."""
        return np.array_split(records, max(1, -(-len(records) // self._batch_size)))

    def _load_demonstrations(self) -> ReplayBuffer:
        """Return a buffer with all chunks of the data sets.

        A demonstration is terminal if its last action is its first success. For a frozen policy, the buffer contains
        features, and corrections of the policy's proposed actions; computing them takes two forward passes per chunk.
        """
        demos = load_rl_demonstrations(self._settings.demonstrations, self._policy.spec, executed=True)
        length, width = self._policy.spec.num_action_chunks, self._arena[Record.instruction].shape[1]
        pairs = list(zip(demos.start, demos.stop, strict=True))
        steps = np.concatenate([np.arange(a, b, length) for a, b in pairs])
        episode = np.repeat(np.arange(len(pairs)), [-(-(b - a) // length) for a, b in pairs])
        stop = np.minimum(steps + length, demos.stop[episode])
        buffer = ReplayBuffer(len(steps), self._settings.gamma, self._settings.n_step)
        observations, actions, indices = (
            observed(demos, steps, width),
            demos.chunks(steps, length),
            np.arange(len(steps)),
        )
        normalized = [
            self._policy.normalize(actions[p], read_observation(observations, p)).cpu()
            for p in self._split_records(indices)
        ]
        buffer.add(
            Frames(
                seen=self._compute_stored_features(observations, indices) if self._policy.frozen else observations,
                action=torch.cat(normalized).numpy(),
                reward=(self._settings.reward_scale * sum_rewards(demos, steps, stop)).astype(np.float32),
                acted=np.ones(len(steps), np.bool_),
                terminated=ends_with_success(demos)[episode] & (stop == demos.stop[episode]),
                episode=episode,
            )
        )
        return buffer

    def save(self, folder: Path) -> None:
        """Save critics, temperature and optimizers, and the replay buffer if `save_replay` is set."""
        state = {name: part.state_dict() for name, part in self._get_modules().items()}
        save_state(folder, CRITICS, state | {"log_alpha": self._log_alpha.detach()})
        if self._settings.save_replay:
            save_state(folder, REPLAY, self._replay.state() | {OPEN: self._open.state()})

    def _get_modules(self) -> dict[str, Any]:
        """Return the critics, target critics and optimizers, by their names in the checkpoint."""
        return {"nets": self._critics, "targets": self._targets, **self._optimizers}

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        state = load_state(folder, CRITICS)
        try:
            load_parts(self._get_modules(), state)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} was written with different critics ({error}): a resumed run needs the same "
                "algorithm.critics and model. To change them, start a new run with ckpt=THIS_RUN."
            ) from error
        self._log_alpha.data.copy_(state["log_alpha"])
        if (folder / f"{REPLAY}.json").is_file():
            replay = load_state(folder, REPLAY)
            unfinished = replay.pop(OPEN, None)
            self._replay.load_state(replay)
            if unfinished:
                self._replay.add(Frames(**unfinished))

    def close(self) -> None:
        """Close the environment that computes goal rewards; idempotent."""
        if self._hindsight is not None:
            self._hindsight.close()
