"""State of the environments and of their stages. A stage is a group of environments of a worker that step together.

Values that change with every chunk are arrays over all environments; other values are stored in an `EnvState`.
"""

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena, get_record_indices
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import EnvReport, EnvRequest, ResetRequest, to_list_if_short
from embodyrl.plan.run_plan import WorkerEnvs
from embodyrl.scheduler.rollout import Rollout
from embodyrl.types import BoolArray, EarlierPart, Episode, EpisodeSpec, EpisodeStart, IntArray


class Phase:
    """Phases of an environment; plain ints, because phases are compared for every chunk."""

    IDLE = 0
    """The environment runs no episode."""
    RESETTING = 1
    """The environment waits for the first observation of an episode."""
    READY = 2
    """The environment has an observation and waits for inference."""
    INFERRING = 3
    """The policy computes the environment's action chunk."""
    ACTED = 4
    """The environment has an action chunk and waits for simulation."""
    STEPPING = 5
    """The env worker executes the environment's action chunk."""


COPIED_FIELDS: tuple[str, ...] = (
    *(Record.reward, Record.valid, Record.success, Record.value, Record.components, Record.action, Record.top),
)
"""Record fields that are copied into the `Episode` attributes of the same names."""


def get_next_action_index(valid: BoolArray, chunk_steps: int) -> int:
    """Return the index of the first action in the next chunk that follows this chunk's last executed action.

    The next observation follows after `chunk_steps` actions; with a delay, more actions of this chunk are executed.
    """
    executed = np.flatnonzero(valid)
    return max(0, int(executed[-1]) + 1 - chunk_steps) if len(executed) else 0


@dataclass(frozen=True)
class CutEpisode:
    """Episode cut at the end of a rollout, which may continue in the next rollout."""

    executed: EarlierPart
    observation: Mapping[str, np.ndarray]


@dataclass
class EnvState:
    """State of an environment: its running episode, or a cut episode that may continue."""

    index: int
    """Index of the environment among the environments of all workers."""
    rollout: Rollout | None = None
    """Rollout of the running episode."""
    episode: EpisodeSpec | None = None
    copies: list[Sequence[np.ndarray]] = field(default_factory=list)
    """Copies of the record fields `COPIED_FIELDS` of each chunk so far, if the rollout does not keep records."""
    cut_episode: CutEpisode | None = None
    """Unfinished episode whose state is still in the simulator; set only while the environment is idle."""
    earlier: EarlierPart | None = None
    """Part of the running episode that earlier rollouts executed; None: the episode began in this rollout."""


