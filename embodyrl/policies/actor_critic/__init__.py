"""Small actor-critic policies for states (`mlp`) and images (`cnn`). Importing this package does not import torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from embodyrl.config.shared import Precision
from embodyrl.policies.actor_critic.settings import ActorCriticSettings
from embodyrl.policies.actor_critic.shape import NetShape
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.types import ActionKind, ActionSpace, EnvSpec, PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticFactory:
    """Builds `ActorCriticPolicy`; implements `PolicyFactory`."""

    name: str
    reads_images: bool
    settings: ClassVar = ActorCriticSettings

    def validate(self, cfg: ActorCriticSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        if cfg.precision is Precision.fp32:
            return []
        return [f"model.precision={cfg.precision.value}: {self.name} supports fp32 only; set model.precision=fp32."]

    def spec(self, cfg: ActorCriticSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy, whose sizes follow from the environment's observations and actions."""
        shape = self._shape(cfg, env, value_dim)
        return PolicySpec(
            name=self.name,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action_dim,
            tokens_per_chunk=cfg.num_action_chunks * env.action_dim,
            value_dim=value_dim,
            # At least one, so that an environment without images is rejected with the other mismatches.
            num_images=max(1, len(env.cameras)) if self.reads_images else 0,
            uses_state=env.state_dim > 0 or not self.reads_images,
            gripper=env.gripper,
            num_parameters=shape.num_parameters,
            action_kinds=frozenset(ActionKind) - {ActionKind.text},
            draws_with_gradients=shape.squashed,
            rates=True,
        )

    def compare(self, cfg: ActorCriticSettings, env: EnvSpec, folder: Path) -> None:
        """Compare the shapes of weights in a folder (see `ComparesWeights`)."""
        self._shape(cfg, env, 0).check(folder)

    def build(self, cfg: ActorCriticSettings, request: PolicyRequest) -> Policy:
        """Build the policy with weights initialised from the seed, or with those in `cfg.path`.

        Raises:
            CheckpointError: the folder has no weights of this shape.
        """
        from embodyrl.policies.actor_critic.policy import ActorCriticPolicy

        spec = self.spec(cfg, request.env, request.value_dim)
        shape = self._shape(cfg, request.env, request.value_dim)
        return ActorCriticPolicy(spec, shape, request, cfg)

    def _shape(self, cfg: ActorCriticSettings, env: EnvSpec, value_dim: int) -> NetShape:
        low, high = (-1.0,) * env.action_dim, (1.0,) * env.action_dim
        space = env.action_space or ActionSpace(kind=ActionKind.box, low=low, high=high)
        real, sees = space.kind is ActionKind.box, self.reads_images
        return NetShape(
            state_dim=env.state_dim,
            num_images=len(env.cameras) if sees else 0,
            image_size=env.image_size if sees else (0, 0),
            action_kind=space.kind,
            sizes=space.sizes,
            low=tuple(bound if math.isfinite(bound) else None for bound in space.low),
            high=tuple(bound if math.isfinite(bound) else None for bound in space.high),
            num_actions=cfg.num_action_chunks,
            hidden=tuple(cfg.hidden_sizes),
            value_dim=value_dim,
            activation=cfg.activation or ("relu" if sees else "tanh"),
            # Continuous actions mostly come with many state dimensions; discrete ones with small, bounded environments.
            normalized=bool(env.state_dim) and (real if cfg.normalize_state is None else cfg.normalize_state),
            squashed=cfg.squashed and real,
            cameras=env.cameras if sees else (),
            grey=env.grey and sees,
        )


MLP = ActorCriticFactory(name="mlp", reads_images=False)
CNN = ActorCriticFactory(name="cnn", reads_images=True)
