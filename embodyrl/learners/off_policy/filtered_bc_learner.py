"""Learner of filtered behavior cloning: SFT on a buffer with chunks from episodes with a high return."""

from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.algorithms.off_policy.filtered_bc import FilteredSettings
from embodyrl.algorithms.off_policy.replay import Frames, ReplayBuffer
from embodyrl.channels.arena import read_observation
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.checkpoint.tensors import load_state, save_state
from embodyrl.data.rl_demonstrations import build_observation_fields, load_rl_demonstrations
from embodyrl.learners.imitation import encode_reply_batch
from embodyrl.learners.off_policy.weight_average import WeightAverage
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UpdateGenerator, summarize_updates
from embodyrl.policies.protocol import TextPolicy
from embodyrl.specs import convert_gripper
from embodyrl.types import FloatArray, ImitationLoss, IntArray, Observation

REPLAY = "replay"
"""Name of the checkpoint file with the replay buffer."""


class FilteredLearner(Learner):
    """Learner that trains the policy by SFT on its own episodes with a high return and on demonstrations."""

    def __init__(self, context: LearnerContext) -> None:
        assert context.algorithm is not None
        settings = context.algorithm.settings
        assert isinstance(settings, FilteredSettings)
        self._trainer, self._policy, self._arena = context.trainer, context.trainer.policy, context.arena
        self._settings, self._batch_size, self._seed = settings, context.trainer.cfg.global_batch_size, context.seed
        self._gripper = context.env.action.gripper
        spec = self._policy.spec
        self._horizon = spec.imitated or spec.num_action_chunks
        # One chunk is one sample: no discount, no n-step return.
        self._replay = ReplayBuffer(settings.replay_size, 1.0, 1)
        self._average = WeightAverage(context.trainer, settings.average)
        self._demonstrations = (
            load_rl_demonstrations(settings.demonstrations, spec, context.env) if settings.demonstrations else None
        )

    def update(self, request: UpdateRequest) -> UpdateGenerator[dict[str, float]]:
        """Store the chunks of episodes with a high return, and update the policy.

        The number of updates is `updates_per_sample` times the number of new chunks of all episodes. Returns metrics
        averaged over the updates.
        """
        records = self._store(request)
        stored = self._replay.starts
        result = {"replay_size": float(len(stored)), "optimizer_steps": 0.0}
        self._trainer.update_statistics(self._arena, records)
        if len(stored) < max(self._settings.learning_starts, 1):
            return result
        # All ranks sample the same batches; each rank trains on its own part.
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, request.step, 0xF1]))
        count = max(1, round(self._settings.updates_per_sample * len(request.record_refs)))
        num_demonstrations = (
            0 if self._demonstrations is None else round(self._settings.demonstration_share * self._batch_size)
        )
        self._trainer.ranks.shard_weights()
        self._policy.module.train()
        self._average.swap()
        steps: list[dict[str, float]] = []
        for done in range(count):
            batch = self._sample_batch(rng, stored, num_demonstrations)
            step_result = yield from self._trainer.run_optimizer_step(
                self._trainer.split_micro_batches(self._batch_size, self._count_tokens(*batch)),
                request.step + done / count,
                lambda rows, batch=batch: self._imitate(batch, rows),
                lambda losses, _: (losses.loss.sum() / self._batch_size, None),
            )
            if step_result is not None:
                steps.append(step_result[0])
                self._average.add()
        self._average.swap()
        # Dropout is disabled, because inference and training must compute the same log-probabilities.
        self._policy.module.eval()
        self._trainer.optimization.zero_grad()
        self._trainer.ranks.reshard()
        return result | summarize_updates(steps, count, self._trainer.optimization.lr)

    def _count_tokens(self, obs: Observation, actions: FloatArray) -> IntArray | None:
        """Return the number of tokens of each sample; None: the number is not needed."""
        if self._trainer.cfg.max_tokens_per_mbs is None or not isinstance(self._policy, TextPolicy):
            return None
        return self._policy.prompt_lengths(obs) + (actions[:, :, 0] >= 0).sum(1)

    def _sample_batch(
        self, rng: np.random.Generator, stored: IntArray, num_demonstrations: int
    ) -> tuple[Observation, FloatArray]:
        """Sample B observations and target actions [B, H, A]; `num_demonstrations` of them are demonstrations."""
        indices = rng.choice(stored, self._batch_size - num_demonstrations)
        fields = {str(name): self._replay[name][indices] for name in OBSERVATION}
        actions = self._replay["action"][indices]
        if isinstance(self._policy, TextPolicy):
            actions = encode_reply_batch(self._policy, actions)
        if (demonstrations := self._demonstrations) is not None and num_demonstrations:
            steps = rng.integers(demonstrations.stop[-1], size=num_demonstrations)
            demonstrated = build_observation_fields(demonstrations, steps, fields[Record.instruction].shape[1])
            fields = {name: np.concatenate([fields[name], array]) for name, array in demonstrated.items()}
            actions = np.concatenate([actions, demonstrations.chunks(steps, self._horizon)])
        return read_observation(fields, np.arange(self._batch_size)), actions

    def _imitate(self, batch: tuple[Observation, FloatArray], rows: IntArray) -> ImitationLoss:
        obs, actions = batch
        instructions = tuple(obs.instructions[row] for row in rows)
        observation = Observation(images=obs.images[rows], state=obs.state[rows], instructions=instructions)
        return self._policy.imitate(observation, actions[rows])

    def _store(self, request: UpdateRequest) -> IntArray:
        """Add the chunks of episodes with a high return to the buffer; return all records of the request."""
        arena = self._arena
        records = arena.read(request.record_refs)
        selected = np.flatnonzero((arena[Record.advantage][records] > 0).any(1))
        episode = np.asarray(request.episode, dtype=np.int64)[selected]
        if len(selected):
            selected_records, is_text = records[selected], isinstance(self._policy, TextPolicy)
            self._replay.add(
                Frames(
                    seen={str(name): arena[name][selected_records] for name in OBSERVATION},
                    action=arena[Record.reply][selected_records]
                    if is_text
                    else self._collect_executed_actions(selected_records, episode),
                    reward=np.zeros(len(selected_records), np.float32),
                    acted=np.ones(len(selected_records), np.bool_),
                    terminated=np.ones(len(selected_records), np.bool_),
                    episode=episode,
                )
            )
        return records

    def _collect_executed_actions(self, records: IntArray, episode: IntArray) -> FloatArray:
        """Return the H actions [N, H, A] executed from the start of each chunk, padded with the last action."""
        valid, actions = self._arena[Record.valid][records], self._arena[Record.action][records]
        convert_gripper(actions, self._gripper, self._policy.spec.gripper)
        # Concatenated executed actions of all episodes, and the start index of each chunk.
        executed, counts = actions[valid], valid.sum(1)
        begin = np.cumsum(counts) - counts
        last = np.append(np.flatnonzero(np.diff(episode)), len(episode) - 1)
        end = (begin + counts)[last][np.searchsorted(last, np.arange(len(episode)))]
        # With a delay, the first executed action follows some env steps after the observation.
        begin = begin - valid.argmax(1)
        return executed[np.minimum(begin[:, None] + np.arange(self._horizon), end[:, None] - 1)]

    def save(self, folder: Path) -> None:
        """Save the buffer if `save_replay` is set, and the trained weights if rollouts use averaged weights."""
        self._average.save(folder)
        # The buffer is equal on all ranks.
        if self._settings.save_replay and not self._trainer.ranks.rank_info.rank:
            save_state(folder, REPLAY, self._replay.state())

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        self._average.load(folder)
        if (folder / f"{REPLAY}.json").is_file():
            state: dict[str, Any] = load_state(folder, REPLAY)
            self._replay.load_state(state)
