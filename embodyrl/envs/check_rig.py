"""What `check-env` works with: an environment on the bench, episodes played on it, and what differs between two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.protocol import Env, EnvFactory
from embodyrl.types import ByteArray, ChunkResult, EnvSpec, EpisodeStart, FloatArray, ObservationOut

SLOTS = 2
CHUNK = 4
"""K: actions per chunk of a played episode."""
MOST_TASKS = 3
MOST_STATES = 4
LIMIT = 16
"""Env steps of a random episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One way in which the environment breaks its contract."""

    field: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A copy of one observation."""

    images: ByteArray
    state: FloatArray
    instruction: str


@dataclass(slots=True, kw_only=True)
class Trace:
    """One played episode: what was seen before each chunk and at the end, and the outcome of each chunk (n = 1)."""

    seen: list[Seen] = field(default_factory=list)
    results: list[ChunkResult] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Executed env steps."""
        return sum(int(result.valid.sum()) for result in self.results)

    @property
    def done(self) -> bool:
        return any(bool(result.done.any()) for result in self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """An episode that terminated by itself."""

    start: EpisodeStart
    actions: FloatArray
    """[n, A] the executed actions; the last one terminated the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """An episode of the demonstrator."""

    start: EpisodeStart
    actions: FloatArray
    """[n, A] its clean choices."""
    trace: Trace


