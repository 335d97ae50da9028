"""One env slot as the scheduler sees it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from embodyrl.channels.arena import Arena, Ticket
from embodyrl.channels.layout import Record
from embodyrl.scheduler.rollout import Rollout
from embodyrl.types import EarlierPart, Episode, EpisodeSpec


class Phase(Enum):
    """What a slot waits for."""

    IDLE = "nothing, or its next episode"
    RESETTING = "its first observation"
    READY = "inference"
    INFERRING = "its action"
    ACTED = "simulation"
    STEPPING = "its next observation"


KEPT: tuple[str, ...] = (
    *(Record.reward, Record.valid, Record.success, Record.value, Record.components, Record.action),
)
"""What an `Episode` keeps of each of its chunks, under the same names."""

ChunkFields = Mapping[str, np.ndarray]
"""`KEPT` of one chunk, copied out of the arena."""


@dataclass(frozen=True)
class Open:
    """An episode that a quota has cut and that may go on: what was, and what is seen now."""

    so_far: EarlierPart
    observation: Mapping[str, np.ndarray]


@dataclass
class Slot:
    """State of one slot within a rollout."""

    worker: str
    local: int
    """Index within its worker."""
    stage: int
    index: int
    """Index over all workers."""
    phase: Phase = Phase.IDLE
    rollout: Rollout | None = None
    """What the running episode belongs to."""
    episode: EpisodeSpec | None = None
    current: Ticket | None = None
    """Record of the current observation."""
    target: Ticket | None = None
    """Record the next observation is being written to."""
    taken: list[Ticket] = field(default_factory=list)
    """Records of the chunks taken so far, if they are kept."""
    chunks: int = 0
    """Chunks taken so far."""
    copies: list[ChunkFields] = field(default_factory=list)
    """What is kept of them, if their records are not."""
    started: float = 0.0
    room: int | None = None
    """Chunk steps of the quota that were left when the episode began; None: no quota."""
    open: Open | None = None
    """The cut episode that its simulator still holds; only while idle."""
    earlier: EarlierPart | None = None
    """What came before the running episode's part of this rollout."""
    stale: bool = False
    """Its worker died while the policy was reading its record."""

    def begin(self, rollout: Rollout, target: Ticket) -> EpisodeSpec:
        """Take the rollout's next episode."""
        assert self.phase is Phase.IDLE
        self.rollout = rollout
        self.room = rollout.left(self.index)
        self.episode = rollout.take(self.index)
        self.target = target
        self.taken, self.copies, self.chunks = [], [], 0
        self.started = time.perf_counter()
        self.phase = Phase.RESETTING
        self.earlier = self.open.so_far if self.open is not None and rollout.continues else None
        if self.earlier is not None:
            began = self.earlier.spec
            self.episode = replace(self.episode, reset_id=began.reset_id, task_id=began.task_id, seed=began.seed)
        return self.episode

    def go_on(self, arena: Arena) -> None:
        """Show the running episode, a cut one that goes on, to the policy: nothing is simulated for that."""
        assert self.open is not None and self.target is not None
        with arena.write(self.target) as record:
            for name, value in self.open.observation.items():
                arena[name][record] = value
        self.open = None
        self.advance()

    def advance(self) -> None:
        """The observation in `target` is complete."""
        self.current, self.target = self.target, None
        self.phase = Phase.READY

    def take_chunk(self, arena: Arena) -> bool:
        """Take the results of the chunk that was just executed; return whether the quota is used up."""
        assert self.current is not None and self.rollout is not None
        self.chunks += 1
        if self.rollout.keep:
            self.taken.append(self.current)
        else:
            self.copies.append({name: arena[name][self.current.record].copy() for name in KEPT})
            arena.free([self.current])
        self.current = None
        return self.rollout.count_chunk(self.index)

    def finish(
        self,
        arena: Arena,
        instruction: str,
        value_dim: int,
        *,
        terminated: bool,
        truncated: bool,
        cut: bool,
        video: str | None,
    ) -> tuple[Episode, list[Ticket]]:
        """Close the episode; returns it and the tickets of its records."""
        assert self.episode is not None and self.rollout is not None
        records = np.asarray([t.record for t in self.taken], dtype=np.int64)

        def stack(name: str) -> np.ndarray:
            if self.copies:
                return np.stack([chunk[name] for chunk in self.copies])
            return arena[name][records]

        valid = stack(Record.valid)

        episode = Episode(
            spec=self.episode,
            records=records,
            reward=stack(Record.reward),
            valid=valid,
            success=stack(Record.success),
            value=stack(Record.value),
            components=stack(Record.components),
            action=stack(Record.action),
            bootstrap_value=np.zeros(value_dim, dtype=np.float32),
            terminated=terminated,
            truncated=truncated or cut,
            cut=cut,
            counted=not cut
            if self.rollout.continues
            else self.room is None or self.room * valid.shape[1] >= self.rollout.plan.max_episode_steps,
            earlier=self.earlier,
            instruction=instruction,
            duration_s=time.perf_counter() - self.started,
            video=video,
        )
        tickets, self.taken, self.copies = self.taken, [], []
        self._become_idle()
        return episode, tickets

    def drop(self, *, again: bool = True) -> list[Ticket]:
        """Forget this attempt at the episode, which may start `again`; returns the tickets to free."""
        assert self.episode is not None and self.rollout is not None
        self.rollout.lose(self.index, self.episode, self.chunks, again=again)
        tickets = [t for t in (self.current, self.target) if t is not None] + self.taken
        self.current = self.target = None
        self.taken, self.copies = [], []
        self.stale = False
        self._become_idle()
        return tickets

    def _become_idle(self) -> None:
        assert self.rollout is not None
        rollout, self.rollout, self.episode, self.phase = self.rollout, None, None, Phase.IDLE
        rollout.ended()
