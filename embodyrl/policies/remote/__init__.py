"""Client of a policy on a WebSocket server. Importing this package does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.remote.settings import RemoteSettings
from embodyrl.types import ActionKind, EnvSpec, InputSpec, PolicySpec

if TYPE_CHECKING:
    from embodyrl.policies.remote.policy import RemotePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFactory:
    """Factory of clients of policy servers; implements `PolicyFactory`."""

    settings: type[RemoteSettings] = RemoteSettings
    """Settings class of the keys under `model`."""

    def validate(self, cfg: RemoteSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        if cfg.url is None:
            return ["model.url is not set. Set it to the address of a policy server, for example ws://127.0.0.1:8000."]
        return []

    def spec(self, cfg: RemoteSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec, which uses the first cameras and the actions of the environment."""
        from embodyrl.policies.remote.wire_formats import get_field_names

        num_images = len(get_field_names(cfg).images)
        return PolicySpec(
            inputs=InputSpec(
                instructions=True,
                num_images=num_images if cfg.image_names is not None else min(num_images, len(env.cameras.names)),
                rotates_images=True,
            ),
            name="remote",
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action.dim,
            tokens_per_chunk=cfg.num_action_chunks * env.action.dim,
            gripper=env.action.gripper,
            is_stochastic=False,
            untrainable="its weights are on a server, which returns actions without probabilities",
            action_kinds=frozenset(ActionKind) - {ActionKind.text},
        )

    def build(self, cfg: RemoteSettings, request: PolicyRequest) -> RemotePolicy:
        """Connect to the server.

        Raises:
            ConfigError: training was requested.
            EmbodyError: there is no server, or the server does not fit.
        """
        from embodyrl.policies.remote.policy import RemotePolicy

        return RemotePolicy(cfg, self.spec(cfg, request.env, request.value_dim), request)


FACTORY = RemoteFactory()
