"""Base class of environment factories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.delay import DelayedEnv, check_delay
from embodyrl.envs.history import HistorySims, with_chunks, with_history
from embodyrl.envs.protocol import Env, EnvContext
from embodyrl.envs.reward import StepReward
from embodyrl.envs.settings import EnvSettings, RewardSettings
from embodyrl.envs.simulators import Simulators
from embodyrl.files import available_bytes
from embodyrl.types import EnvSpec

S = TypeVar("S", bound=EnvSettings)


class SimFactory(ABC, Generic[S]):
    """Base class of factories whose environment is a `ChunkedEnv` on `Simulators`.

    Subclasses define the settings class, the config checks, the spec and the simulators.
    """

    settings: type[S]
    """Settings class, a subclass of `EnvSettings` and `RewardSettings`."""
    rewards_steps = True

    def problems(self, cfg: S) -> Iterator[str]:
        """Yield config errors with fixes, one line each, without importing the simulator."""
        yield from ()

    def suites(self, cfg: S) -> tuple[str, ...]:
        """Return the names of the suites that an evaluation can add to the configured suite; empty by default."""
        return ()

    def get_configured_suite(self, cfg: S) -> str | None:
        """Return the name of the configured suite, or None if the suite has no name."""
        return None

    def get_banner_lines(self, cfg: S) -> list[tuple[str, str]]:
        """Return additional lines of the start banner as (label, text); empty by default."""
        return []

    @abstractmethod
    def describe(self, cfg: S, context: EnvContext) -> EnvSpec:
        """Return the environment's spec without building a simulator in this process.

        Raises:
            MissingDependencyError: a package, system library or asset is missing.
            ConfigError: the simulator rejects its settings.
        """

    @abstractmethod
    def simulators(self, cfg: S, context: EnvContext) -> Simulators:
        """Build simulators for `context.num_envs` environments in this process.

        Raises:
            EmbodyError: see `describe`.
        """

    def validate(self, cfg: S) -> list[str]:
        """Return config errors, one line each."""
        return list(self.problems(cfg))

    def spec(self, cfg: S, context: EnvContext) -> EnvSpec:
        """Return the environment's spec, including the history and the user's reward components.

        Raises:
            EmbodyError: see `describe`, `with_chunks` and `check_delay`.
        """
        assert isinstance(cfg, RewardSettings)
        reward = context.reward
        spec = with_chunks(with_history(self.describe(cfg, context), cfg.history), cfg.ensemble_chunk)
        spec = replace(spec, reward=replace(spec.reward, factor=cfg.reward_coef))
        spec = StepReward(reward).add_to_spec(spec) if reward is not None and reward.path is not None else spec
        if cfg.delay[1]:
            check_delay(spec, cfg.delay[1], context.chunk)
        return spec

    def make(self, cfg: S, context: EnvContext) -> Env:
        """Build the environment, including the history, temporal ensembling and inference delay of the config."""
        assert isinstance(cfg, RewardSettings)
        sims = self.simulators(cfg, context)
        build = partial(DelayedEnv, delay=cfg.delay) if cfg.delay[1] else ChunkedEnv
        return build(
            HistorySims(sims, cfg) if cfg.history > 1 or cfg.ensemble_chunk is not None else sims,
            context.num_envs,
            use_rel_reward=cfg.use_rel_reward,
            reward_coef=cfg.reward_coef,
            reward=context.reward,
        )


_MEMORY_FRACTION = 0.8
"""Fraction of the free memory that simulators may use; the rest is for policies and buffers, which are loaded later."""


def get_max_tasks_in_memory(task_bytes: int, workers: int) -> int:
    """Return the maximum number of tasks of `task_bytes` that each of `workers` processes can load; at least 1."""
    return max(1, int(available_bytes() * _MEMORY_FRACTION / max(workers, 1) / task_bytes))