class EnvStates:
    """State of all N environments. Methods take distinct environment indices."""

    def __init__(self, count: int, arena: Arena, *, has_values: bool = False) -> None:
        self._num_bootstraps = int(has_values)
        self.each = [EnvState(index) for index in range(count)]
        self._arena = arena
        # Bytes and an array of the same memory: searching a few bytes is faster than comparing arrays.
        self._phases = bytearray(count)
        self.phase = np.frombuffer(self._phases, np.int8)
        self.min_version, self.noise_seed, self.chunks, self._quota = np.zeros((4, count), np.int64)
        # `min_version`: minimum weight version for actions; `chunks`: number of executed chunks; `_quota`: number of
        # chunks after which the running episode is cut.
        self._started, (self.keeps, self.stale, self.solved) = np.zeros(count), np.zeros((3, count), np.bool_)
        # `keeps`: the rollout keeps records; `stale`: the worker died while the policy was reading the environment's
        # record; `solved`: the goal was already reached when the running episode began.
        self.current, self.target = np.zeros((2, count), np.int64)
        # Record references of the current and of the next observation. `_executed`: record references of the chunks
        # executed so far [N, longest]; `store_chunks` doubles its width for longer episodes.
        self._executed = np.zeros((count, 32), np.int64)

    def get_phases(self, rows: range) -> bytearray:
        """Return the phase (`Phase`) of each environment in a range, one byte per environment."""
        return self._phases[rows.start : rows.stop]

    def find_in_phase(self, phase: int, rows: range) -> IntArray:
        """Return the indices of the environments in `rows` whose phase is `phase`."""
        return rows.start + np.flatnonzero(self.phase[rows.start : rows.stop] == phase)

    def get_running_episodes(self, rows: Sequence[int]) -> set[tuple[EpisodeSpec, int]]:
        """Return the episodes that a simulator is resetting or stepping, with the number of their chunks so far."""
        busy = [row for row in rows if self.phase[row] in (Phase.RESETTING, Phase.STEPPING)]
        return {(spec, int(self.chunks[row])) for row in busy if (spec := self.each[row].episode) is not None}

    def may_act(self, version: int) -> BoolArray:
        """Return the mask [N] of environments whose observation a policy with this weight version may process."""
        return (self.phase == Phase.READY) & (self.min_version <= version)

    def assign(self, rows: IntArray, rollout: Rollout) -> None:
        """Assign the rollout's next episodes to environments; `begin` starts the episodes."""
        specs = rollout.start_episodes(rows)
        self._quota[rows] = rollout.remaining_quota[rows]
        self.min_version[rows], self.keeps[rows] = rollout.min_version, rollout.keep
        self.noise_seed[rows] = [spec.noise_seed for spec in specs]
        for row, spec in zip(rows.tolist(), specs, strict=True):
            env_state = self.each[row]
            # The simulator contains a cut episode that is not continued: a reset drops it.
            env_state.cut_episode = env_state.cut_episode if rollout.continues else None
            env_state.rollout, env_state.episode = rollout, spec
            env_state.earlier = env_state.cut_episode and env_state.cut_episode.executed
            if env_state.earlier is not None:
                # The simulator continues from the earlier start; the action noise is that of this plan.
                first_part = env_state.earlier.spec
                env_state.episode = replace(
                    spec, reset_id=first_part.reset_id, task_id=first_part.task_id, seed=first_part.seed
                )

    def begin(self, rows: IntArray) -> None:
        """Start the assigned episodes; the first observations are written to `target`."""
        self._started[rows], self.solved[rows] = time.perf_counter(), False
        self.phase[rows], self.chunks[rows] = Phase.RESETTING, 0
        self.target[rows] = self._arena.allocate_all(len(rows))

    def build_reset_requests(self, rows: IntArray, first: int) -> Iterator[ResetRequest]:
        """Yield the reset requests of environments; `first` is the index of the worker's first environment."""
        for row, target in zip(rows.tolist(), self.target[rows].tolist(), strict=True):
            rollout, spec = self.each[row].rollout, self.each[row].episode
            assert rollout is not None and spec is not None
            choice = rollout.video(spec) if rollout.video is not None else None
            start = EpisodeStart(
                reset_id=spec.reset_id,
                seed=spec.seed,
                max_episode_steps=rollout.plan.max_episode_steps,
                ignore_terminations=rollout.plan.ignore_terminations,
            )
            stem, keep = choice or (None, "all")
            yield ResetRequest(env_index=row - first, start=start, target=target, video_stem=stem, keep_video=keep)

    def continue_episodes(self, rows: IntArray) -> None:
        """Continue cut episodes: the policy gets their current observation without a simulation step."""
        for row in rows.tolist():
            cut_episode = self.each[row].cut_episode
            assert cut_episode is not None
            with self._arena.write(int(self.target[row])) as record:
                for name, value in cut_episode.observation.items():
                    self._arena[name][record] = value
            self.each[row].cut_episode = None
        self.advance(rows)

    def advance(self, rows: IntArray) -> None:
        """Make the observations in `target` the current observations, ready for inference."""
        self.current[rows], self.phase[rows] = self.target[rows], Phase.READY

    def repeat_actions(self, rows: IntArray) -> None:
        """Replace inference with recorded actions in rollouts that repeat episodes."""
        for row in rows.tolist():
            env_state = self.each[row]
            if env_state.rollout is None or env_state.rollout.replayed is None:
                continue
            assert env_state.episode is not None
            chunks = env_state.rollout.replayed[env_state.episode.episode_id]
            # A simulator that is not reproducible may run for longer than the recording.
            chunk = chunks[min(int(self.chunks[row]), len(chunks) - 1)]
            self._arena[Record.action][get_record_indices(self.current[row])] = chunk
            self.phase[row] = Phase.ACTED

    def step(self, rows: IntArray) -> None:
        """Mark environments as stepping, and allocate the records of their next observations."""
        self.target[rows], self.phase[rows] = self._arena.allocate_all(len(rows)), Phase.STEPPING

    def store_chunks(self, rows: IntArray) -> BoolArray:
        """Store the results of executed chunks; return a mask [n] of environments that used up their quota."""
        if self.chunks[rows].max() == self._executed.shape[1]:
            self._executed = np.concatenate([self._executed, np.zeros_like(self._executed)], axis=1)
        # The observation's record now describes the whole chunk: actions and results are in the same record.
        self._executed[rows, self.chunks[rows]] = self.current[rows]
        self.chunks[rows] += 1
        if len(copied := rows[~self.keeps[rows]]):
            records = get_record_indices(self.current[copied])
            # Copy before the records are freed: they may be reallocated immediately.
            columns = [self._arena[name][records] for name in COPIED_FIELDS]
            for row, *values in zip(copied.tolist(), *columns, strict=True):
                self.each[row].copies.append(values)
            self._arena.free(self.current[copied])
        return np.asarray(self.chunks[rows] == self._quota[rows])

    def finish(
        self,
        rows: IntArray,
        terminated: BoolArray,
        truncated: BoolArray,
        discards_final: BoolArray,
        instructions: Sequence[str],
        videos: Sequence[str | None],
    ) -> list[tuple[Rollout, Episode, IntArray]]:
        """Close the episodes of environments; return each Episode with its rollout and its record references.

        The last record reference is the one in `target` (see `Episode.final_record`), except where `discards_final`
        [n]. No record is freed. Episodes that are neither `terminated` nor `truncated` [n] are cut.
        """
        lengths, targets = self.chunks[rows], self.target[rows]
        counts, cut = np.where(self.keeps[rows], lengths, 0), ~(terminated | truncated)
        sizes = counts + ~discards_final
        # Arrays of all episodes together, of which an episode has slices; they remain valid after records are freed.
        records = get_record_indices(record_refs := self._collect_record_refs(rows, counts, sizes))
        columns: dict[str, Any] = {name: self._arena[name].take(records, 0) for name in COPIED_FIELDS}
        outcomes: dict[str, Any] = {
            "terminated": terminated,
            "truncated": truncated | cut,
            "cut": cut,
            "final_record": np.where(discards_final, -1, get_record_indices(targets)),
            "solved_at_reset": self.solved[rows],
            "duration_s": time.perf_counter() - self._started[rows],
        }
        outcome_rows = zip(*(values.tolist() for values in outcomes.values()), strict=True)
        bootstraps = np.zeros((len(rows), self._num_bootstraps), np.float32)
        per_episode_lists = (
            values.tolist() for values in (lengths, self._quota[rows], counts, sizes.cumsum() - sizes, sizes)
        )
        episodes = []
        for i, (outcome, length, quota, count, start, size) in enumerate(
            zip(outcome_rows, *per_episode_lists, strict=True)
        ):
            env_state = self.each[rows[i]]
            rollout, spec = env_state.rollout, env_state.episode
            assert rollout is not None and spec is not None
            fields = {name: column[start : start + count] for name, column in columns.items()}
            if env_state.copies:
                fields = dict(zip(COPIED_FIELDS, map(np.stack, zip(*env_state.copies, strict=True)), strict=True))
            # With a quota, short episodes are over-represented among the episodes that end before the cut.
            whole = quota >= rollout.plan.max_chunks
            episode = Episode(
                spec=spec,
                records=records[start : start + count],
                **fields,
                **dict(zip(outcomes, outcome, strict=True)),
                bootstrap_value=bootstraps[i],
                counted=not cut[i] if rollout.continues else whole,
                earlier=env_state.earlier,
                instruction=instructions[i],
                video=videos[i],
            )
            episodes.append((rollout, episode, record_refs[start : start + size]))
            # Before the environment is idle: `Rollout.on_episode_end` uses the remaining quota to start the next wave.
            rollout.remaining_quota[env_state.index] -= length
            self._set_idle(env_state)
        return episodes

    def _collect_record_refs(self, rows: IntArray, counts: IntArray, sizes: IntArray) -> IntArray:
        """Return `sizes` [n] record references per environment: `counts` [n] of chunks, then the one in `target`."""
        record_refs = np.concatenate([self._executed[rows], self.target[rows, None]], axis=1)
        record_refs[np.arange(len(rows)), counts] = self.target[rows]
        return record_refs[np.arange(record_refs.shape[1]) < sizes[:, None]]

    def drop(self, row: int, *, requeue: bool = True) -> list[int]:
        """Stop the running episode; return its record references, which the caller frees. `requeue`: run it again."""
        env_state, phase = self.each[row], self.phase[row]
        assert env_state.episode is not None and env_state.rollout is not None
        # Before the environment is idle: `Rollout.on_episode_end` must find the episode in its queue.
        env_state.rollout.discard_attempt(env_state.index, env_state.episode, requeue=requeue)
        record_refs = self._executed[row, : self.chunks[row] if self.keeps[row] else 0].tolist()
        record_refs += [self.current[row]] * (phase in (Phase.READY, Phase.INFERRING, Phase.ACTED, Phase.STEPPING))
        record_refs += [self.target[row]] * (phase in (Phase.RESETTING, Phase.STEPPING))
        self.stale[row] = False
        self._set_idle(env_state)
        return record_refs

    def drop_cut_episodes(self, rows: IntArray) -> list[int]:
        """Discard cut episodes in environments that a lockstep step advances without an action.

        An episode that already waits for its first action is requeued. Return its record references, which the caller
        frees.
        """
        record_refs = []
        for row in rows.tolist():
            env_state = self.each[row]
            env_state.cut_episode = None
            if env_state.earlier is not None and self.phase[row] == Phase.READY and not self.chunks[row]:
                record_refs += self.drop(row)
        return record_refs

    def _set_idle(self, env_state: EnvState) -> None:
        rollout = env_state.rollout
        assert rollout is not None
        env_state.rollout, env_state.episode, env_state.copies = None, None, []
        self.phase[env_state.index] = Phase.IDLE
        rollout.on_episode_end()


