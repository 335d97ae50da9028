"""One env slot as the scheduler sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from embodyrl.channels.arena import Arena, Ticket
from embodyrl.runtime.jobs import Job
from embodyrl.types import Episode, EpisodeSpec


class Phase(Enum):
    """What a slot waits for."""

    IDLE = "nothing, or its next episode"
    RESETTING = "its first observation"
    READY = "inference"
    INFERRING = "its action"
    ACTED = "simulation"
    STEPPING = "its next observation"


@dataclass
class Chunk:
    """The small results of one executed chunk, copied out of the arena."""

    reward: np.ndarray
    valid: np.ndarray
    success: np.ndarray
    value: np.ndarray
    components: np.ndarray


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
    job: Job | None = None
    """What the running episode belongs to."""
    episode: EpisodeSpec | None = None
    current: Ticket | None = None
    """Record of the current observation."""
    target: Ticket | None = None
    """Record the next observation is being written to."""
    taken: list[Ticket] = field(default_factory=list)
    """Records of the chunks taken so far, if they are kept."""
    chunks: list[Chunk] = field(default_factory=list)
    started: float = 0.0
    doomed: bool = False
    """Its worker died while the policy was reading its record."""

    def begin(self, job: Job, target: Ticket) -> EpisodeSpec:
        """Take the job's next episode."""
        assert self.phase is Phase.IDLE
        self.job = job
        self.episode = job.take(self.index)
        self.target = target
        self.taken, self.chunks = [], []
        self.started = time.perf_counter()
        self.phase = Phase.RESETTING
        return self.episode

    def advance(self) -> None:
        """The observation in `target` is complete."""
        self.current, self.target = self.target, None
        self.phase = Phase.READY

    def take_chunk(self, arena: Arena) -> tuple[bool, bool, bool]:
        """Collect the results of the chunk that was just executed; return (terminated, truncated, quota used up)."""
        assert self.current is not None and self.job is not None
        record = self.current.record
        self.chunks.append(
            Chunk(
                reward=arena["reward"][record].copy(),
                valid=arena["valid"][record].copy(),
                success=arena["success"][record].copy(),
                value=arena["value"][record].copy(),
                components=arena["components"][record].copy(),
            )
        )
        terminated, truncated = bool(arena["terminated"][record].any()), bool(arena["truncated"][record].any())
        if self.job.keep:
            self.taken.append(self.current)
        else:
            arena.free([self.current])
        self.current = None
        return terminated, truncated, self.job.count_chunk(self.index)

    def finish(
        self, instruction: str, value_dim: int, *, terminated: bool, truncated: bool, cut: bool, video: str | None
    ) -> tuple[Episode, list[Ticket]]:
        """Close the episode; returns it and the tickets of its records."""
        assert self.episode is not None
        episode = Episode(
            spec=self.episode,
            records=np.asarray([t.record for t in self.taken], dtype=np.int64),
            reward=np.stack([c.reward for c in self.chunks]),
            valid=np.stack([c.valid for c in self.chunks]),
            success=np.stack([c.success for c in self.chunks]),
            value=np.stack([c.value for c in self.chunks]),
            components=np.stack([c.components for c in self.chunks]),
            bootstrap_value=np.zeros(value_dim, dtype=np.float32),
            terminated=terminated,
            truncated=truncated or cut,
            cut=cut,
            instruction=instruction,
            duration_s=time.perf_counter() - self.started,
            video=video,
        )
        tickets, self.taken, self.chunks = self.taken, [], []
        self._rest()
        return episode, tickets

    def drop(self) -> list[Ticket]:
        """Forget the running episode; returns the tickets to free."""
        tickets = [t for t in (self.current, self.target) if t is not None] + self.taken
        self.current = self.target = None
        self.taken, self.chunks = [], []
        self.doomed = False
        self._rest()
        return tickets

    def _rest(self) -> None:
        assert self.job is not None
        job, self.job, self.episode, self.phase = self.job, None, None, Phase.IDLE
        job.ended()
