"""The env slots as the scheduler sees them: what changes with every chunk as arrays, the rest slot by slot."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena, records_of
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import ResetRequest
from embodyrl.scheduler.rollout import NO_QUOTA, Rollout
from embodyrl.types import BoolArray, EarlierPart, Episode, EpisodeSpec, EpisodeStart, IntArray


class Phase:
    """What a slot waits for; plain numbers, because several are looked at with every chunk."""

    IDLE = 0
    """Nothing, or its next episode."""
    RESETTING = 1
    """Its first observation."""
    READY = 2
    """Inference."""
    INFERRING = 3
    """Its action."""
    ACTED = 4
    """Simulation."""
    STEPPING = 5
    """Its next observation."""


KEPT: tuple[str, ...] = (
    *(Record.reward, Record.valid, Record.success, Record.value, Record.components, Record.action, Record.top),
)
"""What an `Episode` keeps of each of its chunks, under the same names."""


@dataclass(frozen=True)
class Open:
    """An episode that a quota has cut and that may go on: what was, and what is seen now."""

    so_far: EarlierPart
    observation: Mapping[str, np.ndarray]


@dataclass
class Slot:
    """What one slot plays."""

    index: int
    """Index over all workers."""
    rollout: Rollout | None = None
    """What the running episode belongs to."""
    episode: EpisodeSpec | None = None
    copies: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    """`KEPT` of the chunks taken so far, if their records are not kept."""
    started: float = 0.0
    room: int = NO_QUOTA
    """Chunk steps of the quota that were left when the episode began."""
    open: Open | None = None
    """The cut episode that its simulator still holds; only while idle."""
    earlier: EarlierPart | None = None
    """What came before the running episode's part of this rollout."""
    stale: bool = False
    """Its worker died while the policy was reading its record."""
    solved: bool = False
    """The goal held when the running episode began."""


