"""ACT, the action chunking transformer, in LeRobot's layout. Importing this package does not import torch."""

from typing import Any

from embodyrl.policies.act.config import KIND, ActConfig
from embodyrl.policies.act.settings import ActSettings, Likelihood
from embodyrl.policies.lerobot.config import read_config
from embodyrl.policies.lerobot.factory import LeRobotFactory
from embodyrl.policies.lerobot.settings import chunk_shape
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.records import ChunkRecord
from embodyrl.types import PolicySpec


class ActFactory(LeRobotFactory):
    """Builds `ActPolicy`; implements `PolicyFactory`."""

    kind, config, settings = KIND, ActConfig, ActSettings

    def validate(self, cfg: ActSettings) -> list[str]:
        """Return config problems, one line each with the fix."""
        if problems := super().validate(cfg):
            return problems
        if cfg.likelihood is Likelihood.dsrl and not read_config(self.folder(cfg), KIND, ActConfig)[0].use_vae:
            return [f"model.likelihood=dsrl: {cfg.path} has use_vae=false, so its latent means nothing; use residual."]
        return []

    def features(self, config: ActConfig) -> int:
        """Return the width of the encoder's mean output."""
        return config.dim_model

    def chosen(self, config: ActConfig) -> int:
        """Return the latent's width."""
        return config.latent_dim

    def record(self, cfg: ActSettings, config: ActConfig) -> ChunkRecord:
        """Return the record of a chunk: its executed numbers."""
        return ChunkRecord.chain(chunk_shape(config), 0)

    def passes(self, cfg: ActSettings, config: ActConfig) -> int:
        """Return the forward passes of a chunk."""
        return 1

    def make(self, cfg: Any, spec: PolicySpec, config: Any, raw: dict[str, Any], request: PolicyRequest) -> Policy:
        """Build the policy with fresh weights from the seed."""
        from embodyrl.policies.act.policy import build_policy

        return build_policy(cfg, spec, config, raw, self.folder(cfg), self.steering(cfg, config), request)


FACTORY = ActFactory()
