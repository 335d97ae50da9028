"""Rollout scheduling: slots, stages, ready queue, refill. The driver only moves tickets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.envs.video import remove_films
from embodyrl.launch.protocol import WorkerDied
from embodyrl.runtime.fleet import Fleet
from embodyrl.runtime.jobs import Collection, Job, Tally
from embodyrl.runtime.policy_client import PolicyClient
from embodyrl.runtime.slots import RESULTS, Chunk, Phase, Slot
from embodyrl.types import Episode, EpisodeSpec, EpisodeStart, decode_instruction
from embodyrl.workers.messages import (
    Done,
    EnvOrders,
    EnvReport,
    InferItem,
    InferOrder,
    Recording,
    ResetOrder,
    StepOrder,
    ValueOrder,
    WorkerReady,
)

_SHORT_WAIT_S = 0.005  # a batch below its target size waits this long for more observations
_PATIENCE_S = 1.0
_SUSPICIOUS = 2
"""Deaths of env workers at an episode after which it runs alone in its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSeat:
    """One env worker: its name and its global slot indices."""

    name: str
    slots: range


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRules:
    """What the scheduler needs of the config."""

    stages: int
    deterministic: bool
    needs_values: bool
    step_timeout_s: float
    total_slots: int
    value_dim: int
    lockstep: bool
    """Slots of a worker step together."""
    max_attempts: int
    """An episode whose attempts so often took the env worker with them is given up."""


