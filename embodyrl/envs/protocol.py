"""The environment seam: one protocol, one factory, one registry. An environment never knows a policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from embodyrl.config.settings import Settings
from embodyrl.conversation import Answer, Judgement, TextRow
from embodyrl.envs.reward import StepRewardSettings
from embodyrl.envs.settings import EnvSettings
from embodyrl.registry import Registry, has
from embodyrl.types import (
    BoolArray,
    ByteArray,
    ChunkResult,
    EnvSpec,
    EpisodeStart,
    FloatArray,
    IntArray,
)

AfterStep = Callable[[int, bool], None]
"""Called with the slot and its success after each executed env step; video recording hangs on it."""


def instruction_for(spec: EnvSpec, reset_id: int) -> str:
    """Return the language instruction of episodes from this reset id."""
    return spec.instructions[reset_id] if spec.instructions else spec.tasks[spec.task_of(reset_id)[0]]


class Env(Protocol):
    """N slots of one simulator inside one process."""

    spec: EnvSpec
    task_limit: int | None
    """How many different tasks the slots may run at the same time without reloading simulators; None: any number."""

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Begin an episode in each slot, settle steps included."""
        ...

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Run a whole chunk `actions` [n, K, A] in the given slots; stops a slot where its episode ends.

        Raises:
            EnvError: the simulator returned a non-finite reward or a wrong shape.
        """
        ...

    def expert_chunk(
        self,
        slots: Sequence[int],
        num_actions: int,
        *,
        noise: float,
        instead: FloatArray | None = None,
        after_step: AfterStep | None = None,
    ) -> tuple[FloatArray, ChunkResult]:
        """Let the scripted expert (it may read privileged state) act for up to `num_actions` steps.

        Executes its actions with Gaussian noise of standard deviation `noise` on all dimensions but the gripper, or
        `instead` [n, K, A], and returns its own, clean choices [n, K, A] (what a learner should imitate) with the
        outcome.

        Raises:
            EnvError: there is no expert for a slot's task.
        """
        ...

    def observe(self, slots: Sequence[int], images: ByteArray, state: FloatArray, rows: IntArray | None = None) -> None:
        """Write the observation of `slots[i]` into `images[rows[i]]` [C, H, W, 3] and `state[rows[i]]` [S].

        `rows` [n] defaults to 0..n-1. The arrays may be shared memory: nothing else is written.
        """
        ...

    def instruction(self, slot: int) -> str:
        """Language instruction of the slot's current episode."""
        ...

    def render(self, slot: int) -> np.ndarray:
        """Return an upright RGB frame [H, W, 3] uint8 of the slot, human-readable."""
        ...

    def close(self) -> None:
        """Free the simulators; idempotent."""
        ...


@runtime_checkable
class ReportsSolvedStarts(Env, Protocol):
    """An environment that can state whether an episode begins with its goal reached."""

    def solved_at_reset(self, slots: Sequence[int]) -> Sequence[int]:
        """Return those of the slots, which were just reset, whose goal holds before the first action."""
        ...


class TextEnv(Env, Protocol):
    """An environment whose actions are words."""

    def set_replies(self, slots: Sequence[int], replies: Sequence[str], cut_off: BoolArray) -> None:
        """Take what the next chunk of each slot says and whether it was cut off [n]; `step_chunk` follows at once."""
        ...


class Rows(Protocol):
    """Tasks in words. Picklable; it may read its source again in each process."""

    @property
    def name(self) -> str:
        """What the task is called."""
        ...

    @property
    def held_out(self) -> int:
        """The last n rows are for evaluation."""
        ...

    @property
    def repeated(self) -> int:
        """How many of these ask what another row asks too."""
        ...

    @property
    def prompt_bytes(self) -> int:
        """UTF-8 bytes of the longest conversation that a row begins."""
        ...

    @property
    def roles(self) -> tuple[tuple[str, ...], ...]:
        """Each sequence of roles that a row has."""
        ...

    @property
    def doubts(self) -> tuple[str, ...]:
        """What works, but may not be meant, a line each."""
        ...

    @property
    def pictures(self) -> int:
        """Images of the row that shows most."""
        ...

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width that have room for each image."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TextRow: ...


class Judge(Protocol):
    """Turns answers into rewards. Picklable; each env worker has its own."""

    components: tuple[str, ...]
    weights: tuple[float, ...]
    """What each component counts in the reward."""

    def __call__(self, answers: Sequence[Answer]) -> list[Judgement]:
        """Judge a batch; a reward function that fails or runs out of time earns 0 and is counted as a component."""
        ...

    def close(self) -> None:
        """End threads and processes; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvContext:
    """What an environment is given beside its keys."""

    num_slots: int = 1
    num_workers: int = 1
    """Processes that build the environment side by side."""
    rows: Rows | None = None
    """For an environment with `reads_rows`."""
    judge: Judge | None = None
    """For an environment with `reads_rows`."""
    pictures: bool = True
    """Somebody may ask for `render`; false: no video is recorded."""
    reward: StepRewardSettings | None = None
    """For an environment with a section `reward`; None: the simulator's own reward."""
    described: EnvSpec | None = None
    """The description that the run plan is built on; None: it is needed anew."""
    suites: tuple[str, ...] = ()
    """Further suites that evaluations cover, of those that the factory's `suites` names."""


class EnvFactory(Protocol):
    """What the registry holds: checks that need no simulator first, the simulator only in a worker."""

    settings: type[EnvSettings]
    """Its keys below `env`. The methods get an instance, with the splits of the command beside them."""
    reads_rows: bool
    """It is about the rows of `data` and judged by `reward`: both groups exist with it. False may be left out."""
    sections: Mapping[str, type[Settings]]
    """Sections of keys by name that exist with it where episodes are played. May be left out."""

    def validate(self, cfg: Any) -> list[str]:
        """Return config problems, one line each with the fix; imports nothing heavy."""
        ...

    def run_problems(self, cfg: Any) -> list[str]:
        """Return problems with sections other than `env` of a whole config. May be left out."""
        ...

    def complete(self, cfg: Any, context: EnvContext) -> EnvContext:
        """Add to the context what the environment reads from other sections of a whole config. May be left out.

        Raises:
            ConfigError: one of them is wrong.
        """
        ...

    def spec(self, cfg: Any, context: EnvContext) -> EnvSpec:
        """Describe the environment without building a simulator.

        Raises:
            MissingDependencyError: a package, system library or asset is missing.
        """
        ...

    def make(self, cfg: Any, context: EnvContext) -> Env:
        """Build the environment with `context.num_slots` slots in this process."""
        ...


class GoalJudge(Protocol):
    """What other goals would have made of what was done."""

    def __call__(self, achieved: FloatArray, desired: FloatArray) -> tuple[FloatArray, BoolArray | None]:
        """Rewards [n] of env steps after which `achieved` [n, G] held, had the goal been `desired` [n, G], and whether
        they would have terminated the episode [n]; None: as without them.

        Raises:
            EnvError: the environment fails at that.
        """
        ...

    def close(self) -> None:
        """Free what was built for it; idempotent."""
        ...


class GoalFactory(EnvFactory, Protocol):
    """A factory of environments whose `EnvSpec` has a `desired_goal`."""

    def judge(self, cfg: Any) -> GoalJudge:
        """Build a judge in this process, which is the actor's."""
        ...


ENVS: Registry[EnvFactory] = Registry(
    "env",
    group="embodyrl.envs",
    wants="a factory with settings, validate, spec and make (docs/howto/add_an_env.md)",
    fits=has("settings", "validate", "spec", "make"),
)
