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
from embodyrl.process_cleanup import list_remaining_children
from embodyrl.types import ByteArray, ChunkResult, EnvSpec, EpisodeStart, FloatArray

NUM_ENVS = 2
CONTEXT = EnvContext(num_envs=NUM_ENVS)
CHUNK_LENGTH = 4
"""Number of actions per chunk, K."""
MAX_TASKS = 3
MAX_STATES = 4
MAX_STEPS = 16
"""Maximum number of env steps of a random episode."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Difference between expected and actual behavior of an environment."""

    field: str
    """Method, field or episode with the difference."""
    expected: str
    found: str
    """Actual behavior."""

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationCopy:
    """Copy of one observation: images, state and instruction."""

    images: ByteArray
    state: FloatArray
    instruction: str


@dataclass(slots=True, kw_only=True)
class Trace:
    """Recorded episode of one environment: observations before each chunk and at the end, and results of the chunks."""

    start: EpisodeStart
    actions: FloatArray
    """[n, A] requested actions; actions after the end of the episode were not executed."""
    observations: list[ObservationCopy] = field(default_factory=list)
    results: list[ChunkResult] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of executed env steps."""
        return sum(int(result.valid.sum()) for result in self.results)

    def any(self, flag: str) -> bool:
        """Return True if `flag`, for example `terminated`, is True for any action of the episode."""
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
    terminated_episode: Trace | None = None
    """Episode that terminated, with random actions or actions of the expert; None: not found."""
    expert_episode: Trace | None = None
    """Episode of the scripted expert, without noise on its actions."""
    threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))
    """Threads that existed before the environment was built."""
    children: frozenset[int] = field(default_factory=lambda: frozenset(list_remaining_children()))
    """Ids of the child processes that existed before the environment was built."""
    max_pixel: int = 0
    """Maximum pixel value of all observations so far."""

    def expect(self, condition: bool, field: str, expected: str, actual: object) -> bool:
        """Add a violation if `condition` is False; return `condition`."""
        if not condition:
            self.violations.append(Violation(field, expected, str(actual)))
        return condition

    def warn_unless(self, condition: bool, field: str, expected: str, actual: object) -> None:
        """Add a warning if `condition` is False."""
        if not condition:
            self.warnings.append(Violation(field, expected, str(actual)))

    def expect_repeat(self, first: Trace, second: Trace, field: str, expected: str) -> None:
        """Add a violation if two episodes differ, or a warning if they are nearly equal."""
        exact, near = (describe_trace_difference(first, second, nearly=nearly) for nearly in (False, True))
        self._expect_close(exact, near, field, expected)

    def expect_same(self, first: ObservationCopy, second: ObservationCopy, field: str, expected: str) -> None:
        """Add a violation if two observations differ, or a warning if they are nearly equal."""
        exact, near = (describe_observation_difference(first, second, nearly=nearly) for nearly in (False, True))
        self._expect_close(exact, near, field, expected)

    def _expect_close(self, difference: str | None, large_difference: str | None, field: str, expected: str) -> None:
        if difference is None or large_difference is not None:
            self.expect(difference is None, field, expected, difference)
            return
        actual = f"{difference}: nearly equal, so runs with the same seed are not repeated exactly"
        self.warn_unless(False, field, f"{expected}, bit for bit", actual)

    def expect_array(self, field: str, array: object, shape: Sequence[int], dtype: type[np.generic]) -> bool:
        """Add a violation unless `array` is a NumPy array of the given shape and dtype."""
        actual = f"{array.dtype.name} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        expected = f"{np.dtype(dtype).name} {tuple(shape)}"
        return self.expect(actual == expected, field, expected, actual)

    def expect_error(self, field: str, expected: str, actual: str, function: Callable[[], object]) -> None:
        """Add a violation unless `function` raises an EmbodyError."""
        try:
            function()
        except EmbodyError:
            return
        self.expect(False, field, expected, actual)

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

    def get_tasks(self) -> list[int]:
        """Return the ids of the tested tasks: the first few in `env.train.task_ids`, or in all tasks."""
        return list(self.cfg.train.task_ids or range(len(self.spec.tasks)))[:MAX_TASKS]

    def get_reset_ids(self, task: int) -> list[int]:
        """Return the tested reset ids of a task, evenly spaced from the first to the last."""
        ids = self.spec.get_reset_ids(task)
        return [ids[i] for i in sorted({int(i) for i in np.linspace(0, len(ids) - 1, MAX_STATES)})]

    @property
    def can_ignore_terminations(self) -> bool:
        """True if `validate` accepts `ignore_terminations`, which lets episodes continue after termination."""
        train = to_builtin(self.cfg.train) | {"ignore_terminations": True}
        return not self.factory.validate(type(self.cfg).model_validate(to_builtin(self.cfg) | {"train": train}))

    def make_start(self, reset_id: int, *, limit: int = MAX_STEPS, ignore: bool = False) -> EpisodeStart:
        """Return the start settings of an episode. With `ignore`, it continues after terminations, if supported."""
        ignore = ignore and self.can_ignore_terminations
        return EpisodeStart(reset_id=reset_id, seed=self.seed, max_episode_steps=limit, ignore_terminations=ignore)

    def make_first_start(self, *, limit: int = MAX_STEPS, ignore: bool = False) -> EpisodeStart:
        """Return the episode start for the first initial state of the first task."""
        return self.make_start(self.get_reset_ids(self.get_tasks()[0])[0], limit=limit, ignore=ignore)

    def get_action_bounds(self) -> tuple[FloatArray, FloatArray]:
        """Return finite lower and upper action bounds, each [A]; -1 and 1 for unbounded dimensions."""
        # For a dimension without bounds, use -1..1; for a dimension with one bound, use an interval of 2 at this bound.
        low, high = (np.asarray(bound, np.float32) for bound in self.spec.action.bounds)
        low = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high - 2, -1))
        return low, np.where(np.isfinite(high), high, low + 2)

    def sample_actions(self, count: int, stream: int = 0) -> FloatArray:
        """Sample actions [count, A] within the bounds; `stream` seeds the sampling."""
        rng, (low, high) = np.random.default_rng([self.seed, stream]), self.get_action_bounds()
        if self.spec.action.sizes:
            return rng.integers(0, high.astype(np.int64) + 1, (count, len(high))).astype(np.float32)
        return rng.uniform(low, high, (count, len(high))).astype(np.float32)

    def observe(self, env_index: int, fill: int = 0) -> ObservationCopy:
        """Return the observation of an environment, written into arrays filled with `fill` (images) and NaN (state)."""
        spec = self.spec
        images = np.full((len(spec.cameras.names), *spec.cameras.size, 3), fill, np.uint8)
        state = np.full(spec.state_dim, np.nan, np.float32)
        self.env.observe([env_index], images[None], state[None])
        self.max_pixel = max(self.max_pixel, int(images.max(initial=0)))
        if len(non_finite := np.flatnonzero(~np.isfinite(state))) and not self.violations:
            self.expect(False, f"observe: state[{non_finite[0]}]", "a finite number", state[non_finite[0]])
        return ObservationCopy(images=images, state=state, instruction=self.env.instruction(env_index))

    def get_first_observation(self, start: EpisodeStart) -> ObservationCopy:
        """Return the first observation of an episode in environment 0."""
        return self.run_episode(0, start, self.sample_actions(0)).observations[0]

    def run_episode(
        self,
        env_index: int,
        start: EpisodeStart,
        actions: FloatArray,
        *,
        chunk: int = CHUNK_LENGTH,
        before_chunk: Callable[[], object] | None = None,
    ) -> Trace:
        """Reset the environment, then run `actions` [n, A] in chunks until the episode ends.

        `before_chunk` is called before each chunk.
        """
        trace = Trace(start=start, actions=actions)
        self.env.reset([env_index], [start])
        trace.observations.append(self.observe(env_index))
        for start_index in range(0, len(actions), chunk):
            if before_chunk is not None:
                before_chunk()
            result = self.env.step_chunk([env_index], actions[None, start_index : start_index + chunk])
            trace.results.append(result)
            trace.observations.append(self.observe(env_index))
            if result.done.any():
                break
        return trace


_TOLERANCE = 0.003
"""Maximum difference of nearly equal rewards or states, relative to the largest value."""


def describe_observation_difference(
    first: ObservationCopy, second: ObservationCopy, *, nearly: bool = False
) -> str | None:
    """Describe the difference between two observations; None if they are equal bit for bit, or nearly equal."""
    if first.instruction != second.instruction:
        return f"instructions {first.instruction!r} and {second.instruction!r}"
    num_pixels = int((first.images != second.images).any(axis=-1).sum())
    if num_pixels and not (nearly and np.abs(first.images.astype(np.float32) - second.images).mean() <= 1.0):
        return f"{num_pixels} of {first.images[..., 0].size} pixels differ"
    if first.state.tobytes() != second.state.tobytes() and not (nearly and _are_close(first.state, second.state)):
        return f"states differ by up to {np.nanmax(np.abs(first.state - second.state)):.3g}"
    return None


def describe_trace_difference(first: Trace, second: Trace, *, nearly: bool = False) -> str | None:
    """Describe the first difference between two episodes; None if they are equal bit for bit, or nearly equal.

    Some simulators do not repeat an episode exactly, such as Box2D, which orders bodies by memory address.
    """
    for index, observations in enumerate(zip(first.observations, second.observations, strict=False)):
        for name in ("reward", "terminated", "truncated", "success") if index else ():
            # The last chunk may be shorter in one of the episodes: compare only executed actions.
            left, right = (
                getattr(result, name)[result.valid] for result in (first.results[index - 1], second.results[index - 1])
            )
            is_close = nearly and name == "reward" and left.shape == right.shape and _are_close(left, right)
            if not is_close and not np.array_equal(left, right):
                return f"{name} of chunk {index - 1} is {left.tolist()} and {right.tolist()}"
        if difference := describe_observation_difference(*observations, nearly=nearly):
            return f"{difference} after {index} chunks"
    if len(first.observations) != len(second.observations):
        return f"{len(first.results)} and {len(second.results)} chunks"
    return None


def _are_close(first: FloatArray, second: FloatArray) -> bool:
    largest = np.abs(first).max(initial=1.0)
    return bool((np.abs(first - second) <= _TOLERANCE * largest).all())


Check = Callable[[Harness], None]

CHECKS: dict[str, tuple[Check, tuple[str, ...]]] = {}
"""Function and prerequisites of each check by name, in the order of execution."""


def check(*prerequisites: str) -> Callable[[Check], Check]:
    """Return a decorator that registers a check by its function name.

    The check runs only if the checks in `prerequisites` pass.
    """

    def register(function: Check) -> Check:
        CHECKS[function.__name__] = function, prerequisites
        return function

    return register
