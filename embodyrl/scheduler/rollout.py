"""A rollout under way: which episodes are still to start, which slots may start them, what came of the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from embodyrl.errors import EmbodyError
from embodyrl.plan.episodes import EpisodeList
from embodyrl.types import Episode, EpisodeSpec, FloatArray, IntArray

NO_QUOTA = 2**62
"""Chunk steps that are left where there is no quota."""
_REASONS = 10
"""Different reasons that are said in a run."""

VideoChoice = Callable[[EpisodeSpec], tuple[str, str] | None]
"""Returns (file stem, which outcomes to keep) for an episode that is recorded."""


@dataclass
class Tally:
    """Work done by all workers while a rollout was waited for."""

    env_steps: int = 0
    wall_s: float = 0.0
    """Seconds of waiting."""
    span_s: float = 0.0
    """Seconds in which the work was done; more than the waiting where it went on beside an update."""
    sim_s: float = 0.0
    render_s: float = 0.0
    reset_s: float = 0.0
    infer_s: float = 0.0
    inferences: int = 0
    inferred: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts and times of another tally."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass
class RolloutResult:
    """What a rollout produced."""

    episodes: list[Episode] = field(default_factory=list)
    tickets: dict[int, IntArray] = field(default_factory=dict)
    """Records of each episode by episode id; empty if they were not kept."""
    dropped: int = 0
    """Episodes of the plan that were given up, because they took their env worker with them again and again."""
    filtered: list[Episode] = field(default_factory=list)
    """Episodes that other groups ran in place of; their records are gone."""
    refills: int = 0
    """Groups that ran in their place."""
    greedy: dict[int, Episode] = field(default_factory=dict)
    """Greedy episode of each group, where the algorithm compares with it."""
    tally: Tally = field(default_factory=Tally)
    video_problems: list[str] = field(default_factory=list)
    continues: bool = False
    """Episodes that it cut go on in the next one."""
    unjudged: list[str] = field(default_factory=list)
    """Why the reward of an episode is not known, once for each of them."""

    def complain(self, say: Callable[[str], None], known: set[str]) -> None:
        """Say why rewards are not known, each reason once in a run (`known`), and of many different ones a few.

        Raises:
            EmbodyError: not a single reward is known.
        """
        count = len(self.episodes) + len(self.filtered)
        for why, times in Counter(self.unjudged).most_common(3):
            if count and len(self.unjudged) >= count:
                raise EmbodyError(
                    f"None of {count} episodes could be judged: {why}. Learning from that would be learning from "
                    "noise. Is the reward (reward.name, reward.path) there and right, and reward.timeout_s of text "
                    "long enough? What it prints is in the logs of the env workers."
                )
            if why not in known and len(known) < _REASONS:
                say(f"warning: {times} of {count} episodes could not be judged and earn 0 for it: {why}")
                known.add(why)


class Queue:
    """Episodes in order; each is made when somebody looks at it."""

    def __init__(self, specs: Sequence[EpisodeSpec]) -> None:
        self._specs, self._next = specs, 0
        # Episodes whose worker died, newest first: they are played before anything that has not begun.
        self._back: list[EpisodeSpec] = []

    def __len__(self) -> int:
        return len(self._back) + len(self._specs) - self._next

    @property
    def head(self) -> EpisodeSpec:
        """The next episode; there must be one."""
        return self._back[-1] if self._back else self._specs[self._next]

    def pop(self) -> EpisodeSpec:
        """Take the next episode."""
        spec = self.head
        if self._back:
            self._back.pop()
        else:
            self._next += 1
        return spec

    def put_back(self, spec: EpisodeSpec) -> None:
        """Make an episode the next one again."""
        self._back.append(spec)


@dataclass
class Rollout:
    """One plan and its state; several rollouts may share the slots."""

    plan: EpisodeList
    not_before: int = 0
    """Weight version from which on the policy may act in these episodes; resets may come earlier."""
    greedy: bool = False
    temperature: float | None = None
    """Sampling temperature; None: the one of training."""
    keep: bool = True
    """Records stay in the arena; otherwise only the episodes' small arrays remain."""
    continues: bool = False
    """Slots go on with the episodes that the rollout before has cut, where those are still there."""
    video: VideoChoice | None = None
    replayed: Mapping[int, FloatArray] | None = None
    """By episode id: actions [T, K, A] to repeat instead of asking the policy."""
    on_episode: Callable[[Episode], None] | None = None
    out: RolloutResult = field(default_factory=RolloutResult)

    def __post_init__(self) -> None:
        self.out.continues = self.continues
        self._waves = deque(self.plan.waves)
        self._running = 0
        self._queues: list[Queue] = []
        self._spent: Counter[int] = Counter()
        self.fatal: Counter[int] = Counter()
        """How often an env worker died while it was at work on an episode, by episode id."""
        self._quota: int | None = None
        self._next_wave()

    @property
    def mode(self) -> tuple[bool, float | None]:
        """Inferences of one batch have the same mode."""
        return self.greedy, self.temperature

    def has_next(self, slot: int) -> bool:
        """Whether this slot has an episode to start."""
        return bool(self._queue_of(slot)) and self.left(slot) > 0

    def upcoming(self, slot: int) -> EpisodeSpec | None:
        """The episode that this slot would start next."""
        queue = self._queue_of(slot)
        return queue.head if queue and self.left(slot) > 0 else None

    def take(self, slot: int) -> EpisodeSpec:
        """Start that episode."""
        queue = self._queue_of(slot)
        assert queue is not None
        self._running += 1
        return queue.pop()

    def lose(self, slot: int, spec: EpisodeSpec, *, again: bool) -> None:
        """An attempt at an episode is lost, as if its chunk steps had never been; `again`: it is the next to start."""
        queue = self._queue_of(slot)
        if again and queue is not None:
            queue.put_back(spec)

    def spend(self, slot: int, chunks: int) -> None:
        """Count the chunk steps of an episode that ended."""
        self._spent[slot] += chunks

    def left(self, slot: int) -> int:
        """Chunk steps that an idle slot has left in this wave; `NO_QUOTA`: as many as it wants."""
        return NO_QUOTA if self._quota is None else self._quota - self._spent[slot]

    def ended(self) -> None:
        """An episode of this rollout ended or was lost; the next wave starts when the last one of this has."""
        # Before the look at the next wave: this very episode may have been the last one of the present.
        self._running -= 1
        if self._exhausted and self._waves:
            self._next_wave()

    @property
    def done(self) -> bool:
        """Whether every episode of the list has ended or was given up."""
        return self._exhausted and not self._waves

    @property
    def _exhausted(self) -> bool:
        # Slots may have episodes left without any quota to play them.
        return not self._running and not any(map(self.has_next, range(self.plan.num_slots)))

    def _queue_of(self, slot: int) -> Queue | None:
        # One queue that all slots share, or a queue of each slot's own (episodes dealt in advance, quotas).
        if len(self._queues) == 1:
            return self._queues[0] if slot < self.plan.num_slots else None
        return self._queues[slot] if slot < len(self._queues) else None

    def _next_wave(self) -> None:
        wave = self._waves.popleft()
        self._queues = [Queue(queue) for queue in wave.queues]
        self._quota = wave.quota_chunks
        # Quotas hold for one wave.
        self._spent.clear()