@dataclass(slots=True, kw_only=True)
class Rig:
    """The environment under test and what the checks learned about it so far."""

    factory: EnvFactory
    cfg: EnvConfig
    seed: int
    note: str = ""
    """Shown behind the check that is running, when it passes."""
    ending: Ending | None = None
    demo: Demo | None = None
    brightest: int = 0
    """Largest pixel value of all observations so far."""
    _spec: EnvSpec | None = None
    _env: Env | None = None

    @property
    def spec(self) -> EnvSpec:
        if self._spec is None:
            self._spec = self.factory.spec(self.cfg)
        return self._spec

    @property
    def env(self) -> Env:
        if self._env is None:
            self._env = self.factory.make(self.cfg, SLOTS)
        return self._env

    @property
    def horizon(self) -> int:
        """Env steps that a task may take."""
        return max(self.spec.max_episode_steps, self.cfg.train.max_episode_steps)

    @property
    def made(self) -> bool:
        return self._env is not None

    def tasks(self) -> list[int]:
        """The first tasks of `env.train.task_ids`, or of all."""
        return list(self.cfg.train.task_ids or range(len(self.spec.tasks)))[:MOST_TASKS]

    def reset_ids(self, task: int) -> list[int]:
        """First, last and some between of a task's reset ids."""
        ids = self.spec.reset_ids_of(task)
        return [ids[i] for i in sorted({int(i) for i in np.linspace(0, len(ids) - 1, MOST_STATES)})]

    @property
    def can_ignore(self) -> bool:
        """Episodes may go on after their own end; some simulators cannot, and say so in `validate`."""
        train = replace(self.cfg.train, ignore_terminations=True)
        return not self.factory.validate(replace(self.cfg, train=train))

    def start(self, reset_id: int, *, limit: int = LIMIT, ignore: bool = False) -> EpisodeStart:
        """Describe an episode; `ignore` holds where the environment allows it."""
        return EpisodeStart(
            reset_id=reset_id,
            seed=self.seed,
            max_episode_steps=limit,
            ignore_terminations=ignore and self.can_ignore,
        )

    def first_start(self, *, limit: int = LIMIT, ignore: bool = False) -> EpisodeStart:
        """Start of the first state of the first task."""
        return self.start(self.reset_ids(self.tasks()[0])[0], limit=limit, ignore=ignore)

    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Smallest and largest action [A]; -1 and 1 where nothing is declared."""
        space, width = self.spec.action_space, self.spec.action_dim
        low, high = np.full(width, -1.0, np.float32), np.full(width, 1.0, np.float32)
        if space is not None and space.sizes:
            return np.zeros(width, np.float32), np.asarray(space.sizes, np.float32) - 1
        if space is not None:
            # An endless box has no largest action; try what a policy would start with.
            low = np.where(np.isfinite(space.low), space.low, low).astype(np.float32)
            high = np.where(np.isfinite(space.high), space.high, high).astype(np.float32)
        return low, high

    def actions(self, count: int, stream: int = 0) -> FloatArray:
        """Random actions [count, A] within the bounds, the same for the same stream."""
        draw, (low, high) = np.random.default_rng([self.seed, stream]), self.bounds()
        if self.spec.action_space is not None and self.spec.action_space.sizes:
            return draw.integers(0, high.astype(np.int64) + 1, (count, len(high))).astype(np.float32)
        return draw.uniform(low, high, (count, len(high))).astype(np.float32)

    def observe(self, slot: int, fill: int = 0) -> Seen:
        """Observe into views that hold `fill` (images) and NaN (state) before."""
        spec = self.spec
        images = np.full((len(spec.cameras), *spec.image_size, 3), fill, np.uint8)
        state = np.full(spec.state_dim, np.nan, np.float32)
        self.env.observe([slot], [ObservationOut(images=images, state=state)])
        self.brightest = max(self.brightest, int(images.max(initial=0)))
        return Seen(images=images, state=state, instruction=self.env.instruction(slot))

    def play(
        self,
        slot: int,
        start: EpisodeStart,
        actions: FloatArray,
        *,
        chunk: int = CHUNK,
        between: Callable[[], object] | None = None,
    ) -> Trace:
        """Reset the slot and run `actions` [n, A] in chunks until it ends; `between` runs before each."""
        trace = Trace()
        self.env.reset([slot], [start])
        trace.seen.append(self.observe(slot))
        for first in range(0, len(actions), chunk):
            if between is not None:
                between()
            result = self.env.step_chunk([slot], actions[None, first : first + chunk])
            trace.results.append(result)
            trace.seen.append(self.observe(slot))
            if result.done.any():
                break
        return trace


def seen_difference(one: Seen, other: Seen) -> str | None:
    """Say in what two observations differ; None if they are equal to the last bit."""
    if one.instruction != other.instruction:
        return f"instructions {one.instruction!r} and {other.instruction!r}"
    pixels = int((one.images != other.images).any(axis=-1).sum())
    if pixels:
        return f"{pixels} of {one.images[..., 0].size} pixels differ"
    if one.state.tobytes() != other.state.tobytes():
        return f"states differ by up to {np.nanmax(np.abs(one.state - other.state)):.3g}"
    return None


def trace_difference(one: Trace, other: Trace) -> str | None:
    """Say where two episodes part first; None if they are equal to the last bit."""
    for index, (a, b) in enumerate(zip(one.seen, other.seen, strict=False)):
        if index:
            for name in ("reward", "terminated", "truncated", "success"):
                # A last chunk may be shorter in one of the two: what was not executed does not count.
                left, right = (getattr(r, name)[r.valid] for r in (one.results[index - 1], other.results[index - 1]))
                if not np.array_equal(left, right):
                    return f"{name} of chunk {index - 1} is {left.tolist()} and {right.tolist()}"
        difference = seen_difference(a, b)
        if difference:
            return f"{difference} after {index} chunks"
    if len(one.seen) != len(other.seen):
        return f"{len(one.results)} and {len(other.results)} chunks"
    return None


def shapes(what: str, array: object, shape: Sequence[int], dtype: type[np.generic]) -> Iterable[Violation]:
    """Check that something is an array of this shape and dtype."""
    expected = f"{np.dtype(dtype).name} {tuple(shape)}"
    if not isinstance(array, np.ndarray):
        yield Violation(field=what, expected=expected, found=type(array).__name__)
    elif array.shape != tuple(shape) or array.dtype != dtype:
        yield Violation(field=what, expected=expected, found=f"{array.dtype} {array.shape}")