class Slots:
    """All slots [N]. Methods take indices of slots, each at most once."""

    def __init__(self, count: int, arena: Arena) -> None:
        self.each = [Slot(index) for index in range(count)]
        self._arena = arena
        self.phase = np.zeros(count, np.int8)
        self.not_before, self.noise_seed, self.chunks, self._left = np.zeros((4, count), np.int64)
        # `not_before`: version of the weights from which on the policy may act; `chunks`: taken so far.
        self.keeps = np.ones(count, np.bool_)
        self.current, self.target = np.zeros((2, count), np.int64)
        # Tickets: of the present observation, and of the one that is being written.
        # Tickets of the chunks taken so far [N, longest]; `take_chunks` doubles it where an episode is longer.
        self._taken = np.zeros((count, 32), np.int64)

    def may_act(self, version: int) -> BoolArray:
        """[N] the policy may look at the slot's observation with these weights."""
        if Phase.READY not in self.phase.tobytes():  # as mostly, and quicker than to compare arrays
            return np.zeros(len(self.phase), np.bool_)
        return (self.phase == Phase.READY) & (self.not_before <= version)

    def assign(self, row: int, rollout: Rollout) -> None:
        """Let a slot take the rollout's next episode; `begin` does what is left."""
        slot = self.each[row]
        slot.rollout, slot.room, slot.episode = rollout, rollout.left(row), rollout.take(row)
        slot.earlier = slot.open.so_far if slot.open is not None and rollout.continues else None
        if slot.earlier is not None:
            # Its simulator goes on from the earlier start; the noise of its actions is this plan's.
            began = slot.earlier.spec
            slot.episode = replace(slot.episode, reset_id=began.reset_id, task_id=began.task_id, seed=began.seed)

    def begin(self, rows: IntArray) -> None:
        """The slots begin the episodes that they were assigned; the first observations go to `target`."""
        now = time.perf_counter()
        # Collected first and assigned at once: element by element numpy would dominate with thousands of slots.
        facts = np.zeros((4, len(rows)), np.int64)
        for i, row in enumerate(rows.tolist()):
            slot = self.each[row]
            assert slot.rollout is not None and slot.episode is not None
            slot.started, slot.solved = now, False
            facts[:, i] = slot.rollout.not_before, slot.episode.noise_seed, slot.room, slot.rollout.keep
        self.not_before[rows], self.noise_seed[rows], self._left[rows], self.keeps[rows] = facts
        self.phase[rows], self.chunks[rows] = Phase.RESETTING, 0
        self.target[rows] = self._arena.allocate_all(len(rows))

    def reset_request(self, row: int, first: int) -> ResetRequest:
        """What the env worker of a slot that has begun is asked; `first`: the worker's first slot."""
        slot = self.each[row]
        rollout, spec = slot.rollout, slot.episode
        assert rollout is not None and spec is not None
        choice = rollout.video(spec) if rollout.video is not None else None
        return ResetRequest(
            slot=row - first,
            start=EpisodeStart(
                reset_id=spec.reset_id,
                seed=spec.seed,
                max_episode_steps=rollout.plan.max_episode_steps,
                ignore_terminations=rollout.plan.ignore_terminations,
            ),
            target=int(self.target[row]),
            video_stem=choice[0] if choice else None,
            keep_video=choice[1] if choice else "all",
        )

    def go_on(self, rows: IntArray) -> None:
        """Show running episodes, cut ones that go on, to the policy: nothing is simulated for that."""
        for row in rows.tolist():
            held = self.each[row].open
            assert held is not None
            with self._arena.write(int(self.target[row])) as record:
                for name, value in held.observation.items():
                    self._arena[name][record] = value
            self.each[row].open = None
        self.advance(rows)

    def advance(self, rows: IntArray) -> None:
        """The observations in `target` are complete."""
        self.current[rows], self.phase[rows] = self.target[rows], Phase.READY

    def repeat_actions(self, rows: IntArray) -> None:
        """Where a rollout repeats episodes, their actions take the policy's place."""
        for row in rows.tolist():
            slot = self.each[row]
            if slot.rollout is None or slot.rollout.replayed is None:
                continue
            assert slot.episode is not None
            chunks = slot.rollout.replayed[slot.episode.episode_id]
            # A simulator that does not repeat itself may go on for longer than it did.
            chunk = chunks[min(int(self.chunks[row]), len(chunks) - 1)]
            self._arena[Record.action][records_of(self.current[row])] = chunk
            self.phase[row] = Phase.ACTED

    def step(self, rows: IntArray) -> None:
        """Their next observations are to be written."""
        self.target[rows], self.phase[rows] = self._arena.allocate_all(len(rows)), Phase.STEPPING

    def take_chunks(self, rows: IntArray) -> BoolArray:
        """Take the results of the chunks that were just executed; return [n] whether the quota is used up."""
        if self.chunks[rows].max() == self._taken.shape[1]:
            self._taken = np.concatenate([self._taken, np.zeros_like(self._taken)], axis=1)
        # From here on the observation's record stands for its whole chunk: action and results lie beside it.
        self._taken[rows, self.chunks[rows]] = self.current[rows]
        self.chunks[rows] += 1
        self._left[rows] -= 1
        for row in rows[~self.keeps[rows]].tolist():
            record = records_of(self.current[row])
            # Before the record is freed: the arena may give it to the next observation at once.
            self.each[row].copies.append({name: self._arena[name][record].copy() for name in KEPT})
            self._arena.free(self.current[row : row + 1])
        return np.asarray(self._left[rows] == 0)

    def finish(
        self,
        rows: IntArray,
        terminated: BoolArray,
        truncated: BoolArray,
        final_records: IntArray,
        instructions: Sequence[str],
        videos: Sequence[str | None],
        value_dim: int,
    ) -> list[tuple[Episode, IntArray]]:
        """Close the episodes of slots; returns them and the tickets of their records. `target` is left to the caller.

        Those of `terminated` and `truncated` [n] came to their end, all others are cut; `final_records` [n]: see
        `Episode`.
        """
        now, lengths = time.perf_counter(), self.chunks[rows]
        keeps = self.keeps[rows].tolist()
        # Copied, because the row belongs to the slot's next episode as soon as this one is closed.
        taken = [self._taken[row, :n].copy() for row, n in zip(rows.tolist(), lengths.tolist(), strict=True)]
        kept = [own for own, keep in zip(taken, keeps, strict=True) if keep]
        records = records_of(np.concatenate(kept)) if kept else np.zeros(0, np.int64)
        # One gather for all episodes, which get slices of it: they stay right after the records are freed.
        columns: dict[str, Any] = {name: self._arena[name][records] for name in KEPT}
        found, place = [], 0
        for i, row in enumerate(rows.tolist()):
            slot = self.each[row]
            rollout, spec = slot.rollout, slot.episode
            assert rollout is not None and spec is not None
            if keeps[i]:
                own = slice(place, place := place + len(taken[i]))
                fields = {name: column[own] for name, column in columns.items()}
            else:
                own = slice(0, 0)
                fields: dict[str, Any] = {name: np.stack([chunk[name] for chunk in slot.copies]) for name in KEPT}
            cut = not (terminated[i] or truncated[i])
            # Where the quota may cut long episodes, those that end before it are the short ones.
            whole = slot.room * fields[Record.valid].shape[1] >= rollout.plan.max_episode_steps
            episode = Episode(
                spec=spec,
                records=records[own],
                **fields,
                bootstrap_value=np.zeros(value_dim, dtype=np.float32),
                terminated=bool(terminated[i]),
                truncated=bool(truncated[i]) or cut,
                cut=cut,
                final_record=int(final_records[i]),
                counted=not cut if rollout.continues else whole,
                earlier=slot.earlier,
                instruction=instructions[i],
                solved_at_reset=slot.solved,
                duration_s=now - slot.started,
                video=videos[i],
            )
            found.append((episode, taken[i] if keeps[i] else taken[i][:0]))
            # Before the slot is idle: `Rollout.ended` decides by what is left whether the next wave may start.
            rollout.spend(slot.index, len(taken[i]))
            self._become_idle(slot)
        return found

    def drop(self, row: int, *, again: bool = True) -> list[int]:
        """Forget this attempt at the slot's episode, which may start `again`; returns the tickets to free."""
        slot, phase = self.each[row], self.phase[row]
        assert slot.episode is not None and slot.rollout is not None
        # Before the slot is idle: `Rollout.ended` must find the episode in its queue again.
        slot.rollout.lose(slot.index, slot.episode, again=again)
        tickets = self._taken[row, : self.chunks[row] if self.keeps[row] else 0].tolist()
        tickets += [self.current[row]] * (phase in (Phase.READY, Phase.INFERRING, Phase.ACTED, Phase.STEPPING))
        tickets += [self.target[row]] * (phase in (Phase.RESETTING, Phase.STEPPING))
        slot.stale = False
        self._become_idle(slot)
        return tickets

    def _become_idle(self, slot: Slot) -> None:
        rollout = slot.rollout
        assert rollout is not None
        slot.rollout, slot.episode, slot.copies = None, None, []
        self.phase[slot.index] = Phase.IDLE
        rollout.ended()