class Rollouts:
    """Runs episode plans on the env workers with the policy."""

    def __init__(
        self, fleet: Fleet, arena: Arena, seats: Sequence[EnvSeat], policy: PolicyClient, rules: RolloutRules
    ) -> None:
        self._fleet = fleet
        self._arena = arena
        self._policy = policy
        self._rules = rules
        self._slots: list[Slot] = []
        self._stages: dict[tuple[str, int], list[Slot]] = {}
        for seat in seats:
            stages = min(rules.stages, len(seat.slots))
            for local, index in enumerate(seat.slots):
                slot = Slot(worker=seat.name, local=local, stage=local * stages // len(seat.slots), index=index)
                self._slots.append(slot)
                self._stages.setdefault((seat.name, slot.stage), []).append(slot)
        self._busy: dict[tuple[str, int], EnvOrders] = {}
        self._down: set[str] = {seat.name for seat in seats}
        self._task_limits: dict[str, int | None] = {}
        self._sequence = 0
        self._version = 0
        self._jobs: list[Job] = []
        self._tally = Tally()
        self._tally_since: float | None = None
        """When the tally began, if jobs were open then that went on without anybody waiting for them."""
        self._ready_since = 0.0
        policy.meanwhile = self.advance

    def publish(self, version: int) -> None:
        """Let the policy act with these weights from its next chunk on; running episodes go on with them."""
        self._policy.publish()
        self._version = version

    def open(self, job: Job, *, first: bool = False) -> Job:
        """Let slots start the job's episodes as they get free: after those of earlier jobs, or `first`."""
        self._jobs.insert(0 if first else len(self._jobs), job)
        self.advance()
        return job

    def finish(self, job: Job) -> Collection:
        """Work on all open jobs until this one is done.

        Its episodes come back in plan order, not in the order in which they ended; its tally holds all that was done
        since the last call.
        """
        started = time.perf_counter()
        while not job.done:
            self.advance()
            self._check_progress()
            self._fleet.pump(_SHORT_WAIT_S if self._waiting_for_batch else _PATIENCE_S)
        self._jobs.remove(job)
        out = job.out
        if self._rules.needs_values and job.keep:
            self._bootstrap(out)
        out.episodes.sort(key=lambda e: e.spec.episode_id)
        out.tally, self._tally = self._tally, Tally()
        now = time.perf_counter()
        out.tally.wall_s = now - started
        out.tally.span_s = now - (started if self._tally_since is None else self._tally_since)
        self._tally_since = now if self._jobs else None
        return out

    def collect(self, job: Job) -> Collection:
        """Run a job before all others."""
        return self.finish(self.open(job, first=True))

    def advance(self) -> None:
        """Send out all orders that can be sent now; called again whenever something came back."""
        if self._jobs:
            self._dispatch_env()
            self._dispatch_inference()

    def abandon(self) -> None:
        """Send no more orders: the run is about to end."""
        self._jobs.clear()

    def release(self, collection: Collection, episodes: Iterable[Episode] | None = None) -> None:
        """Give the records of a collection, or of some of its episodes, back to the arena."""
        chosen = list(collection.tickets) if episodes is None else [e.spec.episode_id for e in episodes]
        for episode_id in chosen:
            self._arena.free(collection.tickets.pop(episode_id))

    def on_message(self, worker: str, message: Any) -> None:
        """Callback for `Fleet`: reports and deaths of env workers."""
        if isinstance(message, EnvReport):
            self._on_report(worker, message)
        elif isinstance(message, WorkerReady):
            self._down.discard(worker)
            self._task_limits[worker] = message.task_limit
        elif isinstance(message, WorkerDied):
            self._on_death(worker)

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def _dispatch_env(self) -> None:
        """Send each idle stage its work: a stage steps as a whole, but resets do not wait for inference."""
        for key, slots in self._stages.items():
            if key in self._busy or key[0] in self._down:
                continue
            acted = [s for s in slots if s.phase is Phase.ACTED]
            if acted and any(s.phase is Phase.INFERRING or self._may_act(s) for s in slots):
                acted = []
            steps = tuple(self._step_order(s) for s in acted)
            starters = [s for s in slots if s.phase is Phase.IDLE]
            resets = tuple(self._reset_order(s, job) for s in starters if (job := self._next_job(s)))
            if not steps and not resets:
                continue
            self._sequence += 1
            orders = EnvOrders(sequence=self._sequence, stage=key[1], steps=steps, resets=resets)
            self._busy[key] = orders
            timeout = self._rules.step_timeout_s * (len(steps) + len(resets))
            self._fleet.send(key[0], orders, timeout_s=timeout)

    def _next_job(self, slot: Slot) -> Job | None:
        """The first job whose next episode this slot can run now.

        A worker that holds few simulators takes few tasks at once; it then waits rather than take a later job's.
        """
        running = [s for s in self._slots if s.worker == slot.worker and s.episode is not None]
        # What waits for new weights may wait for the end of this job, so it is in nobody's way.
        moving = [] if self._rules.lockstep else [s for s in running if s.phase is not Phase.READY or self._may_act(s)]
        if any(self._suspicious(s.job, s.episode) for s in moving):
            return None
        for job in self._jobs:
            spec = job.upcoming(slot.index)
            if spec is None:
                continue
            if moving and self._suspicious(job, spec):
                return None
            limit = self._task_limits.get(slot.worker)
            active = {s.episode.task_id for s in running if s.episode is not None}
            return job if limit is None or len(active | {spec.task_id}) <= limit else None
        return None

    def _suspicious(self, job: Job | None, spec: EpisodeSpec | None) -> bool:
        """Whether two workers died at this episode: it has one for itself then, so that no other is given up for it."""
        return job is not None and spec is not None and job.fatal[spec.episode_id] >= _SUSPICIOUS

    def _may_act(self, slot: Slot) -> bool:
        """Whether the policy may look at the slot's observation with the present weights."""
        return slot.phase is Phase.READY and slot.job is not None and slot.job.not_before <= self._version

    def _step_order(self, slot: Slot) -> StepOrder:
        assert slot.current is not None
        slot.target = self._arena.allocate()
        slot.phase = Phase.STEPPING
        return StepOrder(slot=slot.local, source=slot.current, target=slot.target)

    def _reset_order(self, slot: Slot, job: Job) -> ResetOrder:
        target = self._arena.allocate()
        spec = slot.begin(job, target)
        choice = job.video(spec) if job.video is not None else None
        return ResetOrder(
            slot=slot.local,
            start=EpisodeStart(
                reset_id=spec.reset_id,
                seed=spec.seed,
                max_episode_steps=job.plan.max_episode_steps,
                ignore_terminations=job.plan.ignore_terminations,
            ),
            target=target,
            video_stem=choice[0] if choice else None,
            keep_video=choice[1] if choice else "all",
        )

    @property
    def _waiting_for_batch(self) -> bool:
        return not self._policy.busy and any(self._may_act(s) for s in self._slots)

    def _dispatch_inference(self) -> None:
        """Batch whatever is ready: at the target size, after a short wait, or when nothing else can arrive."""
        ready = [s for s in self._slots if self._may_act(s)]
        if not ready:
            self._ready_since = 0.0
        if not ready or self._policy.busy:
            return
        now = time.monotonic()
        self._ready_since = self._ready_since or now
        running = sum(s.phase is not Phase.IDLE for s in self._slots)
        target = max(1, running // self._rules.stages)
        if len(ready) < target and self._busy and now - self._ready_since < _SHORT_WAIT_S:
            return
        self._ready_since = 0.0
        job = ready[0].job
        assert job is not None
        batch = [s for s in ready if s.job is not None and s.job.mode == job.mode]
        for slot in batch:
            slot.phase = Phase.INFERRING
        order = InferOrder(
            items=tuple(self._infer_item(s) for s in batch),
            greedy=job.greedy,
            temperature=job.temperature,
            version=self._version,
            padded_size=self._rules.total_slots if self._rules.deterministic else 0,
        )
        self._policy.submit(order, partial(self._on_inferred, batch))

    def _infer_item(self, slot: Slot) -> InferItem:
        assert slot.current is not None and slot.episode is not None
        row = slot.index if self._rules.deterministic else -1
        return InferItem(ticket=slot.current, noise_seed=slot.episode.noise_seed, chunk=len(slot.chunks), row=row)

    def _check_progress(self) -> None:
        """A scheduler that waits for nobody would wait for ever."""
        idle = not self._busy and self._policy.idle and not self._down
        assert not idle or any(self._may_act(s) for s in self._slots), f"rollout is stuck: {self._slots}"

    # --- replies ----------------------------------------------------------------------------------------------------

    def _on_inferred(self, slots: Sequence[Slot], done: Done) -> None:
        self._tally.infer_s += done.seconds
        self._tally.inferences += 1
        self._tally.inferred += len(slots)
        for slot in slots:
            if slot.doomed:
                self._arena.free(slot.drop())
            else:
                slot.phase = Phase.ACTED

    def _on_report(self, worker: str, report: EnvReport) -> None:
        key = (worker, report.stage)
        orders = self._busy.pop(key, None)
        assert orders is not None, f"{worker} reports stage {report.stage}, which was not asked"
        assert orders.sequence == report.sequence, f"{worker}: reply {report.sequence} to order {orders.sequence}"
        self._tally.sim_s += report.sim_s
        self._tally.render_s += report.render_s
        self._tally.reset_s += report.reset_s
        slots = {s.local: s for s in self._stages[key]}
        recordings = {r.slot: r for r in report.recordings}
        for recording in report.recordings:
            job = slots[recording.slot].job
            if recording.problem and job is not None:
                job.out.video_problems.append(recording.problem)
        for local, why in report.unjudged:
            if (job := slots[local].job) is not None:
                job.out.unjudged.append(why)
        if orders.steps:
            rows = [order.source.record for order in orders.steps]
            results = {name: self._arena[name][rows] for name in RESULTS}
            ended = [np.asarray(results[name].any(axis=1)).tolist() for name in ("terminated", "truncated")]
            for i, (order, terminated, truncated) in enumerate(zip(orders.steps, *ended, strict=True)):
                chunk = {name: values[i] for name, values in results.items()}
                self._on_stepped(slots[order.slot], chunk, terminated, truncated, recordings.get(order.slot))
        for order in orders.resets:
            slots[order.slot].advance()

    def _on_stepped(
        self, slot: Slot, chunk: Chunk, terminated: bool, truncated: bool, recording: Recording | None
    ) -> None:
        job = slot.job
        assert job is not None
        spent = slot.take_chunk(self._arena, chunk)
        if not (terminated or truncated or spent):
            slot.advance()
            return
        final, slot.target = slot.target, None
        assert final is not None
        instruction = decode_instruction(self._arena["instruction"][final.record])
        episode, tickets = slot.finish(
            instruction,
            self._rules.value_dim,
            terminated=terminated,
            truncated=truncated,
            cut=not (terminated or truncated),
            video=recording.path if recording else None,
        )
        if job.keep and self._rules.needs_values and not terminated:
            # The observation after a time limit or a cut is not an action's: it is kept for its value.
            tickets.append(final)
            episode = replace(episode, final_record=final.record)
        else:
            self._arena.free([final])
        # Of lost attempts nothing counts, or a crash would show in the numbers of a deterministic run.
        self._tally.env_steps += episode.length
        job.out.episodes.append(episode)
        if job.keep:
            job.out.tickets[episode.spec.episode_id] = tickets
        if job.on_episode is not None:
            job.on_episode(episode)

    def _on_death(self, worker: str) -> None:
        """Play the running episodes of a dead worker again; the policy may still be reading some of their records."""
        self._down.add(worker)
        self._busy = {key: orders for key, orders in self._busy.items() if key[0] != worker}
        for slot in self._slots:
            if slot.worker != worker or slot.job is None or slot.doomed:
                continue
            if slot.phase is Phase.INFERRING:
                slot.doomed = True
            else:
                self._lose(slot, slot.job)

    def _lose(self, slot: Slot, job: Job) -> None:
        """Put the slot's episode back into its queue, or give it up if it is what kills the workers."""
        spec = slot.episode
        assert spec is not None
        job.fatal[spec.episode_id] += (at_work := slot.phase in (Phase.RESETTING, Phase.STEPPING))
        hopeless = at_work and job.fatal[spec.episode_id] >= self._rules.max_attempts
        self._arena.free(slot.drop(again=not hopeless))
        if hopeless:
            job.out.dropped += 1
            if job.video is not None and (choice := job.video(spec)) is not None:
                with contextlib.suppress(OSError):  # a folder that nobody may write to has no half films either
                    remove_films(Path(choice[0]))
            self._fleet.say(
                f"warning: episode {spec.episode_id} (task {spec.task_id}, reset id {spec.reset_id}, seed {spec.seed}) "
                f"is given up: {self._rules.max_attempts} times the env worker died at it "
                "(faults.max_restarts_per_worker); the workers' logs say how."
            )

    def _bootstrap(self, out: Collection) -> None:
        """Fetch the values of the observations after truncated and cut episodes."""
        pending = [(i, e) for i, e in enumerate(out.episodes) if e.final_record >= 0]
        if not pending:
            return
        tickets = tuple(out.tickets[e.spec.episode_id][-1] for _, e in pending)
        padded = self._rules.total_slots if self._rules.deterministic else 0
        self._policy.call_acting(ValueOrder(tickets=tickets, padded_size=padded))
        for (i, episode), ticket in zip(pending, tickets, strict=True):
            value = self._arena["value"][ticket.record].copy()
            out.episodes[i] = replace(episode, bootstrap_value=value)
