"""Factory of Gymnasium environments: config checks, spec and construction."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.protocol import EnvContext, GoalReward
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import EnvError
from embodyrl.isolation import NoResultError, call_isolated, wait_for_leftovers
from embodyrl.types import EnvSpec

_BUILD_S = 600.0
"""Time limit in seconds for building and testing one environment; simulators that load assets take minutes."""
_CLOSE_S = 1.0
"""Time limit in seconds for threads and child processes to end after `close`."""


class GymFactory(SimFactory[GymSettings]):
    """Factory of the Gymnasium environment that `env.id` names."""

    settings = GymSettings

    def problems(self, cfg: GymSettings) -> Iterator[str]:
        """Yield config errors without importing gymnasium."""
        if cfg.id is None:
            yield (
                "env.id is not set. Set it to a Gymnasium id (env.id=CartPole-v1) or a class "
                "(env.id=my_pkg.my_mod:MyEnv)."
            )
        for name, _ in cfg.wrapper_arguments:
            if ":" not in name:
                yield (
                    f"env.wrappers: '{name}' is not package.module:attr of a callable env -> env, for example "
                    "gymnasium.wrappers:FlattenObservation or {name: gymnasium.wrappers:TimeLimit, "
                    "max_episode_steps: 200}."
                )
        for split, values in cfg.splits.items():
            if values.ignore_terminations:
                yield (
                    f"env.{split}.ignore_terminations=true: a Gymnasium environment must not be stepped after a "
                    f"termination. Set it to false."
                )

    def describe(self, cfg: GymSettings, context: EnvContext) -> EnvSpec:
        """Return the environment's spec, measured by building one environment and stepping it.

        A separate process builds the environment, because user code may crash or hang. If this process has already
        loaded the code of the environment, it builds the environment itself.

        Raises:
            UnknownNameError: no environment or wrapper has this name.
            MissingDependencyError: a required package is not installed.
            ConfigError: the constructor rejects `env.kwargs`, or a space is not supported.
            EnvError: the environment's first steps violate Gymnasium's interface, crash or hang.
        """
        if _is_loaded(cfg):
            return describe_in_process(cfg, context.renders_images)
        function = f"{__name__}:describe_and_check_close"
        try:
            return call_isolated(function, cfg, context.renders_images, kind=EnvSpec, timeout_s=_BUILD_S)
        except NoResultError as error:
            raise EnvError(
                f"env.id={cfg.id}: the test process, which builds, resets and steps the environment once, "
                f"failed: {error}. Fix the environment; --traceback shows the log of the process."
            ) from error

    def simulators(self, cfg: GymSettings, context: EnvContext) -> Simulators:
        """Build the simulators: one environment per index, created at its first reset, or one vector environment."""
        from embodyrl.envs.gym.create import create
        from embodyrl.envs.gym.probe import probe
        from embodyrl.envs.gym.sims import GymSims

        probe_result = probe(cfg, renders=context.renders_images, known_spec=context.known_spec)
        build = partial(create, cfg, probe_result.kwargs)
        if probe_result.spec.simulator.lockstep:
            from embodyrl.envs.gym.vector_sims import VectorSims

            return VectorSims(cfg, probe_result, build, context.num_envs)
        return GymSims(cfg, probe_result, build)

    def make_goal_reward(self, cfg: GymSettings) -> GoalReward:
        """Build a function that computes the rewards of relabeled goals with a single environment."""
        from embodyrl.envs.gym.create import create
        from embodyrl.envs.gym.goals import GymGoalReward

        return GymGoalReward(str(cfg.id), create(cfg, dict(cfg.kwargs)))


def _is_loaded(cfg: GymSettings) -> bool:
    """Return True if this process is a worker, or has imported the code of the environment."""
    module, _, name = str(cfg.id).rpartition(":")
    if multiprocessing.parent_process() is not None or module in sys.modules:
        return True
    return not module and "gymnasium" in sys.modules and name in sys.modules["gymnasium"].registry


def describe_in_process(cfg: GymSettings, renders: bool) -> EnvSpec:
    """Return the environment's spec, measured in this process (see `GymFactory.describe`)."""
    from embodyrl.envs.gym.probe import probe

    return probe(cfg, renders=renders).spec


def describe_and_check_close(cfg: GymSettings, renders: bool) -> EnvSpec:
    """Return the spec of an environment, with a warning if threads or processes outlive its `close`."""
    spec = describe_in_process(cfg, renders)
    remaining = wait_for_leftovers(_CLOSE_S)
    warning = f"{remaining} did not end with the environment's close(); fix: stop threads and processes in close()"
    return replace(spec, warnings=(*spec.warnings, warning)) if remaining else spec


FACTORY = GymFactory()
