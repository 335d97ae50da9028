"""State of a rollout: episodes to start, the environments that may start them, and the results."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from embodyrl.errors import EmbodyError
from embodyrl.plan.episodes import EpisodeList
from embodyrl.types import Episode, EpisodeSpec, FloatArray, IntArray

_NO_QUOTA = 2**62
"""Number of remaining chunk steps of an environment without a quota, effectively unlimited."""
_MAX_REWARD_ERRORS = 10
"""Maximum number of distinct reward errors logged in a run."""

ChooseVideo = Callable[[EpisodeSpec], tuple[str, str] | None]
"""Function that decides on recording an episode: it returns (file stem, outcomes to keep), or None for no recording."""


@dataclass
class RolloutStats:
    """Counts and times of a rollout, for all workers together."""

    env_steps: int = 0
    wall_s: float = 0.0
    """Time in seconds that the driver waited for the rollouts."""
    span_s: float = 0.0
    """Time in seconds in which rollouts progressed; more than `wall_s` if rollouts overlap with an update."""
    sim_s: float = 0.0
    render_s: float = 0.0
    reset_s: float = 0.0
    inference_s: float = 0.0
    num_inferences: int = 0
    num_observations: int = 0

    def add(self, other: RolloutStats) -> None:
        """Add the counts and times of another rollout."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass
