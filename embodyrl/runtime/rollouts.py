"""Rollout scheduling: slots, stages, ready queue, refill. The driver only moves tickets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from embodyrl.channels.arena import Arena, Ticket
from embodyrl.errors import EmbodyError
from embodyrl.launch.protocol import WorkerDied
from embodyrl.runtime.episodes import RolloutPlan, Wave
from embodyrl.runtime.fleet import Fleet
from embodyrl.runtime.policy_client import PolicyClient
from embodyrl.runtime.slots import Phase, Slot
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

VideoChoice = Callable[[EpisodeSpec], tuple[str, str] | None]
"""Returns (file stem, which outcomes to keep) for an episode that is recorded."""


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


@dataclass
class Collection:
    """What a rollout produced."""

    episodes: list[Episode] = field(default_factory=list)
    tickets: dict[int, list[Ticket]] = field(default_factory=dict)
    """Records of each episode by episode id; empty if they were not kept."""
    dropped: int = 0
    env_steps: int = 0
    wall_s: float = 0.0
    sim_s: float = 0.0
    render_s: float = 0.0
    reset_s: float = 0.0
    infer_s: float = 0.0
    inferences: int = 0
    inferred: int = 0
    video_problems: list[str] = field(default_factory=list)


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
        self._plan: RolloutPlan | None = None
        self._version = 0
        self._greedy = False
        self._temperature: float | None = None
        self._keep = True
        self._video: VideoChoice | None = None
        self._out = Collection()
        self._ready_since = 0.0

    def collect(
        self,
        plan: RolloutPlan,
        *,
        version: int,
        greedy: bool = False,
        temperature: float | None = None,
        keep_records: bool = True,
        video: VideoChoice | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> Collection:
        """Run all episodes of a plan.

        Episodes come back in plan order, not in the order in which they ended. Without `keep_records` the arena is
        free again at the end and only the episodes' small arrays remain. `temperature` replaces the training one.
        """
        self._plan, self._version, self._greedy, self._keep, self._video = plan, version, greedy, keep_records, video
        self._temperature = temperature
        self._on_episode = on_episode
        self._out = Collection()
        started = time.perf_counter()
        for wave in plan.waves:
            self._begin(wave, plan.num_slots)
            while any(slot.phase is not Phase.IDLE or slot.has_next for slot in self._slots):
                self._dispatch_env()
                self._dispatch_inference()
                self._check_progress()
                self._fleet.pump(_SHORT_WAIT_S if self._waiting_for_batch else _PATIENCE_S)
        if self._rules.needs_values and keep_records:
            self._bootstrap()
        out = self._out
        out.episodes.sort(key=lambda e: e.spec.episode_id)
        out.wall_s = time.perf_counter() - started
        return out

    def release(self, collection: Collection) -> None:
        """Give the records of a collection back to the arena."""
        for tickets in collection.tickets.values():
            self._arena.free(tickets)
        collection.tickets.clear()

    def release_episode(self, episode: Episode) -> None:
        """Give one finished episode's records back while the collection still runs; for use in `on_episode`."""
        self._arena.free(self._out.tickets.pop(episode.spec.episode_id))

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

    def _begin(self, wave: Wave, num_slots: int) -> None:
        shared = deque(wave.queues[0]) if len(wave.queues) == 1 else None
        for slot in self._slots:
            if shared is not None:
                slot.queue = shared if slot.index < num_slots else deque()
            else:
                slot.queue = deque(wave.queues[slot.index]) if slot.index < len(wave.queues) else deque()
            slot.quota = wave.quota_chunks

    def _dispatch_env(self) -> None:
        """Send each idle stage its work: a stage steps as a whole, but resets do not wait for inference."""
        for key, slots in self._stages.items():
            if key in self._busy or key[0] in self._down:
                continue
            acted = [s for s in slots if s.phase is Phase.ACTED]
            waiting = any(s.phase in (Phase.READY, Phase.INFERRING) for s in slots)
            starters = [s for s in slots if s.phase is Phase.IDLE and s.has_next]
            if acted and waiting:
                acted = []
            steps = tuple(self._step_order(s) for s in acted)
            resets = tuple(self._reset_order(s) for s in starters if self._may_start(s))
            if not steps and not resets:
                continue
            self._sequence += 1
            orders = EnvOrders(sequence=self._sequence, stage=key[1], steps=steps, resets=resets)
            self._busy[key] = orders
            timeout = self._rules.step_timeout_s * (len(steps) + len(resets))
            self._fleet.send(key[0], orders, timeout_s=timeout)

    def _may_start(self, slot: Slot) -> bool:
        """Whether the slot's next episode can run now: a worker that holds few simulators takes few tasks at once."""
        if not slot.has_next:
            return False
        limit = self._task_limits.get(slot.worker)
        active = {s.episode.task_id for s in self._slots if s.worker == slot.worker and s.episode is not None}
        return limit is None or len(active | {slot.queue[0].task_id}) <= limit

    def _step_order(self, slot: Slot) -> StepOrder:
        assert slot.current is not None
        slot.target = self._arena.allocate()
        slot.phase = Phase.STEPPING
        return StepOrder(slot=slot.local, source=slot.current, target=slot.target)

    def _reset_order(self, slot: Slot) -> ResetOrder:
        assert self._plan is not None
        target = self._arena.allocate()
        spec = slot.begin(target)
        choice = self._video(spec) if self._video is not None else None
        return ResetOrder(
            slot=slot.local,
            start=EpisodeStart(
                reset_id=spec.reset_id,
                seed=spec.seed,
                max_episode_steps=self._plan.max_episode_steps,
                ignore_terminations=self._plan.ignore_terminations,
            ),
            target=target,
            video_stem=choice[0] if choice else None,
            keep_video=choice[1] if choice else "all",
        )

    @property
    def _waiting_for_batch(self) -> bool:
        return not self._policy.busy and any(s.phase is Phase.READY for s in self._slots)

    def _dispatch_inference(self) -> None:
        """Batch whatever is ready: at the target size, after a short wait, or when nothing else can arrive."""
        ready = [s for s in self._slots if s.phase is Phase.READY]
        if not ready or self._policy.busy:
            self._ready_since = 0.0
            return
        now = time.monotonic()
        self._ready_since = self._ready_since or now
        running = sum(s.phase is not Phase.IDLE for s in self._slots)
        target = max(1, running // self._rules.stages)
        if len(ready) < target and self._busy and now - self._ready_since < _SHORT_WAIT_S:
            return
        self._ready_since = 0.0
        for slot in ready:
            slot.phase = Phase.INFERRING
        order = InferOrder(
            sequence=0,
            items=tuple(self._infer_item(s) for s in ready),
            greedy=self._greedy,
            temperature=self._temperature,
            version=self._version,
            padded_size=self._rules.total_slots if self._rules.deterministic else 0,
        )
        self._policy.submit(order, partial(self._on_inferred, ready))

    def _infer_item(self, slot: Slot) -> InferItem:
        assert slot.current is not None and slot.episode is not None
        row = slot.index if self._rules.deterministic else -1
        return InferItem(ticket=slot.current, noise_seed=slot.episode.noise_seed, chunk=len(slot.chunks), row=row)

    def _check_progress(self) -> None:
        """A scheduler that waits for nobody would wait for ever."""
        stuck = not self._busy and not self._policy.busy and not self._down
        if stuck and any(s.phase is not Phase.IDLE or s.has_next for s in self._slots):
            assert any(s.phase is Phase.READY for s in self._slots), f"rollout is stuck: {self._slots}"

    # --- replies ----------------------------------------------------------------------------------------------------

    def _on_inferred(self, slots: Sequence[Slot], done: Done) -> None:
        self._out.infer_s += done.seconds
        self._out.inferences += 1
        self._out.inferred += len(slots)
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
        out = self._out
        out.sim_s += report.sim_s
        out.render_s += report.render_s
        out.reset_s += report.reset_s
        recordings = {r.slot: r for r in report.recordings}
        out.video_problems += [r.problem for r in report.recordings if r.problem]
        slots = {s.local: s for s in self._stages[key]}
        for order in orders.steps:
            self._on_stepped(slots[order.slot], recordings.get(order.slot))
        for order in orders.resets:
            slots[order.slot].advance()

    def _on_stepped(self, slot: Slot, recording: Recording | None) -> None:
        terminated, truncated = slot.take_chunk(self._arena, keep=self._keep)
        self._out.env_steps += int(slot.chunks[-1].valid.sum())
        cut = slot.quota == 0 and not (terminated or truncated)
        if not (terminated or truncated or cut):
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
            cut=cut,
            video=recording.path if recording else None,
        )
        if self._keep and self._rules.needs_values and not terminated:
            # The observation after a time limit or a cut is not an action's: it is kept for its value.
            tickets.append(final)
            episode = replace(episode, final_record=final.record)
        else:
            self._arena.free([final])
        self._out.episodes.append(episode)
        if self._keep:
            self._out.tickets[episode.spec.episode_id] = tickets
        if self._on_episode is not None:
            self._on_episode(episode)

    def _on_death(self, worker: str) -> None:
        """Drop the running episodes of a dead worker; the policy may still be reading some of their records."""
        self._down.add(worker)
        self._busy = {key: orders for key, orders in self._busy.items() if key[0] != worker}
        for slot in self._slots:
            if slot.worker != worker or slot.phase is Phase.IDLE or slot.doomed:
                continue
            self._out.dropped += 1
            if slot.phase is Phase.INFERRING:
                slot.doomed = True
            else:
                self._arena.free(slot.drop())

    def _bootstrap(self) -> None:
        """Fetch the values of the observations after truncated and cut episodes."""
        out = self._out
        pending = [(i, e) for i, e in enumerate(out.episodes) if e.final_record >= 0]
        if not pending:
            return
        tickets = tuple(out.tickets[e.spec.episode_id][-1] for _, e in pending)
        padded = self._rules.total_slots if self._rules.deterministic else 0
        self._policy.call(ValueOrder(sequence=0, tickets=tickets, padded_size=padded))
        for (i, episode), ticket in zip(pending, tickets, strict=True):
            value = self._arena["value"][ticket.record].copy()
            out.episodes[i] = replace(episode, bootstrap_value=value)


def require_videos(problems: Sequence[str]) -> None:
    """Raise when recordings were asked for and failed.

    Raises:
        EmbodyError: names the first problem and how to go on without recordings.
    """
    if problems:
        raise EmbodyError(f"{problems[0]} ({len(problems)} recordings failed; faults.on_video_error=warn goes on)")
