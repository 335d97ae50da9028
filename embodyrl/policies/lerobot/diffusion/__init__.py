"""Diffusion Policy in LeRobot's layout. Importing this package does not import torch."""

from dataclasses import replace
from typing import Any

from embodyrl.policies.lerobot.diffusion.config import KIND, DiffusionConfig
from embodyrl.policies.lerobot.diffusion.settings import DiffusionSettings, get_chunk_record
from embodyrl.policies.lerobot.factory import LeRobotFactory
from embodyrl.policies.steering.settings import SteeringShape
from embodyrl.policies.vla.records import ChunkRecord
from embodyrl.types import EnvSpec, PolicySpec


class DiffusionFactory(LeRobotFactory[DiffusionSettings, DiffusionConfig]):
    """Factory of `DiffusionPolicy`; implements `PolicyFactory`."""

    kind, config, settings = KIND, DiffusionConfig, DiffusionSettings
    network = "embodyrl.policies.lerobot.diffusion.network:Diffusion"

    def plan(self, cfg: DiffusionSettings, env: EnvSpec) -> DiffusionConfig:
        """Return the config (see `LeRobotFactory.plan`), with sampler and number of steps from the settings."""
        return cfg.apply_sampler(super().plan(cfg, env))

    def spec(self, cfg: DiffusionSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec (see `LeRobotFactory.spec`), with a warning if `diffusion_eta` has no effect."""
        spec = super().spec(cfg, env, value_dim)
        sampler, eta = self.plan(cfg, env).noise_scheduler_type, cfg.diffusion_eta
        if spec.steering or sampler == "DDIM" or eta == DiffusionSettings.model_fields["diffusion_eta"].default:
            return spec
        warning = f"model.diffusion_eta={eta} has no effect with the sampler {sampler}; model.sampler=DDIM uses it"
        return replace(spec, warnings=(*spec.warnings, warning))

    def num_features(self, config: DiffusionConfig) -> int:
        """Return F, the width of the condition of the U-Net."""
        return config.condition_width

    def num_actor_values(self, cfg: DiffusionSettings, config: DiffusionConfig) -> int:
        """Return the number of noise values that the DSRL actor outputs: a whole chunk, or one repeated row."""
        return config.action_dim * (1 if cfg.noise_repeated else config.horizon)

    def record(self, cfg: DiffusionSettings, config: DiffusionConfig) -> ChunkRecord:
        """Return the token layout of a sampled chunk, which stores states of its denoising chain."""
        return get_chunk_record(cfg, config)

    def num_passes(self, config: DiffusionConfig) -> int:
        """Return the number of forward passes per chunk."""
        return config.steps

    def policy(self, steering: SteeringShape | None) -> type[Any]:
        """Return the policy class for a trained or a frozen network (see `LeRobotFactory.policy`)."""
        from embodyrl.policies.lerobot.diffusion import policy

        if steering is None:
            return policy.DiffusionPolicy
        return policy.ResidualDiffusionPolicy if steering.proposes else policy.SteeredDiffusionPolicy


FACTORY = DiffusionFactory()
