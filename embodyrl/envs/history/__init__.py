"""Wrapper for environments: observation history, and temporal ensembling of overlapping action chunks."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import Count
from embodyrl.envs.factory import SimFactory
from embodyrl.envs.history.observed import flattened, with_history
from embodyrl.envs.protocol import ENVS, EnvContext
from embodyrl.envs.settings import EnvSettings
from embodyrl.envs.simulators import Simulators
from embodyrl.types import EnvSpec


class HistorySettings(EnvSettings):
    """Config keys for the observation history and for temporal ensembling."""

    needs = {"ensemble_chunk": "ensemble_coeff"}

    history: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of env steps in an observation, oldest first; the first observation of an episode fills missing steps.
    Images are rendered at every env step."""
    ensemble_chunk: Count | None = None
    """Number of actions per chunk for temporal ensembling: the environment executes the weighted average of all actions
    that were predicted for a step. null: no ensembling."""
    ensemble_coeff: Annotated[float, Field(ge=-100, le=100)] = 0.01
    """Coefficient m of the ensembling weights exp(-m i); i = 0 is the oldest chunk."""

    @property
    def delay(self) -> tuple[int, int]:
        """Smallest and largest delay (see `EnvSettings.delay`); (0, 0) with temporal ensembling."""
        return super().delay if self.ensemble_chunk is None else (0, 0)

    @property
    def ensemble_delay(self) -> int:
        """Number of env steps from an observation to the first averaged action that uses the observation's chunk."""
        return 0 if self.ensemble_chunk is None else super().delay[1]

    def problems(self) -> Iterator[str]:
        """Yield an error if temporal ensembling does not support the delay."""
        yield from super().problems()
        low, high = super().delay
        if self.ensemble_chunk is not None and (low != high or high >= self.ensemble_chunk):
            yield (
                f"env.control.latency_steps={[low, high] if low != high else high}: temporal ensembling needs one "
                f"number below env.ensemble_chunk={self.ensemble_chunk}."
            )


@dataclass(frozen=True)
class HistoryFactory(SimFactory[Any]):
    """Factory that adds observation history and temporal ensembling to another environment."""

    base: str
    """Registered name of the wrapped environment."""

    @cached_property
    def _of(self) -> Any:
        return ENVS.get(self.base)

    @cached_property
    def settings(self) -> Any:
        """Settings class with the keys of the wrapped environment and of HistorySettings."""
        return _settings(self.base)

    def problems(self, cfg: Any) -> Iterator[str]:
        """Yield config errors of the wrapped environment (see `SimFactory`)."""
        yield from self._of.problems(cfg)

    def suites(self, cfg: Any) -> tuple[str, ...]:
        """Return the additional suites of the wrapped environment (see `SimFactory`)."""
        return self._of.suites(cfg)

    def own_suite(self, cfg: Any) -> str | None:
        """Return the configured suite of the wrapped environment (see `SimFactory`)."""
        return self._of.own_suite(cfg)

    def describe(self, cfg: Any, context: EnvContext) -> EnvSpec:
        """Return the spec with the observation history; with ensembling, one action is a flattened chunk."""
        spec = with_history(self._of.describe(cfg, context), cfg.history)
        return spec if cfg.ensemble_chunk is None else flattened(spec, cfg.ensemble_chunk)

    def simulators(self, cfg: Any, context: EnvContext) -> Simulators:
        """Build the environment's simulators and wrap them in `HistorySims`."""
        from embodyrl.envs.history.sims import HistorySims

        inner, spec = self._of.simulators(cfg, context), self.describe(cfg, context)
        return HistorySims(inner, spec, cfg.history, cfg.ensemble_chunk, cfg.ensemble_coeff, cfg.ensemble_delay)


@functools.cache
def _settings(base: str) -> type[HistorySettings]:
    of: Any = ENVS.get(base).settings
    return type(f"{base}_settings", (of, HistorySettings), {"__module__": __name__, "__doc__": of.__doc__})


@functools.cache
def _factory(base: str) -> HistoryFactory:
    return HistoryFactory(base)


def __getattr__(name: str) -> Any:
    """Return the factory of an environment with history, or its settings class.

    For `robots`, the names are `ROBOTS` and `robots_settings`.

    Pickle looks up the settings classes by name.
    """
    base, end, rest = name.partition("_settings")
    if end and not rest and base in ENVS.names():
        return _settings(base)
    if name.isupper() and name.lower() in ENVS.names():
        return _factory(name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
