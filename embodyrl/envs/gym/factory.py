"""Factory of Gymnasium environments: config checks, spec and construction."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spec import build_spec
from embodyrl.envs.protocol import EnvContext, GoalReward
from embodyrl.envs.simulators import Simulators
from embodyrl.types import EnvSpec


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
        for name, _ in cfg.wrapped:
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

        The environment is built in a separate process.

        Raises:
            UnknownNameError: no environment or wrapper has this name.
            MissingDependencyError: a required package is not installed.
            ConfigError: the constructor rejects `env.kwargs`, or a space is not supported.
            EnvError: the environment's first steps violate Gymnasium's interface, crash or hang.
        """
        from embodyrl.envs.gym.isolated import describe

        return describe(cfg, context.renders_images)

    def simulators(self, cfg: GymSettings, context: EnvContext) -> Simulators:
        """Build the simulators: one environment per index, created at its first reset, or one vector environment."""
        from embodyrl.envs.gym.create import create
        from embodyrl.envs.gym.probe import probe
        from embodyrl.envs.gym.sims import GymSims

        probed = probe(cfg, renders=context.renders_images, known_spec=context.described)
        spec, build = build_spec(cfg, probed), partial(create, cfg, probed.kwargs)
        if probed.is_vector:
            from embodyrl.envs.gym.vector_sims import VectorSims

            return VectorSims(cfg, spec, probed, build, context.num_envs)
        return GymSims(cfg, spec, probed, build)

    def make_goal_reward(self, cfg: GymSettings) -> GoalReward:
        """Build a function that computes the rewards of relabeled goals with a single environment."""
        from embodyrl.envs.gym.create import create
        from embodyrl.envs.gym.goals import GymGoals

        return GymGoals(str(cfg.id), create(cfg, dict(cfg.kwargs)))


FACTORY = GymFactory()
