"""Harness of `check-env`: runs episodes in the environment under test, and compares episodes."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from embodyrl.config.settings import to_builtin
from embodyrl.envs.protocol import Env, EnvContext, EnvFactory
from embodyrl.envs.settings import EnvSettings
from embodyrl.errors import EmbodyError
from embodyrl.process_cleanup import children_left
from embodyrl.types import ByteArray, ChunkResult, EnvSpec, EpisodeStart, FloatArray

SLOTS = 2
CONTEXT = EnvContext(num_slots=SLOTS)
CHUNK = 4
"""Number of actions per chunk, K."""
MOST_TASKS = 3
MOST_STATES = 4
LIMIT = 16
"""Maximum number of env steps of a random episode."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of the interface contract: expected and actual behaviour."""

    field: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Copy of one observation: images, state and instruction."""

    images: ByteArray
    state: FloatArray
    instruction: str


@dataclass(slots=True, kw_only=True)
class Trace:
    """Recorded episode: observations before each chunk and at the end, and the result of each chunk (n = 1)."""

    start: EpisodeStart
    actions: FloatArray
    """[n, A] requested actions; actions after the end of the episode were not executed."""
    seen: list[Seen] = field(default_factory=list)
    results: list[ChunkResult] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of executed env steps."""
        return sum(int(result.valid.sum()) for result in self.results)

    def any(self, flag: str) -> bool:
        """Return whether `flag`, for example `terminated`, is True for any action of the episode."""
        return any(bool(getattr(result, flag).any()) for result in self.results)