class RolloutResult:
    """Result of a rollout."""

    episodes: list[Episode] = field(default_factory=list)
    record_refs: dict[int, IntArray] = field(default_factory=dict)
    """Record references of each episode, by episode id; empty if records are not kept."""
    dropped: int = 0
    """Number of planned episodes that were dropped after repeated worker crashes."""
    filtered: list[Episode] = field(default_factory=list)
    """Filtered episodes that refill groups replaced; their records are freed."""
    refills: int = 0
    """Number of additional groups that were run to replace filtered groups."""
    greedy: dict[int, Episode] = field(default_factory=dict)
    """Greedy episode of each group by group id, if the algorithm needs greedy episodes."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    video_problems: list[str] = field(default_factory=list)
    continues: bool = False
    """True if the next rollout continues the episodes that are unfinished at the end of this rollout."""
    reward_errors: list[str] = field(default_factory=list)
    """Reward errors, one per affected episode."""

    def report_reward_errors(self, log: Callable[[str], None], logged: set[str]) -> None:
        """Log reward errors: each distinct error once per run (`logged`), up to a maximum number of errors.

        Raises:
            EmbodyError: the reward function failed in every episode.
        """
        count = len(self.episodes) + len(self.filtered)
        for error, occurrences in Counter(self.reward_errors).most_common(3):
            if count and len(self.reward_errors) >= count:
                raise EmbodyError(
                    f"None of {count} episodes has a reward: {error}. Check the reward (reward.name, reward.path) and, "
                    "for text, reward.timeout_s. The logs of the env workers contain its output."
                )
            if error not in logged and len(logged) < _MAX_REWARD_ERRORS:
                log(f"warning: {occurrences} of {count} episodes have an unknown reward, which counts as 0: {error}")
                logged.add(error)


class EpisodeQueue:
    """Queue of planned episodes; episodes of crashed workers return to its head."""

    def __init__(self, specs: Sequence[EpisodeSpec]) -> None:
        self._specs, self._next = specs, 0
        # Episodes of crashed workers, newest first: they run before episodes that have not started.
        self._requeued: list[EpisodeSpec] = []

    @property
    def head(self) -> EpisodeSpec:
        """Next episode; the queue must not be empty."""
        return self._requeued[-1] if self._requeued else self._specs[self._next]

    def pop(self) -> EpisodeSpec:
        """Remove and return the next episode."""
        spec = self.head
        if self._requeued:
            self._requeued.pop()
        else:
            self._next += 1
        return spec

    def requeue(self, spec: EpisodeSpec) -> None:
        """Put an episode back at the head of the queue."""
        self._requeued.append(spec)


@dataclass
class Rollout:
    """Execution state of an episode list; several rollouts may share the environments."""

    plan: EpisodeList
    min_version: int = 0
    """Minimum version of the weights with which the policy acts in these episodes; resets may happen earlier."""
    greedy: bool = False
    temperature: float | None = None
    """Sampling temperature; None: the training temperature."""
    keep: bool = True
    """True: keep the records in the arena; False: keep only the small arrays of the episodes."""
    continues: bool = False
    """True if the rollout continues episodes that the previous rollout cut and whose simulator state still exists."""
    video: ChooseVideo | None = None
    replayed: Mapping[int, FloatArray] | None = None
    """Actions [T, K, A] to repeat instead of policy inference, by episode id."""
    on_episode: Callable[[Episode], None] | None = None
    out: RolloutResult = field(default_factory=RolloutResult)

    def __post_init__(self) -> None:
        self.out.continues = self.continues
        self._waves = deque(self.plan.waves)
        self._running = 0
        self.crash_count: Counter[int] = Counter()
        """Number of worker crashes during each episode, by episode id."""
        self.queue_version = 0
        """Number of started waves and requeued episodes, each of which makes episodes available."""
        self._start_next_wave()

    @property
    def mode(self) -> tuple[bool, float | None]:
        """Inference mode (greedy, temperature); only observations with the same mode are batched."""
        return self.greedy, self.temperature

    def select_startable(self, rows: IntArray) -> IntArray:
        """Return those of the idle environments `rows` that can start an episode, if episodes start in this order."""
        rows = rows[rows < self.plan.num_envs]
        rows = rows[self.remaining_quota[rows] > 0]
        return rows[self._num_queued[rows] > 0] if len(self._queues) > 1 else rows[: self._num_queued[0]]

    def peek(self, env_index: int) -> EpisodeSpec | None:
        """Return the next episode of this environment, if any."""
        if not len(self.select_startable(np.array([env_index]))):
            return None
        return self._queues[self._get_queue_index(env_index)].head

    def start_episodes(self, rows: IntArray) -> list[EpisodeSpec]:
        """Start the next episode of each environment in `rows` (see `select_startable`)."""
        queues = [self._get_queue_index(row) for row in rows.tolist()]
        self._running += len(queues)
        np.subtract.at(self._num_queued, queues, 1)
        return [self._queues[queue].pop() for queue in queues]

    def discard_attempt(self, env_index: int, spec: EpisodeSpec, *, requeue: bool) -> None:
        """Discard an attempt at an episode without using quota. With `requeue`, return the episode to the queue."""
        if requeue:
            self._num_queued[queue := self._get_queue_index(env_index)] += 1
            self._queues[queue].requeue(spec)
            self.queue_version += 1

    def on_episode_end(self) -> None:
        """Count an episode that ended or was dropped; after the last episode of a wave, start the next wave."""
        # Before the next wave is checked: this may have been the last episode of the current wave.
        self._running -= 1
        if self._is_exhausted and self._waves:
            self._start_next_wave()

    @property
    def done(self) -> bool:
        """True if every episode of the list has ended or was dropped."""
        return self._is_exhausted and not self._waves

    @property
    def _is_exhausted(self) -> bool:
        # Episodes may remain although the environments have no quota left.
        return not self._running and not len(self.select_startable(np.arange(self.plan.num_envs)))

    def _get_queue_index(self, env_index: int) -> int:
        # One shared queue, or one queue per environment (pre-assigned episodes, quotas).
        return env_index if len(self._queues) > 1 else 0

    def _start_next_wave(self) -> None:
        wave = self._waves.popleft()
        self._queues = [EpisodeQueue(queue) for queue in wave.queues]
        self._num_queued = np.array([len(queue) for queue in wave.queues])
        self.queue_version += 1
        quota = _NO_QUOTA if wave.quota_chunks is None else wave.quota_chunks
        self.remaining_quota = np.full(self.plan.num_envs, quota)
        """[N] number of chunk steps that each idle environment has left in this wave."""
