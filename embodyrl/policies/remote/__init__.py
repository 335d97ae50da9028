"""A policy that runs elsewhere and is asked by websocket. Importing this package imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from embodyrl.errors import ConfigError
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.remote.settings import RemoteSettings
from embodyrl.types import ActionKind, EnvSpec, PolicySpec

if TYPE_CHECKING:
    from embodyrl.policies.remote.policy import RemotePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFactory:
    """Describes and reaches a policy that runs elsewhere; implements `PolicyFactory`."""

    settings: type[RemoteSettings] = RemoteSettings
    """Its keys below `model`."""

    def validate(self, cfg: RemoteSettings) -> list[str]:
        """Return config problems, one line each with the fix."""
        if cfg.url is None:
            return ["model.url is not set: it wants the address of a policy server, for example ws://127.0.0.1:8000."]
        return []

    def spec(self, cfg: RemoteSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy: it sees the environment's first cameras and speaks the environment's actions."""
        from embodyrl.policies.remote.dialects import names_of

        named = len(names_of(cfg).images)
        return PolicySpec(
            reads_instructions=True,
            name="remote",
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action_dim,
            tokens_per_chunk=cfg.num_action_chunks * env.action_dim,
            num_images=named if cfg.image_names is not None else min(named, len(env.cameras)),
            turns_images=True,
            gripper=env.gripper,
            takes_noise=False,
            untrainable="its weights are in another program, which says actions and no probabilities",
            action_kinds=frozenset(ActionKind) - {ActionKind.text},
        )

    def build(self, cfg: RemoteSettings, request: PolicyRequest) -> RemotePolicy:
        """Connect.

        Raises:
            ConfigError: training was asked for.
            EmbodyError: nobody answers, or somebody who does not fit.
        """
        from embodyrl.policies.remote.policy import RemotePolicy

        spec = self.spec(cfg, request.env, request.value_dim)
        if request.trainable:
            raise ConfigError(f"model '{spec.name}' cannot be trained: {spec.untrainable}.")
        return RemotePolicy(cfg, spec, request.env)


FACTORY = RemoteFactory()