@dataclass(kw_only=True)
class Harness:
    """The environment under test and the results of earlier checks."""

    factory: EnvFactory[EnvSettings]
    cfg: EnvSettings
    seed: int
    note: str = ""
    """Text printed after the name of the current check if the check passes."""
    violations: list[Violation] = field(default_factory=list)
    """Violations of the current check."""
    warnings: list[Violation] = field(default_factory=list)
    """Warnings of the current check."""
    ending: Trace | None = None
    """Episode that terminated, with random actions or actions of the expert; None: not found."""
    demo: Trace | None = None
    """Episode of the scripted expert, without noise on its actions."""
    threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))
    """Threads that existed before the environment was built."""
    children: frozenset[int] = field(default_factory=lambda: frozenset(children_left()))
    """Ids of the child processes that existed before the environment was built."""
    brightest: int = 0
    """Maximum pixel value of all observations so far."""

    def expect(self, holds: bool, field: str, expected: str, found: object) -> bool:
        """Add a violation if the condition `holds` is false; return `holds`."""
        if not holds:
            self.violations.append(Violation(field, expected, str(found)))
        return holds

    def prefer(self, holds: bool, field: str, expected: str, found: object) -> None:
        """Add a warning if the condition `holds` is false."""
        if not holds:
            self.warnings.append(Violation(field, expected, str(found)))

    def expect_repeat(self, one: Trace, other: Trace, field: str, expected: str) -> None:
        """Add a violation if two episodes differ, or a warning if they are nearly equal."""
        difference = trace_difference(one, other)
        self._expect_nearly(difference, difference is None or nearly_equal(one, other), field, expected)

    def expect_same(self, one: Seen, other: Seen, field: str, expected: str) -> None:
        """Add a violation if two observations differ, or a warning if they are nearly equal."""
        self._expect_nearly(seen_difference(one, other), nearly_same(one, other), field, expected)

    def _expect_nearly(self, difference: str | None, nearly: bool, field: str, expected: str) -> None:
        if difference is None or not nearly:
            self.expect(difference is None, field, expected, difference)
            return
        almost = f"{difference}: nearly equal, so runs with the same seed give nearly equal numbers"
        self.prefer(False, field, f"{expected}, bit for bit", almost)

    def expect_equal(self, difference: str | None, field: str, expected: str) -> None:
        """Add a violation if `difference` is not None."""
        self.expect(difference is None, field, expected, difference)

    def expect_array(self, what: str, array: object, shape: Sequence[int], dtype: type[np.generic]) -> bool:
        """Add a violation unless `array` is a NumPy array of the given shape and dtype."""
        found = f"{array.dtype.name} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        expected = f"{np.dtype(dtype).name} {tuple(shape)}"
        return self.expect(found == expected, what, expected, found)

    def expect_refusal(self, what: str, expected: str, found: str, call: Callable[[], object]) -> None:
        """Add a violation unless `call` raises an EmbodyError."""
        try:
            call()
        except EmbodyError:
            return
        self.expect(False, what, expected, found)

    @cached_property
    def spec(self) -> EnvSpec:
        """Spec of the environment under test."""
        return self.factory.spec(self.cfg, CONTEXT)

    @cached_property
    def env(self) -> Env:
        """Environment under test, built at first use."""
        return self.factory.make(self.cfg, CONTEXT)

    @property
    def horizon(self) -> int:
        """Time limit of an episode, in env steps."""
        return max(self.spec.max_episode_steps, self.cfg.train.max_episode_steps)

    def tasks(self) -> list[int]:
        """Return the ids of the tested tasks: the first few in `env.train.task_ids`, or in all tasks."""
        return list(self.cfg.train.task_ids or range(len(self.spec.tasks)))[:MOST_TASKS]

    def reset_ids(self, task: int) -> list[int]:
        """Return the tested reset ids of a task, evenly spaced from the first to the last."""
        ids = self.spec.reset_ids_of(task)
        return [ids[i] for i in sorted({int(i) for i in np.linspace(0, len(ids) - 1, MOST_STATES)})]

    @property
    def can_ignore(self) -> bool:
        """True if `validate` accepts `ignore_terminations`, which lets episodes continue after termination."""
        train = to_builtin(self.cfg.train) | {"ignore_terminations": True}
        return not self.factory.validate(type(self.cfg).model_validate(to_builtin(self.cfg) | {"train": train}))

    def start(self, reset_id: int, *, limit: int = LIMIT, ignore: bool = False) -> EpisodeStart:
        """Return the start settings of an episode; `ignore`: continue after termination, if supported."""
        ignore = ignore and self.can_ignore
        return EpisodeStart(reset_id=reset_id, seed=self.seed, max_episode_steps=limit, ignore_terminations=ignore)

    def first_start(self, *, limit: int = LIMIT, ignore: bool = False) -> EpisodeStart:
        """Return the episode start for the first initial state of the first task."""
        return self.start(self.reset_ids(self.tasks()[0])[0], limit=limit, ignore=ignore)

    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Return finite lower and upper action bounds, each [A]; -1 and 1 for unbounded dimensions."""
        # An unbounded box has no largest action; try typical initial actions, or actions near its only bound.
        low, high = (np.asarray(bound, np.float32) for bound in self.spec.action.bounds)
        low = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high - 2, -1))
        return low, np.where(np.isfinite(high), high, low + 2)

    def actions(self, count: int, stream: int = 0) -> FloatArray:
        """Sample actions [count, A] within the bounds; `stream` seeds the sampling."""
        draw, (low, high) = np.random.default_rng([self.seed, stream]), self.bounds()
        if self.spec.action.sizes:
            return draw.integers(0, high.astype(np.int64) + 1, (count, len(high))).astype(np.float32)
        return draw.uniform(low, high, (count, len(high))).astype(np.float32)

    def observe(self, slot: int, fill: int = 0) -> Seen:
        """Return the observation of a slot, written into arrays prefilled with `fill` (images) and NaN (state)."""
        spec = self.spec
        images = np.full((len(spec.cameras.names), *spec.cameras.size, 3), fill, np.uint8)
        state = np.full(spec.state_dim, np.nan, np.float32)
        self.env.observe([slot], images[None], state[None])
        self.brightest = max(self.brightest, int(images.max(initial=0)))
        if len(broken := np.flatnonzero(~np.isfinite(state))) and not self.violations:
            self.expect(False, f"observe: state[{broken[0]}]", "a finite number", state[broken[0]])
        return Seen(images=images, state=state, instruction=self.env.instruction(slot))

    def first_seen(self, start: EpisodeStart) -> Seen:
        """Return the first observation of an episode in slot 0."""
        return self.play(0, start, self.actions(0)).seen[0]

    def play(
        self,
        slot: int,
        start: EpisodeStart,
        actions: FloatArray,
        *,
        chunk: int = CHUNK,
        between: Callable[[], object] | None = None,
    ) -> Trace:
        """Reset the slot, then run `actions` [n, A] in chunks until the episode ends.

        `between` is called before each chunk.
        """
        trace = Trace(start=start, actions=actions)
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
    """Describe the difference between two observations; None if they are equal bit for bit."""
    if one.instruction != other.instruction:
        return f"instructions {one.instruction!r} and {other.instruction!r}"
    pixels = int((one.images != other.images).any(axis=-1).sum())
    if pixels:
        return f"{pixels} of {one.images[..., 0].size} pixels differ"
    if one.state.tobytes() != other.state.tobytes():
        return f"states differ by up to {np.nanmax(np.abs(one.state - other.state)):.3g}"
    return None


def trace_difference(one: Trace, other: Trace) -> str | None:
    """Describe the first difference between two episodes; None if they are equal bit for bit."""
    for index, (a, b) in enumerate(zip(one.seen, other.seen, strict=False)):
        if index:
            for name in ("reward", "terminated", "truncated", "success"):
                # The last chunk may be shorter in one of the two: actions that were not executed do not count.
                left, right = (getattr(r, name)[r.valid] for r in (one.results[index - 1], other.results[index - 1]))
                if not np.array_equal(left, right):
                    return f"{name} of chunk {index - 1} is {left.tolist()} and {right.tolist()}"
        difference = seen_difference(a, b)
        if difference:
            return f"{difference} after {index} chunks"
    if len(one.seen) != len(other.seen):
        return f"{len(one.results)} and {len(other.results)} chunks"
    return None


_NEAR = 0.003
"""Maximum difference of nearly equal rewards or states, relative to the largest value."""


def nearly_equal(one: Trace, other: Trace) -> bool:
    """Return whether two episodes have equal flags, and nearly equal rewards and observations.

    Contact solvers that order bodies by memory address (Box2D) do not repeat an episode exactly.
    """
    pairs = list(zip(one.results, other.results, strict=False))
    if len(one.results) != len(other.results):
        return False
    if any(not np.array_equal(getattr(a, n), getattr(b, n)) for a, b in pairs for n in ("valid", "terminated")):
        return False
    seen = zip(one.seen, other.seen, strict=True)
    return all(_near(a.reward, b.reward) for a, b in pairs) and all(nearly_same(a, b) for a, b in seen)


def nearly_same(one: Seen, other: Seen) -> bool:
    """Return True if two observations have the same instruction and nearly equal states and images."""
    if one.instruction != other.instruction or not _near(one.state, other.state):
        return False
    return not one.images.size or float(np.abs(one.images.astype(np.float32) - other.images).mean()) <= 1.0


def _near(one: FloatArray, other: FloatArray) -> bool:
    largest = np.abs(one).max(initial=1.0)
    return bool((np.abs(one - other) <= _NEAR * largest).all())


Check = Callable[[Harness], None]

CHECKS: dict[str, tuple[Check, tuple[str, ...]]] = {}
"""Function and prerequisites of each check by name, in the order of execution."""


def check(*needs: str) -> Callable[[Check], Check]:
    """Return a decorator that registers a check by its function name.

    The check runs only if the checks in `needs` pass.
    """

    def add(function: Check) -> Check:
        CHECKS[function.__name__] = function, needs
        return function

    return add
