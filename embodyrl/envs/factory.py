"""The factory of all environments that are made of slot simulators."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from embodyrl.envs.arrays import ArrayEnv
from embodyrl.envs.chunked import ChunkedEnv, LockstepEnv
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.reward import RewardSection, StepReward
from embodyrl.envs.simulators import ArraySimulators, SlotSimulators
from embodyrl.types import EnvSpec

S = TypeVar("S", contravariant=True)


class SimFactory(ABC, Generic[S]):
    """Implements `EnvFactory`; an environment adds its keys, its checks, its description and its simulators."""

    settings: Any
    """Class of its keys, an `EnvSettings` with `RewardSettings`."""
    section = RewardSection

    def problems(self, cfg: S) -> Iterator[str]:
        """Yield what is wrong with the config, one line each with the fix; imports nothing of the simulator."""
        yield from ()

    def suites(self, cfg: S) -> tuple[str, ...]:
        """Names of the suites that evaluations may cover beside the chosen one; by default there are none."""
        return ()

    def own_suite(self, cfg: S) -> str | None:
        """Name of the chosen one among them; None: it is not named."""
        return None

    @abstractmethod
    def describe(self, cfg: S, context: EnvContext) -> EnvSpec:
        """Describe the environment without building a simulator in this process.

        Raises:
            MissingDependencyError: a package, system library or asset is missing.
            ConfigError: the simulator refuses its settings.
        """

    @abstractmethod
    def simulators(self, cfg: S, context: EnvContext) -> SlotSimulators | ArraySimulators:
        """Make the simulators of `context.num_slots` slots in this process; with `lockstep`, `BatchedSimulators`.

        Raises:
            EmbodyError: as `describe`.
        """

    def validate(self, cfg: S) -> list[str]:
        """Return config problems, one line each."""
        return list(self.problems(cfg))

    def spec(self, cfg: S, context: EnvContext) -> EnvSpec:
        """`describe`, with the parts of the user's reward."""
        own = context.reward
        spec = replace(self.describe(cfg, context), reward_factor=getattr(cfg, "reward_coef", 1.0))
        return StepReward(own).declare(spec) if own is not None and own.path is not None else spec

    def make(self, cfg: Any, context: EnvContext) -> ChunkedEnv | ArrayEnv:
        """Build the environment."""
        sims = self.simulators(cfg, context)
        kind: Any = ArrayEnv if isinstance(sims, ArraySimulators) else LockstepEnv if sims.spec.lockstep else ChunkedEnv
        return kind(
            sims,
            context.num_slots,
            use_rel_reward=cfg.use_rel_reward,
            reward_coef=cfg.reward_coef,
            reward=context.reward,
        )
