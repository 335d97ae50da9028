"""Env worker: runs action chunks and writes observations directly into the arena."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from embodyrl.channels.arena import RecordRefs
from embodyrl.channels.layout import STEP_RESULT, Record, decode_instruction, encode_instruction
from embodyrl.channels.messages import EnvReport, EnvRequest, Recording, ResetRequest, WorkerReady
from embodyrl.envs.protocol import ENVS, Env, EnvContext, ReportsSolvedStarts, TextEnv
from embodyrl.envs.settings import EnvSettings
from embodyrl.envs.video import VideoSettings
from embodyrl.errors import EnvError
from embodyrl.workers.lifecycle import WorkerInit
from embodyrl.workers.recording.recordings import Mp4Recordings


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvWorkerInit(WorkerInit):
    """Settings of an env worker."""

    env: EnvSettings
    context: EnvContext
    video: VideoSettings
    expert_noise: float = 0.0
    """Standard deviation of the noise on the scripted expert's actions."""
    scripted: bool = False
    """True if the scripted expert acts instead of the policy; its actions are written into the record as the chunk."""
    labeled: bool = False
    """True if the policy's chunk is executed, and the scripted expert's actions for the same states are recorded."""
    single_step: bool = False
    """True: execute only the first action of each chunk, so that every env step has its own record."""


class EnvWorker:
    """Env worker: runs the parallel environments 0 to num_envs - 1 in this process."""

    def __init__(self, init: EnvWorkerInit) -> None:
        self._init = init
        self._arena = init.open_arena()
        self._env: Env = ENVS.get(init.env.env_type).make(init.env, init.context)
        self._recordings = Mp4Recordings(self._env, init.video)
        self._problems: list[Recording] = []
        self._reward_errors: dict[int, str] = {}
        self._render_s = 0.0
        self._is_conversation = self._arena[Record.reply].shape[1] > 0
        """True if the instruction is a conversation that grows with each reply, False if it is fixed per episode."""
        self._instructions = np.zeros((init.context.num_envs, self._arena[Record.instruction].shape[1]), np.uint8)
        """[N, bytes] encoded instruction of each environment's episode."""

    def ready(self) -> WorkerReady:
        """Return the `WorkerReady` message with the worker's task limit."""
        return WorkerReady(task_limit=self._env.task_limit)

    def handle(self, request: EnvRequest) -> Iterator[EnvReport]:
        """Run the chunks of one stage, then its resets."""
        self._render_s, self._problems = 0.0, []
        started = time.perf_counter()
        recordings = self._step(request) if len(request.env_indices) else []
        stepped = time.perf_counter()
        # Both parts render frames; simulation time is the remainder.
        step_render_s = self._render_s
        solved = self._reset(request.resets) if request.resets else ()
        ended = time.perf_counter()
        yield EnvReport(
            sequence=request.sequence,
            stage=request.stage,
            sim_s=stepped - started - step_render_s,
            render_s=self._render_s,
            reset_s=ended - stepped - (self._render_s - step_render_s),
            recordings=(*recordings, *self._problems),
            reward_errors=tuple(self._reward_errors.items()) if len(request.env_indices) else (),
            solved=tuple(solved),
        )

    def _step(self, request: EnvRequest) -> list[Recording]:
        arena, env_indices = self._arena, np.asarray(request.env_indices, np.int64).tolist()
        records = arena.read(request.sources)
        record_frame = self._record_frame if self._recordings.env_indices else None
        length = 1 if self._init.single_step else arena[Record.action].shape[1]
        if self._init.scripted or self._init.labeled:
            policy_actions = None if self._init.scripted else arena[Record.action][records, :length]
            actions, result = self._env.expert_chunk(
                env_indices, length, noise=self._init.expert_noise, executed=policy_actions, after_step=record_frame
            )
            arena[Record.action][records, :length] = actions
        else:
            if self._is_conversation:
                replies = [decode_instruction(row) for row in arena[Record.reply][records]]
                cast(TextEnv, self._env).set_replies(env_indices, replies, arena[Record.cut_off][records])
            # The policy wrote the actions into the record of the observation.
            result = self._env.step_chunk(env_indices, arena[Record.action][records, :length], after_step=record_frame)
        for name in STEP_RESULT:
            # The record may be reused: clear the results of unexecuted actions.
            arena[name][records, length:] = 0
            arena[name][records, :length] = getattr(result, name)
        self._reward_errors = result.reward_errors
        arena[Record.components][records] = 0 if result.components is None else result.components
        # Also for episodes that have just ended: a truncated episode is bootstrapped from its final observation.
        self._observe(env_indices, request.targets)
        ended = [env_index for env_index, done in zip(env_indices, result.done, strict=True) if done]
        return [self._recordings.end(env_index) for env_index in ended if env_index in self._recordings.env_indices]

    def _reset(self, requests: tuple[ResetRequest, ...]) -> Sequence[int]:
        """Start episodes; return the environments whose goal is already reached before the first action."""
        for request in requests:
            self._recordings.discard(request.env_index)  # the episode was cut
        env_indices = [request.env_index for request in requests]
        self._env.reset(env_indices, [request.start for request in requests])
        if not self._is_conversation:
            self._read_instructions(env_indices)
        for request in requests:
            if request.video_stem is not None and (problem := self._recordings.begin(request)):
                self._problems.append(problem)
        self._observe(env_indices, [request.target for request in requests])
        return self._env.solved_at_reset(env_indices) if isinstance(self._env, ReportsSolvedStarts) else ()

    def _observe(self, env_indices: list[int], targets: RecordRefs) -> None:
        """Write observations into records, which become readable once all are complete."""
        arena = self._arena
        started = time.perf_counter()
        images, state = arena[Record.images], arena[Record.observed_state]
        with arena.write_all(targets) as records:
            self._env.observe(env_indices, images, state, records)
            states = state.take(records, 0)
            if not np.isfinite(states).all():
                row = int(np.flatnonzero(~np.isfinite(states).all(axis=1))[0])
                env, env_index = self._env, env_indices[row]
                raise EnvError(
                    f"env '{env.spec.name}', environment {env_index} ('{env.instruction(env_index)}'): state "
                    f"{states[row].tolist()}; expected finite numbers. Likely cause: the physics diverged."
                )
            if self._is_conversation:
                self._read_instructions(env_indices)
            arena[Record.instruction][records] = self._instructions.take(env_indices, 0)
        self._render_s += time.perf_counter() - started

    def _read_instructions(self, env_indices: list[int]) -> None:
        width = self._instructions.shape[1]
        texts = [self._env.instruction(env_index) for env_index in env_indices]
        encoded = {text: encode_instruction(text, width) for text in {*texts}}
        self._instructions[env_indices] = [encoded[text] for text in texts]

    def _record_frame(self, env_index: int, success: bool) -> None:
        started = time.perf_counter()
        if problem := self._recordings.add(env_index, success):
            self._problems.append(problem)
        self._render_s += time.perf_counter() - started

    def close(self) -> None:
        """Stop recordings and free the simulators."""
        for env_index in [*self._recordings.env_indices]:
            self._recordings.discard(env_index)
        self._env.close()
        if self._init.shared_arena is None:
            self._arena.close()
