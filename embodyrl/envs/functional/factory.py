"""Factory of JAX environments: config checks, spec and construction."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.functional.settings import FunctionalSettings
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import NUM_SEEDS
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import EnvError, MissingDependencyError
from embodyrl.isolation import NoResultError, call_isolated
from embodyrl.types import ActionKind, EnvSpec, RewardSpec, SimulatorSpec, TextSpec

if TYPE_CHECKING:
    from embodyrl.envs.functional.functions import Functions

_BUILD_S = 600.0
"""Time limit in seconds for building the environment in a separate process."""


class FunctionalFactory(SimFactory[FunctionalSettings]):
    """Factory of JAX environments, with one batch for all environments of a worker."""

    settings = FunctionalSettings

    def problems(self, cfg: FunctionalSettings) -> Iterator[str]:
        """Yield errors for an invalid `env.id`, and for `ignore_terminations`, which is not supported."""
        if not all((cfg.id or "").partition(":")):
            yield f"env.id={cfg.id}: expected gymnax:NAME, brax:NAME, playground:NAME or package.module:attr."
        for split, values in cfg.splits.items():
            if values.ignore_terminations:
                yield f"env.{split}.ignore_terminations=true is not supported by env=functional. Set it to false."

    def describe(self, cfg: FunctionalSettings, context: EnvContext) -> EnvSpec:
        """Return the environment's spec, determined in a separate process because JAX must trace the reset.

        Raises:
            MissingDependencyError: JAX or the library of the environment is missing.
            ConfigError: the environment is unknown, or its interface is not supported.
        """
        if importlib.util.find_spec("jax") is None:
            raise MissingDependencyError(
                "env=functional needs the package jax, which is not installed. Fix: pip install jax."
            )
        if multiprocessing.parent_process() is not None or "jax" in sys.modules:
            return describe_in_process(cfg)
        try:
            return call_isolated(f"{__name__}:describe_in_process", cfg, kind=EnvSpec, timeout_s=_BUILD_S)
        except NoResultError as error:
            raise EnvError(
                f"env.id={cfg.id}: building the environment in a separate process failed: {error}."
            ) from error

    def simulators(self, cfg: FunctionalSettings, context: EnvContext) -> Simulators:
        """Build the batch of simulators; JAX compiles the reset."""
        functions = _load(cfg)
        from embodyrl.envs.functional.sims import FunctionalSims

        return FunctionalSims(_build_spec(cfg, functions), functions, context.num_envs)


def describe_in_process(cfg: FunctionalSettings) -> EnvSpec:
    """Build the environment's functions in this process and return its spec."""
    return _build_spec(cfg, _load(cfg))


def _load(cfg: FunctionalSettings) -> Functions:
    # JAX otherwise reserves three quarters of a GPU's memory, which the policy needs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from embodyrl.envs.functional.functions import load

    return load(cfg)


def _build_spec(cfg: FunctionalSettings, functions: Functions) -> EnvSpec:
    import jax  # pyright: ignore[reportMissingImports]

    first = jax.eval_shape(functions.reset, jax.random.PRNGKey(0))
    return EnvSpec(
        name=str(cfg.id),
        action=functions.action,
        tasks=(str(cfg.id),),
        text=TextSpec(instructed=False),
        states_per_task=(NUM_SEEDS,),
        state_dim=first.obs.shape[0],
        max_episode_steps=functions.horizon or cfg.longest_episode,
        simulator=SimulatorSpec(
            may_truncate=True,
            renders=False,
            saves_state=True,
            on_gpu=jax.default_backend() != "cpu",
        ),
        reward=_build_reward_spec(cfg, functions, first.carry),
    )


def _build_reward_spec(cfg: FunctionalSettings, functions: Functions, carry: Any) -> RewardSpec:
    """Return the reward spec; a trace of one step collects the keys of info."""
    import jax  # pyright: ignore[reportMissingImports]

    discrete = functions.action.kind is ActionKind.discrete
    action = jax.numpy.zeros(() if discrete else functions.action.dim, "int32" if discrete else "float32")
    jax.eval_shape(functions.step, carry, action, jax.random.PRNGKey(0))
    has_success_key = cfg.success_key in functions.info_keys
    keys = ", ".join(functions.info_keys) or "none"
    return RewardSpec(
        reports_success=has_success_key,
        success=f"info['{cfg.success_key}']" if has_success_key else f"unknown; keys of info: {keys}",
    )


FACTORY = FunctionalFactory()