StageKey = tuple[str, int]
"""Worker name, and index of the stage in the worker."""


class Stages:
    """Open requests of all stages, and the stages that may have work.

    Only stages with a new event are checked, so that the cost of an event is independent of the number of stages.
    """

    def __init__(self, workers: Sequence[WorkerEnvs], per_worker: int) -> None:
        self._all: list[tuple[StageKey, range]] = []
        self._stages_by_worker: dict[str, range] = {}
        for worker in workers:
            parts = np.array_split(worker.env_indices, min(per_worker, len(worker.env_indices)))
            self._stages_by_worker[worker.name] = range(len(self._all), len(self._all) + len(parts))
            self._all += [((worker.name, n), range(rows[0], rows[-1] + 1)) for n, rows in enumerate(parts)]
        self._stage_index = np.repeat(np.arange(len(self._all)), [len(rows) for _, rows in self._all])
        self.first = {worker.name: worker.env_indices[0] for worker in workers}
        """Index of the first environment of each worker, by worker name."""
        self.busy: dict[StageKey, EnvRequest] = {}
        """Open request of each busy stage."""
        self._reports: list[tuple[int, EnvRequest, EnvReport]] = []
        self._changed: set[int] = set()
        self._work: Hashable = None
        self._sequence = 0

    def get_envs(self, worker: str) -> list[int]:
        """Return the environments of a worker."""
        return [row for stage in self._stages_by_worker[worker] for row in self._all[stage][1]]

    def drop_requests(self, worker: str) -> None:
        """Drop the open requests of a dead worker."""
        for stage in self._stages_by_worker[worker]:
            self.busy.pop(self._all[stage][0], None)

    def start_request(
        self,
        key: StageKey,
        acted: IntArray,
        sources: IntArray,
        targets: IntArray,
        resets: tuple[ResetRequest, ...],
    ) -> EnvRequest:
        """Open a request to execute the chunks of `acted` and to perform `resets`. The stage is then busy."""
        worker, stage = key
        first = self.first[worker]
        self._sequence += 1
        request = self.busy[key] = EnvRequest(
            sequence=self._sequence,
            stage=stage,
            env_indices=to_list_if_short(acted - first),
            sources=to_list_if_short(sources),
            targets=to_list_if_short(targets),
            resets=resets,
        )
        return request

    def finish_request(self, worker: str, report: EnvReport) -> None:
        """Close the open request of a stage, and store its report."""
        request = self.busy.pop((worker, report.stage), None)
        assert request is not None, f"{worker} reports stage {report.stage}, which has no open request"
        assert request.sequence == report.sequence, f"{worker}: reply {report.sequence} to request {request.sequence}"
        self._reports.append((self.first[worker], request, report))
        self.mark_worker_changed(worker)

    def pop_reports(self) -> list[tuple[int, EnvRequest, EnvReport]]:
        """Return (first environment of the worker, request, report) for each new report."""
        reports, self._reports = self._reports, []
        return reports

    def mark_worker_changed(self, worker: str) -> None:
        """Mark all stages of a worker as changed, because a task limit applies to the whole worker."""
        self._changed.update(self._stages_by_worker[worker])

    def mark_changed(self, rows: IntArray) -> None:
        """Mark the pipeline stages of the given environments as changed, for `get_stages_to_check`."""
        self._changed.update(self._stage_index[rows].tolist())

    def get_stages_to_check(self, work: Hashable) -> list[tuple[StageKey, range]]:
        """Return (stage, environments) of idle stages with events; of all idle stages if `work` has changed or is None.

        Args:
            work: value that changes when further episodes can start in any stage.
        """
        indices = range(len(self._all)) if work is None or work != self._work else sorted(self._changed)
        self._work = work
        self._changed.clear()
        return [stage for stage in map(self._all.__getitem__, indices) if stage[0] not in self.busy]
