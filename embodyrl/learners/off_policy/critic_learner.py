"""Common parts of learners that train critics on a replay buffer: transitions, the update loop, and checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.algorithms.off_policy.estimator import CriticSettings
from embodyrl.algorithms.off_policy.replay import Frames, ReplayBuffer
from embodyrl.channels.arena import Fields, read_observation
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.checkpoint.tensors import load_state, save_state
from embodyrl.data.reader import Demonstrations
from embodyrl.data.rl_demonstrations import build_observation_fields, ends_with_success, sum_rewards
from embodyrl.learners.adam import build_adam
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UpdateGenerator, load_parts, reject_other_state, summarize_updates
from embodyrl.policies.soft_actor.protocol import CriticPolicy
from embodyrl.types import FloatArray, IntArray

CRITICS, REPLAY = "critics", "replay"
"""Names of the checkpoint files with the critics and with the replay buffer."""
FEATURES = "features"
"""Field of the buffer with the features of a frozen base policy, stored instead of observations."""
P = TypeVar("P", bound=CriticPolicy)
C = TypeVar("C", bound=CriticSettings)


class CriticLearner(Learner, Generic[P, C]):
    """Base class of learners that train critics on a replay buffer, and a policy with the critics."""

    def __init__(self, context: LearnerContext, policy: P, settings: C, encoder: Sequence[nn.Parameter] = ()) -> None:
        """Build critics, their optimizer and the buffer; the critic loss also trains `encoder`."""
        trainer, seed = context.trainer, context.seed
        self._trainer, self._policy, self._arena = trainer, policy, context.arena
        self._settings, self._seed = settings, seed
        self._batch_size, self._optim = trainer.cfg.global_batch_size, trainer.cfg.optim
        self._critics, self._targets = (
            policy.build_critics(settings.critics, seed, layer_norm=settings.critic_layer_norm) for _ in range(2)
        )
        # Target critics are built with the seed of the critics, so that they start as copies.
        self._targets.requires_grad_(False)
        self._device = next(self._critics.parameters()).device
        self._optimizers = {"critics": self._build_adam([*self._critics.parameters(), *encoder], self._optim.value_lr)}
        self._tensors: dict[str, Tensor] = {}
        """Tensors saved with the critics."""
        self._replay = ReplayBuffer(settings.replay_size, settings.gamma, settings.n_step)
        self._starts: IntArray = np.zeros(0, np.int64)
        """Buffer indices of all transitions in the current update."""

    def _build_adam(self, weights: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return build_adam([{"params": weights}], lr=lr, **self._optim.adam | {"weight_decay": 0.0})

    def update(self, request: UpdateRequest) -> UpdateGenerator[dict[str, float]]:
        """Store the observations, run `updates_per_sample` updates for each new chunk, and yield after each update.

        Returns metrics averaged over the updates.
        """
        # Read the records before the updates, because they may be reused after the reply to this request.
        records = self._store(request)
        self._trainer.update_statistics(self._arena, records)
        self._starts = self._replay.starts
        result = {"replay_size": float(len(self._starts)), "optimizer_steps": 0.0}
        if len(self._starts) < max(self._settings.learning_starts, 1):
            return result
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, request.step, 0x0FF]))
        count = max(1, round(self._settings.updates_per_sample * len(request.record_refs)))
        steps: list[dict[str, float]] = []
        for done in range(1, count + 1):
            # The last update of a step always includes the policy, except during the warm-up of the critics.
            updates_policy = done % self._settings.policy_interval == 0 or done == count
            updates_policy &= request.step >= self._settings.critic_warmup
            if metrics := (yield from self._run_update(rng, request.step, updates_policy=updates_policy)):
                steps.append(metrics)
        return result | summarize_updates(steps, count, self._trainer.optimization.lr)

    @abstractmethod
    def _run_update(
        self, rng: np.random.Generator, step: int, *, updates_policy: bool
    ) -> UpdateGenerator[dict[str, float]]:
        """Update the critics, and the policy if `updates_policy` is set; return metrics (empty: not updated)."""

    def _choose_target_critics(self, rng: np.random.Generator) -> IntArray:
        """Return the indices of the random critics whose minimum is the bootstrapped value."""
        # Only a few critics are used, because the minimum of all critics would be far too low.
        return rng.permutation(self._settings.critics)[: self._settings.critics_in_target]

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
        # A final record has only an observation; its other fields contain values of an earlier chunk.
        valid = arena[Record.valid][records] & is_action[:, None]
        frames = Frames(
            seen=self._get_stored_fields(records),
            action=np.where(
                is_action[:, None], self._policy.tokens_to_chunks(arena[Record.tokens][records]).cpu(), 0.0
            ),
            reward=np.where(valid, arena[Record.advantage][records], 0.0).sum(1, dtype=np.float32),
            acted=is_action,
            terminated=is_action & (arena[Record.terminated][records] & valid).any(1),
            episode=np.insert(episode, positions, [episode[end - 1] for end in positions]),
        )
        self._add(frames, request)
        return chunk_records

    def _add(self, frames: Frames, request: UpdateRequest | None = None) -> None:
        """Add frames to the buffer; `request` is the request that contains their records, None for demonstrations."""
        self._replay.add(frames)

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

    def _build_frames(self, demos: Demonstrations, actions: FloatArray) -> Frames:
        """Return the chunks of all demonstrations, with the labels or the executed actions [N, A] in `actions`.

        A demonstration is terminal if its last action is its first success. For a frozen policy, the frames contain
        features and residual actions relative to the policy's proposed actions: two forward passes per chunk.
        """
        length, width = self._policy.spec.num_action_chunks, self._arena[Record.instruction].shape[1]
        pairs = list(zip(demos.start, demos.stop, strict=True))
        steps = np.concatenate([np.arange(a, b, length) for a, b in pairs])
        episode = np.repeat(np.arange(len(pairs)), [-(-(b - a) // length) for a, b in pairs])
        stop = np.minimum(steps + length, demos.stop[episode])
        observations, chunks, indices = (
            build_observation_fields(demos, steps, width),
            actions[demos.window(steps, length)[0]],
            np.arange(len(steps)),
        )
        normalized = [
            self._policy.normalize(chunks[p], read_observation(observations, p)).cpu()
            for p in self._split_records(indices)
        ]
        return Frames(
            seen=self._compute_stored_features(observations, indices) if self._policy.frozen else observations,
            action=torch.cat(normalized).numpy(),
            reward=(self._settings.reward_scale * sum_rewards(demos, steps, stop)).astype(np.float32),
            acted=np.ones(len(steps), np.bool_),
            terminated=ends_with_success(demos)[episode] & (stop == demos.stop[episode]),
            episode=episode,
        )

    def save(self, folder: Path) -> None:
        """Save critics, tensors and optimizers, and the replay buffer if `save_replay` is set."""
        state = {name: part.state_dict() for name, part in self._get_modules().items()}
        save_state(folder, CRITICS, state | {name: tensor.detach() for name, tensor in self._tensors.items()})
        if self._settings.save_replay:
            save_state(folder, REPLAY, self._get_replay_state())

    def _get_replay_state(self) -> dict[str, Any]:
        return self._replay.state()

    def _load_replay_state(self, state: dict[str, Any]) -> None:
        self._replay.load_state(state)

    def _get_modules(self) -> dict[str, Any]:
        """Return the critics, target critics and optimizers, by their names in the checkpoint."""
        return {"nets": self._critics, "targets": self._targets, **self._optimizers}

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        state = load_state(folder, CRITICS)
        with reject_other_state(folder, "algorithm.critics and model"):
            load_parts(self._get_modules(), state)
        for name, tensor in self._tensors.items():
            tensor.data.copy_(state[name])
        if (folder / f"{REPLAY}.json").is_file():
            self._load_replay_state(load_state(folder, REPLAY))
