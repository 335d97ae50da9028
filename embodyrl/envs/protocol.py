"""Interface and registry of environments. Environments do not depend on policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from embodyrl import parts
from embodyrl.envs.reward import StepRewardSettings
from embodyrl.envs.settings import EnvSettings
from embodyrl.registry import Registry, has
from embodyrl.types import (
    BoolArray,
    ByteArray,
    ChunkResult,
    DoubleArray,
    EnvCosts,
    EnvSpec,
    EpisodeStart,
    FloatArray,
    IntArray,
)

AfterStep = Callable[[int, bool], None]
"""Callback (environment index, success) that is called after each executed env step, for example to record a video."""


def instruction_for(spec: EnvSpec, reset_id: int) -> str:
    """Return the language instruction of the episodes with this reset id."""
    return spec.instructions[reset_id] if spec.instructions else spec.tasks[spec.task_of(reset_id)[0]]


class Env(Protocol):
    """Interface of N parallel environments in one process; each environment runs one episode at a time."""

    spec: EnvSpec
    task_limit: int | None
    """Maximum number of distinct tasks that the environments can run without reloading simulators; None: unlimited."""

    def reset(self, env_indices: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start an episode in each environment, and execute the simulator's settling steps."""
        ...

    def step_chunk(
        self, env_indices: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Execute an action chunk [n, K, A] in the given environments; an environment stops when its episode ends.

        Raises:
            EnvError: the simulator returned a non-finite reward or a wrong shape.
        """
        ...

    def expert_chunk(
        self,
        env_indices: Sequence[int],
        num_actions: int,
        *,
        noise: float,
        executed: FloatArray | None = None,
        after_step: AfterStep | None = None,
    ) -> tuple[FloatArray, ChunkResult]:
        """Execute up to `num_actions` steps of the scripted expert, which may read privileged state.

        Returns the expert's actions [n, K, A] without noise, which are the labels for SFT, and the result of the chunk.

        Args:
            env_indices: indices [n] of the environments.
            num_actions: number of actions K of the chunk.
            noise: standard deviation of the Gaussian noise on all dimensions of executed actions except the gripper.
            executed: actions [n, K, A] to execute, for example of a policy; None: the expert's actions with noise.
            after_step: called after each executed env step.

        Raises:
            EnvError: the task of an environment has no scripted expert.
        """
        ...

    def observe(
        self, env_indices: Sequence[int], images: ByteArray, state: FloatArray, rows: IntArray | None = None
    ) -> None:
        """Write the observation of `env_indices[i]` into `images[rows[i]]` [C, H, W, 3] and `state[rows[i]]` [S].

        `rows` [n] defaults to 0..n-1. The arrays may be shared memory: only these rows are written.
        """
        ...

    def instruction(self, env_index: int) -> str:
        """Return the language instruction of the environment's current episode."""
        ...

    def render(self, env_index: int) -> np.ndarray:
        """Return an upright RGB video frame [H, W, 3] uint8 of the environment."""
        ...

    def close(self) -> None:
        """Free the simulators; idempotent."""
        ...


@runtime_checkable
class ReportsSolvedStarts(Env, Protocol):
    """Interface of environments that report episodes whose goal is already reached at the start."""

    def solved_at_reset(self, env_indices: Sequence[int]) -> Sequence[int]:
        """Return the given environments whose goal was already reached before the first action."""
        ...


@runtime_checkable
class SavesState(Env, Protocol):
    """Interface of environments that save and load the state of an environment, if `spec.simulator.saves_state`."""

    def save(self, env_index: int) -> Any:
        """Return a copy of the state of the environment's episode."""
        ...

    def load(self, env_index: int, state: Any) -> None:
        """Restore a saved state of the environment's episode, even if the episode has ended."""
        ...


class TextEnv(Env, Protocol):
    """Interface of environments with text actions."""

    def set_replies(self, env_indices: Sequence[int], replies: Sequence[str], cut_off: BoolArray) -> None:
        """Set the reply of each environment for the next chunk; `cut_off` [n]: True at the length limit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvContext:
    """Arguments for building an environment, in addition to its config keys."""

    num_envs: int = 1
    num_workers: int = 1
    """Number of processes that build the environment in parallel."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Objects built from other config sections, by name: `rows` (data rows) and `reward_runner` (reward functions)."""
    renders_images: bool = True
    """True if `render` may be called; False: no video is recorded."""
    reward: StepRewardSettings | None = None
    """Settings of the section `reward`; None: the simulator's own reward."""
    known_spec: EnvSpec | None = None
    """Spec of the environment from the run plan; None: the factory determines the spec."""
    chunk: int = 0
    """Number of actions per chunk of the policy; 0: unknown."""
    suites: tuple[str, ...] = ()
    """Additional suites to evaluate, a subset of the factory's `suites`."""
    initial_states: Mapping[int, DoubleArray] = field(default_factory=dict)
    """Simulator states by reset id that replace the environment's own, if the factory sets `restores_states`."""


S = TypeVar("S", bound=EnvSettings)


class EnvFactory(Protocol[S]):
    """Interface of environment factories: config checks, the spec, and construction of the environment."""

    settings: type[S]
    """Settings class of the keys under `env`; methods receive an instance with the splits of the command."""
    reads_rows: bool
    """True if the environment uses the config groups `data` (rows) and `reward`. Optional, False by default."""
    rewards_steps: bool
    """True if the config section `reward` may replace the rewards of the simulator. Optional, False by default."""
    restores_states: bool
    """True if episodes can start from `EnvContext.initial_states`. Optional, False by default."""

    def validate(self, cfg: S) -> list[str]:
        """Return config errors with fixes, one line each, without importing the simulator."""
        ...

    def spec(self, cfg: S, context: EnvContext) -> EnvSpec:
        """Return the environment's spec without building a simulator.

        Raises:
            MissingDependencyError: a package, system library or asset is missing.
        """
        ...

    def make(self, cfg: S, context: EnvContext) -> Env:
        """Build `context.num_envs` environments in this process."""
        ...

    def costs(self, cfg: S, spec: EnvSpec) -> EnvCosts:
        """Estimate memory and time of the environment without slow imports. Optional."""
        ...


class GoalReward(Protocol):
    """Interface of reward functions for relabeled goals (hindsight experience replay)."""

    def __call__(self, achieved: FloatArray, desired: FloatArray) -> tuple[FloatArray, BoolArray | None]:
        """Return rewards [n] and terminations [n] of env steps with achieved goals [n, G], for desired goals [n, G].

        Terminations are None if they do not depend on the goal.

        Raises:
            EnvError: the environment raised an error.
        """
        ...

    def close(self) -> None:
        """Free the resources; idempotent."""
        ...


class GoalFactory(EnvFactory[S], Protocol[S]):
    """Interface of factories of environments whose `EnvSpec` has a `goal`."""

    def make_goal_reward(self, cfg: S) -> GoalReward:
        """Build the reward function for relabeled goals in this process."""
        ...


ENVS: Registry[EnvFactory[Any]] = Registry(
    "env",
    group="embodyrl.envs",
    parts=parts.ENVIRONMENTS,
    wants="a factory with settings, validate, spec and make (docs/howto/add_an_env.md)",
    fits=has("settings", "validate", "spec", "make"),
)


def env_costs(cfg: EnvSettings, spec: EnvSpec) -> EnvCosts:
    """Return the estimated costs of an environment; zeros if its factory has no estimate."""
    estimate = getattr(ENVS.get(cfg.env_type), "costs", None)
    return EnvCosts() if estimate is None else estimate(cfg, spec)
