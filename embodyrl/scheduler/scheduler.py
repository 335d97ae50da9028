"""Rollout scheduling: slots, stages, ready queue, refill. Only tickets move here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import OBSERVATION, Record, decode_instruction
from embodyrl.cluster.protocol import Message, WorkerDied
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.envs.video import remove_films
from embodyrl.plan.blueprint import Blueprint
from embodyrl.scheduler.event_loop import PATIENCE_S, EventLoop
from embodyrl.scheduler.policy_client import PolicyClient
from embodyrl.scheduler.rollout import Rollout, RolloutResult, Tally
from embodyrl.scheduler.slot import Open, Phase, Slot
from embodyrl.types import Episode, EpisodeSpec, EpisodeStart
from embodyrl.workers.messages import (
    Done,
    EnvReport,
    EnvRequest,
    InferItem,
    InferRequest,
    Recording,
    ResetRequest,
    StepRequest,
    ValueRequest,
    WorkerReady,
)

_SHORT_WAIT_S = 0.005  # a batch below its target size waits this long for more observations
_SUSPICIOUS = 2
"""Deaths of env workers at an episode after which it runs alone in its worker."""


class RolloutScheduler(EventLoop):
    """Runs lists of episodes on the env workers with the policy: the event loop of a run with rollouts."""

    def __init__(self, supervisor: Supervisor, arena: Arena, policy: PolicyClient, blueprint: Blueprint) -> None:
        super().__init__(supervisor, policy)
        self._arena = arena
        cfg, algorithm = blueprint.cfg, blueprint.algorithm
        self._num_stages = cfg.rollout.pipeline_stage_num
        self._step_timeout_s = cfg.faults.step_timeout_s
        self._max_attempts = max(2, cfg.faults.max_restarts_per_worker)
        self._needs_values = algorithm is not None and algorithm.needs_values
        self._needs_finals = algorithm is not None and algorithm.needs_finals
        self._value_dim = blueprint.policy.value_dim
        self._lockstep = blueprint.env.lockstep
        # Matrix products may round differently for other batch shapes: a deterministic run has one shape.
        self._padded_size = blueprint.num_slots if cfg.runner.deterministic else 0
        self._slots: list[Slot] = []
        self._stages: dict[tuple[str, int], list[Slot]] = {}
        for worker in blueprint.env_workers:
            stages = min(self._num_stages, len(worker.slots))
            for local, index in enumerate(worker.slots):
                slot = Slot(worker=worker.name, local=local, stage=local * stages // len(worker.slots), index=index)
                self._slots.append(slot)
                self._stages.setdefault((worker.name, slot.stage), []).append(slot)
        self._busy: dict[tuple[str, int], EnvRequest] = {}
        self._task_limits: dict[str, int | None] = {}
        self._sequence = 0
        self._version = 0
        self._rollouts: list[Rollout] = []
        self._tally = Tally()
        self._tally_since: float | None = None
        """When the tally began, if rollouts were open then that went on without anybody waiting for them."""
        self._ready_since = 0.0

    def publish(self, version: int) -> None:
        """Let the policy act with these weights from its next chunk on; running episodes go on with them."""
        for replies in self._policy.publish():
            self.run_until(replies.complete)
        self._version = version

    def open(self, rollout: Rollout, *, first: bool = False) -> Rollout:
        """Let slots start the rollout's episodes as they get free: after those of earlier rollouts, or `first`."""
        self._rollouts.insert(0 if first else len(self._rollouts), rollout)
        self.advance()
        return rollout

    def finish(self, rollout: Rollout) -> RolloutResult:
        """Work on all open rollouts until this one is done.

        Its episodes come back in plan order, not in the order in which they ended; its tally holds all that was done
        since the last call.
        """
        started = time.perf_counter()
        self.run_until(lambda: rollout.done)
        self._rollouts.remove(rollout)
        out = rollout.out
        if self._needs_values and rollout.keep:
            self._bootstrap(out)
        out.episodes.sort(key=lambda e: e.spec.episode_id)
        out.tally, self._tally = self._tally, Tally()
        now = time.perf_counter()
        out.tally.wall_s = now - started
        out.tally.span_s = now - (started if self._tally_since is None else self._tally_since)
        self._tally_since = now if self._rollouts else None
        return out

    def collect(self, rollout: Rollout) -> RolloutResult:
        """Run a rollout before all others."""
        return self.finish(self.open(rollout, first=True))

    def advance(self) -> float:
        """Send idle stages and, if it is time, the policy their work; returns how long to wait for news at most."""
        if not self._rollouts:
            return PATIENCE_S
        self._repeat_actions()
        self._dispatch_env()
        self._dispatch_inference()
        waits_for_batch = not self._policy.busy and any(self._may_act(s) for s in self._slots)
        return _SHORT_WAIT_S if waits_for_batch else PATIENCE_S

    @property
    def pending(self) -> bool:
        """Whether somebody is at work, or the policy could be."""
        return super().pending or bool(self._busy) or any(self._may_act(s) for s in self._slots)

    def abandon(self) -> None:
        """Send no more requests: the run is about to end."""
        self._rollouts.clear()

    def release(self, collection: RolloutResult, episodes: Iterable[Episode] | None = None) -> None:
        """Give the records of a collection, or of some of its episodes, back to the arena."""
        chosen = list(collection.tickets) if episodes is None else [e.spec.episode_id for e in episodes]
        for episode_id in chosen:
            self._arena.free(collection.tickets.pop(episode_id))

    def on_message(self, worker: str, message: Message) -> None:
        """Callback for `Supervisor`: reports and deaths of env workers."""
        if isinstance(message, EnvReport):
            self._on_report(worker, message)
        elif isinstance(message, WorkerReady):
            self._task_limits[worker] = message.task_limit
        elif isinstance(message, WorkerDied):
            self._on_death(worker)

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def _dispatch_env(self) -> None:
        """Send each idle stage its work: a stage steps as a whole, but resets do not wait for inference."""
        for key, slots in self._stages.items():
            if key in self._busy or key[0] in self._supervisor.starting:
                continue
            acted = [s for s in slots if s.phase is Phase.ACTED]
            if acted and any(s.phase is Phase.INFERRING or self._may_act(s) for s in slots):
                acted = []
            steps = tuple(self._step_request(s) for s in acted)
            resets = tuple(self._reset_requests([s for s in slots if s.phase is Phase.IDLE]))
            if not steps and not resets:
                continue
            self._sequence += 1
            request = EnvRequest(sequence=self._sequence, stage=key[1], steps=steps, resets=resets)
            self._busy[key] = request
            timeout = self._step_timeout_s * (len(steps) + len(resets))
            self._supervisor.send(key[0], request, timeout_s=timeout)

    def _reset_requests(self, slots: Sequence[Slot]) -> Iterator[ResetRequest]:
        """Let slots begin their next episodes; those that go on with a cut one need no reset."""
        for slot in slots:
            rollout = self._next_rollout(slot)
            if rollout is None:
                continue
            if rollout.continues and slot.open is not None:
                slot.begin(rollout, self._arena.allocate())
                slot.go_on(self._arena)
            else:
                slot.open = None
                yield self._reset_request(slot, rollout)

    def _next_rollout(self, slot: Slot) -> Rollout | None:
        """The first rollout whose next episode this slot can run now.

        A worker that holds few simulators takes few tasks at once; it then waits rather than take a later rollout's.
        """
        limit = self._task_limits.get(slot.worker)
        if limit is None and not any(rollout.fatal for rollout in self._rollouts):
            # Nobody else matters; to look at them all for each of thousands of slots would take quadratic time.
            return next((rollout for rollout in self._rollouts if rollout.upcoming(slot.index) is not None), None)
        running = [s for s in self._slots if s.worker == slot.worker and s.episode is not None]
        # What waits for new weights may wait for the end of this rollout, so it is in nobody's way.
        moving = [] if self._lockstep else [s for s in running if s.phase is not Phase.READY or self._may_act(s)]
        if any(self._suspicious(s.rollout, s.episode) for s in moving):
            return None
        for rollout in self._rollouts:
            spec = rollout.upcoming(slot.index)
            if spec is None:
                continue
            if moving and self._suspicious(rollout, spec):
                return None
            active = {s.episode.task_id for s in running if s.episode is not None}
            return rollout if limit is None or len(active | {spec.task_id}) <= limit else None
        return None

    def _suspicious(self, rollout: Rollout | None, spec: EpisodeSpec | None) -> bool:
        """Whether two workers died at this episode: it has one for itself then, so that no other is given up for it."""
        return rollout is not None and spec is not None and rollout.fatal[spec.episode_id] >= _SUSPICIOUS

    def _may_act(self, slot: Slot) -> bool:
        """Whether the policy may look at the slot's observation with the present weights."""
        return slot.phase is Phase.READY and slot.rollout is not None and slot.rollout.not_before <= self._version

    def _step_request(self, slot: Slot) -> StepRequest:
        assert slot.current is not None
        slot.target = self._arena.allocate()
        slot.phase = Phase.STEPPING
        return StepRequest(slot=slot.local, source=slot.current, target=slot.target)

    def _reset_request(self, slot: Slot, rollout: Rollout) -> ResetRequest:
        target = self._arena.allocate()
        spec = slot.begin(rollout, target)
        choice = rollout.video(spec) if rollout.video is not None else None
        return ResetRequest(
            slot=slot.local,
            start=EpisodeStart(
                reset_id=spec.reset_id,
                seed=spec.seed,
                max_episode_steps=rollout.plan.max_episode_steps,
                ignore_terminations=rollout.plan.ignore_terminations,
            ),
            target=target,
            video_stem=choice[0] if choice else None,
            keep_video=choice[1] if choice else "all",
        )

    def _repeat_actions(self) -> None:
        """Where a rollout repeats episodes, their actions take the policy's place."""
        for slot in self._slots:
            if slot.rollout is None or slot.rollout.replayed is None or not self._may_act(slot):
                continue
            assert slot.episode is not None and slot.current is not None
            chunks = slot.rollout.replayed[slot.episode.episode_id]
            # A simulator that does not repeat itself may go on for longer than it did.
            self._arena[Record.action][slot.current.record] = chunks[min(slot.chunks, len(chunks) - 1)]
            slot.phase = Phase.ACTED

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
        target = max(1, running // self._num_stages)
        if len(ready) < target and self._busy and now - self._ready_since < _SHORT_WAIT_S:
            return
        self._ready_since = 0.0
        rollout = ready[0].rollout
        assert rollout is not None
        batch = [s for s in ready if s.rollout is not None and s.rollout.mode == rollout.mode]
        for slot in batch:
            slot.phase = Phase.INFERRING
        request = InferRequest(
            items=tuple(self._infer_item(s) for s in batch),
            greedy=rollout.greedy,
            temperature=rollout.temperature,
            version=self._version,
            padded_size=self._padded_size,
        )
        self._policy.submit(request, partial(self._on_inferred, batch))

    def _infer_item(self, slot: Slot) -> InferItem:
        assert slot.current is not None and slot.episode is not None
        row = slot.index if self._padded_size else -1
        return InferItem(ticket=slot.current, noise_seed=slot.episode.noise_seed, chunk=slot.chunks, row=row)

    # --- replies ----------------------------------------------------------------------------------------------------

    def _on_inferred(self, slots: Sequence[Slot], done: Done) -> None:
        self._tally.infer_s += done.seconds
        self._tally.inferences += 1
        self._tally.inferred += len(slots)
        for slot in slots:
            if slot.stale:
                self._arena.free(slot.drop())
            else:
                slot.phase = Phase.ACTED

    def _on_report(self, worker: str, report: EnvReport) -> None:
        key = (worker, report.stage)
        request = self._busy.pop(key, None)
        assert request is not None, f"{worker} reports stage {report.stage}, which was not asked"
        assert request.sequence == report.sequence, f"{worker}: reply {report.sequence} to request {request.sequence}"
        self._tally.sim_s += report.sim_s
        self._tally.render_s += report.render_s
        self._tally.reset_s += report.reset_s
        slots = {s.local: s for s in self._stages[key]}
        recordings = {r.slot: r for r in report.recordings}
        for recording in report.recordings:
            rollout = slots[recording.slot].rollout
            if recording.problem and rollout is not None:
                rollout.out.video_problems.append(recording.problem)
        for local, why in report.unjudged:
            if (rollout := slots[local].rollout) is not None:
                rollout.out.unjudged.append(why)
        if request.steps:
            rows = [step.source.record for step in request.steps]
            terminated = np.asarray(self._arena[Record.terminated][rows].any(axis=1))
            truncated = np.asarray(self._arena[Record.truncated][rows].any(axis=1))
            for step, ended, cut in zip(request.steps, terminated.tolist(), truncated.tolist(), strict=True):
                self._on_stepped(slots[step.slot], ended, cut, recordings.get(step.slot))
        for reset in request.resets:
            slots[reset.slot].advance()

    def _on_stepped(self, slot: Slot, terminated: bool, truncated: bool, recording: Recording | None) -> None:
        rollout = slot.rollout
        assert rollout is not None
        spent = slot.take_chunk(self._arena)
        if not (terminated or truncated or spent):
            slot.advance()
            return
        final, slot.target = slot.target, None
        assert final is not None
        instruction = decode_instruction(self._arena[Record.instruction][final.record])
        episode, tickets = slot.finish(
            self._arena,
            instruction,
            self._value_dim,
            terminated=terminated,
            truncated=truncated,
            cut=not (terminated or truncated),
            video=recording.path if recording else None,
        )
        if rollout.keep and self._needs_finals and not terminated:
            # The observation after a time limit or a cut is not an action's: it is kept for its value.
            tickets.append(final)
            episode = replace(episode, final_record=final.record)
        else:
            self._arena.free([final])
        if rollout.continues and episode.cut:
            seen = {str(name): self._arena[name][final.record].copy() for name in OBSERVATION}
            slot.open = Open(so_far=episode.whole, observation=seen)
        # Of lost attempts nothing counts, or a crash would show in the numbers of a deterministic run.
        self._tally.env_steps += episode.length
        rollout.out.episodes.append(episode)
        if rollout.keep:
            rollout.out.tickets[episode.spec.episode_id] = tickets
        if rollout.on_episode is not None:
            rollout.on_episode(episode)

    def _on_death(self, worker: str) -> None:
        """Play the running episodes of a dead worker again; the policy may still be reading some of their records."""
        self._busy = {key: request for key, request in self._busy.items() if key[0] != worker}
        for slot in self._slots:
            if slot.worker == worker:
                slot.open = None
            if slot.worker != worker or slot.rollout is None or slot.stale:
                continue
            if slot.phase is Phase.INFERRING:
                slot.stale = True
            else:
                self._lose(slot, slot.rollout)

    def _lose(self, slot: Slot, rollout: Rollout) -> None:
        """Put the slot's episode back into its queue, or give it up if it is what kills the workers."""
        spec = slot.episode
        assert spec is not None
        rollout.fatal[spec.episode_id] += (at_work := slot.phase in (Phase.RESETTING, Phase.STEPPING))
        hopeless = at_work and rollout.fatal[spec.episode_id] >= self._max_attempts
        self._arena.free(slot.drop(again=not hopeless))
        if hopeless:
            rollout.out.dropped += 1
            if rollout.video is not None and (choice := rollout.video(spec)) is not None:
                with contextlib.suppress(OSError):  # a folder that nobody may write to has no half films either
                    remove_films(Path(choice[0]))
            self._supervisor.say(
                f"warning: episode {spec.episode_id} (task {spec.task_id}, reset id {spec.reset_id}, seed {spec.seed}) "
                f"is given up: {self._max_attempts} times the env worker died at it "
                "(faults.max_restarts_per_worker); the workers' logs say how."
            )

    def _bootstrap(self, out: RolloutResult) -> None:
        """Fetch the values of the observations after truncated and cut episodes."""
        pending = [(i, e) for i, e in enumerate(out.episodes) if e.final_record >= 0]
        if not pending:
            return
        tickets = tuple(out.tickets[e.spec.episode_id][-1] for _, e in pending)
        request = ValueRequest(tickets=tickets, padded_size=self._padded_size)
        self.run_until(self._policy.ask_acting(request).complete)
        for (i, episode), ticket in zip(pending, tickets, strict=True):
            value = self._arena[Record.value][ticket.record].copy()
            out.episodes[i] = replace(episode, bootstrap_value=value)
