"""ACT, the action chunking transformer, in LeRobot's layout. Importing this package does not import torch."""

from dataclasses import replace
from typing import Any

from embodyrl.errors import ConfigError
from embodyrl.policies.lerobot.act.config import KIND, ActConfig
from embodyrl.policies.lerobot.act.settings import ActSettings, Likelihood
from embodyrl.policies.lerobot.config import read_config
from embodyrl.policies.lerobot.factory import LeRobotFactory
from embodyrl.policies.lerobot.settings import get_chunk_shape
from embodyrl.policies.steering.settings import SteeringShape
from embodyrl.policies.vla.records import ChunkRecord
from embodyrl.types import EnvSpec, PolicySpec


class ActFactory(LeRobotFactory[ActSettings, ActConfig]):
    """Factory of `ActPolicy`; implements `PolicyFactory`."""

    kind, config, settings = KIND, ActConfig, ActSettings
    network = "embodyrl.policies.lerobot.act.network:Act"

    def validate(self, cfg: ActSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        if problems := super().validate(cfg):
            return problems
        if cfg.temporal_ensemble and cfg.is_steered:
            return [f"model.temporal_ensemble=true: set model.likelihood=gaussian instead of {cfg.likelihood}."]
        if cfg.likelihood is Likelihood.dsrl and not read_config(self.folder(cfg), KIND, ActConfig).use_vae:
            return [
                f"model.likelihood=dsrl: {cfg.path} has use_vae=false, so the latent has no effect. "
                "Set model.likelihood=residual."
            ]
        return []

    def plan(self, cfg: ActSettings, env: EnvSpec) -> ActConfig:
        """Return the config of the policy (see `LeRobotFactory.plan`).

        With temporal ensembling, one action of the environment is a whole chunk of H actions.

        Raises:
            ConfigError: the environment's actions are not chunks of this policy.
        """
        if not cfg.temporal_ensemble:
            return super().plan(cfg, env)
        rows = read_config(self.folder(cfg), KIND, ActConfig).chunk_size
        if env.action.dim % rows or cfg.num_action_chunks != 1:
            raise ConfigError(
                "model.temporal_ensemble=true needs an environment that averages whole chunks. Set "
                f"env.ensemble_chunk={rows} model.num_action_chunks=1."
            )
        return super().plan(cfg, replace(env, action=replace(env.action, dim=env.action.dim // rows)))

    def spec(self, cfg: ActSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec (see `LeRobotFactory.spec`)."""
        spec, config = super().spec(cfg, env, value_dim), self.plan(cfg, env)
        if cfg.temporal_ensemble:
            reason = "its chunks are averaged (model.temporal_ensemble)"
            return replace(spec, action_dim=env.action.dim, is_stochastic=False, untrainable=reason)
        if (coeff := config.temporal_ensemble_coeff) is None:
            return spec
        warning = (
            f"the checkpoint averages its chunks: set model.temporal_ensemble=true model.num_action_chunks=1 "
            f"env.ensemble_chunk={config.chunk_size} env.ensemble_coeff={coeff}"
        )
        return replace(spec, warnings=(*spec.warnings, warning))

    def num_features(self, config: ActConfig) -> int:
        """Return F, the width of the encoder output, which is averaged over all tokens."""
        return config.dim_model

    def num_actor_values(self, cfg: ActSettings, config: ActConfig) -> int:
        """Return the size of the latent, which the DSRL actor outputs."""
        return config.latent_dim

    def record(self, cfg: ActSettings, config: ActConfig) -> ChunkRecord:
        """Return the token layout of a sampled chunk, which stores the executed actions."""
        return ChunkRecord.chain(get_chunk_shape(config), 0)

    def policy(self, steering: SteeringShape | None) -> type[Any]:
        """Return the policy class for a trained or a frozen network (see `LeRobotFactory.policy`)."""
        from embodyrl.policies.lerobot.act.policy import ActPolicy, ResidualActPolicy, SteeredActPolicy

        return ActPolicy if steering is None else ResidualActPolicy if steering.proposes else SteeredActPolicy


FACTORY = ActFactory()
