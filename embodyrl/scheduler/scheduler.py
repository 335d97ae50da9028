"""Rollout scheduling: assigns episodes to environments and batches observations; arrays stay in shared memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from embodyrl.channels.arena import Arena, get_record_indices, read_instructions
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.channels.messages import (
    Done,
    EnvReport,
    InferRequest,
    Recording,
    ResetRequest,
    ValueRequest,
    WorkerReady,
    to_list_if_short,
)
from embodyrl.cluster.protocol import Message, WorkerDied
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.envs.video import remove_videos
from embodyrl.plan.run_plan import RunPlan
from embodyrl.scheduler.env_states import CutEpisode, EnvStates, Phase, StageKey, Stages, get_next_action_index
from embodyrl.scheduler.event_loop import EventLoop, PolicyClient
from embodyrl.scheduler.rollout import Rollout, RolloutResult, RolloutStats
from embodyrl.types import BoolArray, Episode, EpisodeSpec, IntArray

_SHORT_WAIT_S = 0.005  # a batch below its target size waits this long for more observations
_END_FIELDS = (Record.terminated, Record.truncated)
_NO_ROWS = np.zeros(0, np.int64)
_CRASHES_BEFORE_ISOLATION = 2
"""Number of worker crashes during an episode after which the episode runs alone in its worker."""


class RolloutScheduler(EventLoop):
    """Event loop that runs lists of episodes on the env workers with the policy."""

    def __init__(self, supervisor: Supervisor, arena: Arena, policy: PolicyClient, run_plan: RunPlan) -> None:
        super().__init__(supervisor, policy)
        self._arena = arena
        cfg, algorithm = run_plan.cfg, run_plan.algorithm
        self._num_stages = cfg.rollout.pipeline_stage_num
        self._step_timeout_s = cfg.faults.step_timeout_s
        # A single crash does not show which episode caused it: other environments of the worker were busy, too.
        self._max_attempts = max(2, cfg.faults.max_restarts_per_worker)
        self._needs_values = algorithm is not None and algorithm.estimator.needs_values
        self._needs_final_observations = algorithm is not None and algorithm.needs_final_observations
        self._needs_terminal_observations = algorithm is not None and algorithm.settings.needs_terminal_observations
        self._chunk_steps = cfg.chunk_steps
        self._lockstep = run_plan.env.simulator.lockstep
        # Matrix products may round differently for other batch shapes, so a deterministic run uses one shape.
        self._padded_size = run_plan.num_envs if cfg.runner.deterministic else 0
        self._envs = EnvStates(run_plan.num_envs, arena, has_values=run_plan.policy.value_dim > 0)
        self._stages = Stages(run_plan.env_workers, self._num_stages)
        self._task_limits: dict[str, int | None] = {}
        self._version = 0
        self._rollouts: list[Rollout] = []
        self._num_opened = 0
        self._stats = RolloutStats()
        self._stats_start: float | None = None
        """Time at which open rollouts began to progress outside of `finish`; None: no rollout is open."""
        self._ready_since = 0.0
        supervisor.get_running_episodes = self._get_running_episodes

    def publish(self, version: int) -> None:
        """Transfer the weights of a version to the policy's processes, which use them from the next chunk on."""
        for replies in self._policy.publish(version):
            self.run_until(replies.is_complete)
        # Environments whose episodes wait for this version may act from here on.
        self._version = version

    def open(self, rollout: Rollout, *, first: bool = False) -> Rollout:
        """Queue a rollout (`first`: at the front of the queue), and start its episodes in free environments."""
        self._num_opened += 1
        self._rollouts.insert(0 if first else len(self._rollouts), rollout)
        self.advance()
        return rollout

    def finish(self, rollout: Rollout) -> RolloutResult:
        """Run all open rollouts until `rollout` is done, and return its result.

        Episodes are returned in plan order, independent of their order of completion. The statistics contain all work
        since the last call.
        """
        start = time.perf_counter()
        self.run_until(lambda: rollout.done)
        self._rollouts.remove(rollout)
        result = rollout.out
        if self._needs_values and rollout.keep:
            self._bootstrap(result)
        result.episodes.sort(key=lambda e: e.spec.episode_id)
        result.stats, self._stats = self._stats, RolloutStats()
        now = time.perf_counter()
        result.stats.wall_s = now - start
        result.stats.span_s = now - (start if self._stats_start is None else self._stats_start)
        self._stats_start = now if self._rollouts else None
        return result

    def collect(self, rollout: Rollout) -> RolloutResult:
        """Run a rollout with priority over queued rollouts, and return its result."""
        return self.finish(self.open(rollout, first=True))

    def advance(self) -> float:
        """Send requests to idle stages and, if a batch is due, to the policy; return the maximum wait in seconds."""
        wait_s = super().advance()
        self._process_reports()
        if not self._rollouts:
            return wait_s
        if any(rollout.replayed is not None for rollout in self._rollouts):
            ready = np.flatnonzero(self._may_act)
            self._envs.repeat_actions(ready)
            self._stages.mark_changed(ready)
        # Simulators before the policy: whether a small batch waits depends on whether a simulator is busy.
        self._dispatch_env()
        return _SHORT_WAIT_S if self._dispatch_inference() else wait_s

    @property
    def pending(self) -> bool:
        """True if a worker or the policy is busy, or can receive work."""
        return super().pending or bool(self._stages.busy) or bool(self._may_act.any())

    def abandon(self) -> None:
        """Drop all rollouts at the end of the run, so that no more requests are sent."""
        self._rollouts.clear()

    def release(self, collection: RolloutResult, episodes: Iterable[Episode] | None = None) -> None:
        """Free the records of a rollout's result, or of some of its episodes."""
        # Popped, so that no record is freed twice.
        episode_ids = list(collection.record_refs) if episodes is None else [e.spec.episode_id for e in episodes]
        if episode_ids:
            self._arena.free(np.concatenate([collection.record_refs.pop(episode_id) for episode_id in episode_ids]))

    def on_message(self, worker: str, message: Message) -> None:
        """Handle reports and deaths of env workers; callback for `Supervisor`."""
        if isinstance(message, EnvReport):
            self._stages.finish_request(worker, message)
            self._stats.add(RolloutStats(sim_s=message.sim_s, render_s=message.render_s, reset_s=message.reset_s))
        elif isinstance(message, WorkerReady):
            self._task_limits[worker] = message.task_limit
            self._stages.mark_worker_changed(worker)
        elif isinstance(message, WorkerDied):
            self._on_death(worker)

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def _dispatch_env(self) -> None:
        """Send work to each idle stage. Environments of a stage step together; resets do not wait for inference."""
        # After crashes, check all stages: an episode that crashed workers waits until its worker runs no other episode.
        crashed = any(rollout.crash_count for rollout in self._rollouts)
        work = (
            None
            if crashed
            else (self._version, self._num_opened, *(rollout.queue_version for rollout in self._rollouts))
        )
        assignments: list[tuple[StageKey, IntArray, tuple[ResetRequest, ...]]] = []
        may_act = self._may_act.tobytes()
        for key, rows in self._stages.get_stages_to_check(work):
            if key[0] in self._supervisor.starting:
                continue
            phases = self._envs.get_phases(rows)
            # If actions of this stage are still missing, wait: half a stage would stay split forever.
            ready = 1 in may_act[rows.start : rows.stop]
            can_step = Phase.ACTED in phases and not (ready or Phase.INFERRING in phases)
            acted = self._envs.find_in_phase(Phase.ACTED, rows) if can_step else _NO_ROWS
            if self._lockstep and can_step:
                self._arena.free(self._envs.drop_cut_episodes(np.setdiff1d(rows, acted)))
            resets = self._start_next_episodes(key[0], rows, crashed) if Phase.IDLE in phases else ()
            if len(acted) or resets:
                assignments.append((key, acted, resets))
        # Together, because array operations take as long on a few environments as on thousands.
        rows = np.concatenate([_NO_ROWS, *(acted for _, acted, _ in assignments)])
        if len(rows):
            self._envs.step(rows)
        for key, acted, resets in assignments:
            sources, targets = self._envs.current[acted], self._envs.target[acted]
            request = self._stages.start_request(key, acted, sources, targets, resets)
            # The environments of a worker may run sequentially, so the deadline grows with their number.
            self._supervisor.send(key[0], request, timeout_s=self._step_timeout_s * (len(acted) + len(resets)))

    def _start_next_episodes(self, worker: str, rows: range, crashed: bool) -> tuple[ResetRequest, ...]:
        """Start the next episodes of idle environments; environments that continue a cut episode need no reset."""
        idle, limit, started = self._envs.find_in_phase(Phase.IDLE, rows), self._task_limits.get(worker), []
        if limit is None and not crashed:
            # All environments together: no episode has to run alone in its worker.
            for rollout in self._rollouts:
                if len(assigned := rollout.select_startable(idle)):
                    started.append(assigned)
                    self._envs.assign(assigned, rollout)
                    if len(assigned) == len(idle):
                        break
                    idle = np.setdiff1d(idle, assigned, assume_unique=True)
        else:
            for assigned in idle[:, None]:
                if (rollout := self._find_next_rollout(worker, int(assigned[0]), limit)) is not None:
                    started.append(assigned)
                    self._envs.assign(assigned, rollout)
        if not started:
            return ()
        starting = np.concatenate(started)
        continues = np.array([self._envs.each[row].cut_episode is not None for row in starting.tolist()])
        new = starting[~continues]
        # In this order: `continue_episodes` fills the targets that `begin` allocates.
        self._envs.begin(np.concatenate([new, starting[continues]]))
        self._envs.continue_episodes(starting[continues])
        return tuple(self._envs.build_reset_requests(new, self._stages.first[worker]))

    def _find_next_rollout(self, worker: str, row: int, limit: int | None) -> Rollout | None:
        """Return the first rollout whose next episode this environment can run.

        Workers with few simulators accept few tasks at a time (`limit`); their environments then wait instead of
        starting a later rollout.
        """
        running = [r for r in self._stages.get_envs(worker) if self._envs.each[r].episode is not None]
        # Environments that wait for new weights are excluded: they may also wait for the end of this rollout.
        may_act, phase = self._may_act, self._envs.phase
        busy = [] if self._lockstep else [r for r in running if phase[r] != Phase.READY or may_act[r]]
        env_states = [self._envs.each[r] for r in busy]
        if any(self._crashes_repeatedly(env_state.rollout, env_state.episode) for env_state in env_states):
            return None
        for rollout in self._rollouts:
            spec = rollout.peek(row)
            if spec is None:
                continue
            if busy and self._crashes_repeatedly(rollout, spec):
                return None
            active = {episode.task_id for r in running if (episode := self._envs.each[r].episode) is not None}
            return rollout if limit is None or len(active | {spec.task_id}) <= limit else None
        return None

    def _crashes_repeatedly(self, rollout: Rollout | None, spec: EpisodeSpec | None) -> bool:
        """Return True if workers crashed repeatedly during this episode, which then runs alone in its worker."""
        return (
            rollout is not None
            and spec is not None
            and rollout.crash_count[spec.episode_id] >= _CRASHES_BEFORE_ISOLATION
        )

    @property
    def _may_act(self) -> BoolArray:
        """Return a mask [N] of environments whose observation the policy may process with the current weights."""
        return self._envs.may_act(self._version)

    def _dispatch_inference(self) -> bool:
        """Send inference batches: at the target size, after a short wait, or if no more observations can arrive.

        Return True if observations wait although a process is idle.
        """
        envs = self._envs
        ready = np.flatnonzero(self._may_act)
        if not len(ready):
            self._ready_since = 0.0
        if not len(ready) or not (num_free_processes := self._policy.num_free):
            return False
        now = time.monotonic()
        self._ready_since = self._ready_since or now
        active, num_processes = int(np.count_nonzero(envs.phase)), self._policy.num_rollout_processes
        target = max(1, active // (self._num_stages * num_processes))
        if len(ready) < target and self._stages.busy and now - self._ready_since < _SHORT_WAIT_S:
            return True
        self._ready_since, waiting = 0.0, len(ready)
        rollout = envs.each[ready[0]].rollout
        assert rollout is not None
        # Temperature and greedy mode apply to a whole batch: environments with another mode wait for the next batch.
        if len({open_rollout.mode for open_rollout in self._rollouts}) > 1:
            modes = [(other := envs.each[row].rollout) and other.mode for row in ready]
            ready = ready[[mode == rollout.mode for mode in modes]]
        if num_processes > 1:
            # Several processes share the environments: none gets more than its share.
            ready = ready[: num_free_processes * -(-active // num_processes)]
        batches = np.array_split(ready, min(num_free_processes, max(1, len(ready) // target)))
        for rows in batches:
            self._infer(rows, rollout)
        return len(ready) < waiting and len(batches) < num_free_processes

    def _infer(self, rows: IntArray, rollout: Rollout) -> None:
        envs = self._envs
        envs.phase[rows] = Phase.INFERRING
        request = InferRequest(
            record_refs=to_list_if_short(envs.current[rows]),
            noise_seeds=to_list_if_short(envs.noise_seed[rows]),
            chunk_indices=to_list_if_short(envs.chunks[rows]),
            greedy=rollout.greedy,
            temperature=rollout.temperature,
            version=self._version,
            padded_size=self._padded_size,
            rows=to_list_if_short(rows),
        )
        self._policy.submit(request, partial(self._on_inference_done, rows))

    # --- replies ----------------------------------------------------------------------------------------------------

    def _on_inference_done(self, rows: IntArray, done: Done) -> None:
        self._stats.inference_s += done.seconds
        self._stats.num_inferences += 1
        self._stats.num_observations += len(rows)
        # Records of dead workers: the policy was reading them until now, so they are freed here.
        stale = rows[self._envs.stale[rows]].tolist()
        self._envs.phase[rows] = Phase.ACTED
        self._stages.mark_changed(rows)
        for row in stale:
            self._arena.free(self._envs.drop(row))

    def _process_reports(self) -> None:
        """Process all new reports together: an array operation is as fast on thousands of environments as on a few."""
        if not (reports := self._stages.pop_reports()):
            return
        # Store results before `_on_step_done` closes the episode and clears the environment.
        recordings = {first + r.env_index: r for first, _, report in reports for r in report.recordings}
        for row, recording in recordings.items():
            rollout = self._envs.each[row].rollout
            if recording.problem and rollout is not None:
                rollout.out.video_problems.append(recording.problem)
        for row, error in (
            (first + local, error) for first, _, report in reports for local, error in report.reward_errors
        ):
            if (rollout := self._envs.each[row].rollout) is not None:
                rollout.out.reward_errors.append(error)
        stepped = np.concatenate([first + np.asarray(request.env_indices, np.int64) for first, request, _ in reports])
        if len(stepped):
            self._on_step_done(stepped, recordings)
        for row in (first + local for first, _, report in reports for local in report.solved):
            self._envs.solved[row] = True
        if resets := [first + reset.env_index for first, request, _ in reports for reset in request.resets]:
            self._envs.advance(np.array(resets))

    def _on_step_done(self, rows: IntArray, recordings: Mapping[int, Recording]) -> None:
        records = get_record_indices(self._envs.current[rows])
        terminated, truncated = (np.asarray(self._arena[name][records].any(axis=1)) for name in _END_FIELDS)
        # `store_chunks` must get every row: it counts the chunks of the quota.
        ended = self._envs.store_chunks(rows) | terminated | truncated
        self._envs.advance(rows[~ended])
        if not ended.any():
            return
        rows, terminated, truncated = rows[ended], terminated[ended], truncated[ended]
        finals = self._envs.target[rows]
        videos = [recording.path if (recording := recordings.get(row)) else None for row in rows.tolist()]
        instructions = read_instructions(self._arena, get_record_indices(finals))
        # The observation after a time limit or a cut has no action; it is kept for its value.
        discards_final = (
            (terminated & (not self._needs_terminal_observations))
            | ~self._envs.keeps[rows]
            | (not self._needs_final_observations)
        )
        finished = self._envs.finish(rows, terminated, truncated, discards_final, instructions, videos)
        for i, (rollout, episode, record_refs) in enumerate(finished):
            if rollout.continues and episode.cut:
                observation = {
                    str(name): self._arena[name][get_record_indices(finals[i])].copy() for name in OBSERVATION
                }
                self._envs.each[rows[i]].cut_episode = CutEpisode(executed=episode.summary, observation=observation)
            # Lost attempts are not counted; otherwise a crash would change metrics of a deterministic run.
            self._stats.env_steps += episode.length
            rollout.out.episodes.append(episode)
            if rollout.keep:
                rollout.out.record_refs[episode.spec.episode_id] = record_refs
            if rollout.on_episode is not None:
                rollout.on_episode(episode)
        self._arena.free(finals[discards_final])

    def _on_death(self, worker: str) -> None:
        """Requeue a dead worker's episodes; mark environments as stale if the policy is reading their records."""
        self._process_reports()
        # Drop open requests: the restarted worker does not have them.
        self._stages.drop_requests(worker)
        for row in self._stages.get_envs(worker):
            env_state = self._envs.each[row]
            env_state.cut_episode = None
            if env_state.rollout is None or self._envs.stale[row]:
                continue
            if self._envs.phase[row] == Phase.INFERRING:
                self._envs.stale[row] = True
            else:
                self._discard_attempt(row, env_state.rollout)

    def _get_running_episodes(self, worker: str) -> set[tuple[EpisodeSpec, int]]:
        self._process_reports()
        return self._envs.get_running_episodes(self._stages.get_envs(worker))

    def _discard_attempt(self, row: int, rollout: Rollout) -> None:
        """Requeue the environment's episode, or drop it after repeated worker crashes."""
        spec = self._envs.each[row].episode
        assert spec is not None
        # Only an episode with an open request can have crashed the worker.
        rollout.crash_count[spec.episode_id] += (
            was_running := self._envs.phase[row] in (Phase.RESETTING, Phase.STEPPING)
        )
        is_dropped = was_running and rollout.crash_count[spec.episode_id] >= self._max_attempts
        self._arena.free(self._envs.drop(row, requeue=not is_dropped))
        if is_dropped:
            rollout.out.dropped += 1
            if rollout.video is not None and (choice := rollout.video(spec)) is not None:
                with contextlib.suppress(OSError):  # partial videos; a read-only folder has none
                    remove_videos(Path(choice[0]))
            self._supervisor.log(
                f"warning: episode {spec.episode_id} (task {spec.task_id}, reset id {spec.reset_id}, seed {spec.seed}) "
                f"is dropped: its env worker died {self._max_attempts} times (faults.max_restarts_per_worker). The "
                "logs of the workers contain the causes. For slow episodes, raise faults.step_timeout_s."
            )

    def _bootstrap(self, result: RolloutResult) -> None:
        """Compute bootstrap values for episodes that end by truncation or at the end of the rollout."""
        truncated = [e for e in result.episodes if e.final_record >= 0]
        if not truncated:
            return
        # `_on_step_done` appended the record of the final observation to those of the chunks.
        record_refs = np.array([result.record_refs[e.spec.episode_id][-1] for e in truncated])
        request = ValueRequest(record_refs=record_refs, padded_size=self._padded_size)
        self.run_until(self._policy.send_to_rollout_processes(request).is_complete)
        for episode, values in zip(truncated, self._arena[Record.value][get_record_indices(record_refs)], strict=True):
            index = get_next_action_index(episode.valid[-1], self._chunk_steps) if len(values) > 1 else 0
            episode.bootstrap_value[:] = values[index]
