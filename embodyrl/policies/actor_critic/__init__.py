"""Small actor-critic policies for states (`mlp`) and images (`cnn`). Importing this package does not import torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from embodyrl.config.shared import Precision
from embodyrl.policies.actor_critic.settings import ActorCriticSettings
from embodyrl.policies.actor_critic.shape import NetShape
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.types import ActionKind, EnvSpec, InputSpec, PolicyCosts, PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticFactory:
    """Factory of `ActorCriticPolicy`; implements `PolicyFactory`."""

    name: str
    reads_images: bool
    settings: ClassVar = ActorCriticSettings

    def validate(self, cfg: ActorCriticSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        if cfg.precision is Precision.fp32:
            return []
        return [f"model.precision={cfg.precision.value}: {self.name} supports fp32 only; set model.precision=fp32."]

    def spec(self, cfg: ActorCriticSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec, derived from the environment's observations and actions."""
        shape = self._build_shape(cfg, env, value_dim)
        return PolicySpec(
            name=self.name,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action.dim,
            tokens_per_chunk=cfg.num_action_chunks * env.action.dim,
            value_dim=value_dim,
            # At least one, so that an environment without images is rejected together with other mismatches.
            inputs=InputSpec(
                num_images=max(1, len(env.cameras.names)) if self.reads_images else 0,
                state=env.state_dim > 0 or not self.reads_images,
            ),
            observed_steps=0,
            gripper=env.action.gripper,
            action_kinds=frozenset(ActionKind) - {ActionKind.text},
            differentiable=shape.squashed,
            can_be_reward_model=True,
            warnings=_find_range_warnings(shape) if shape.low else _find_discrete_warnings(cfg, env),
        )

    def costs(self, cfg: ActorCriticSettings, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Return the number of parameters."""
        return PolicyCosts(num_parameters=self._build_shape(cfg, env, value_dim).num_parameters)

    def compare(self, cfg: ActorCriticSettings, env: EnvSpec, folder: Path) -> None:
        """Check that the network sizes match the config.json in a folder (see `PolicyFactory.compare`)."""
        self._build_shape(cfg, env, 0).check(folder)

    def build(self, cfg: ActorCriticSettings, request: PolicyRequest) -> Policy:
        """Build the policy with weights from `cfg.path`, or initialized from the seed.

        Raises:
            CheckpointError: the folder has no weights of this shape.
        """
        from embodyrl.policies.actor_critic.policy import ActorCriticPolicy
        from embodyrl.policies.actor_critic.squashed import SquashedPolicy

        spec = self.spec(cfg, request.env, request.value_dim)
        shape = self._build_shape(cfg, request.env, request.value_dim)
        policy_class = SquashedPolicy if shape.squashed else ActorCriticPolicy
        return policy_class(spec, shape, request, cfg)

    def _build_shape(self, cfg: ActorCriticSettings, env: EnvSpec, value_dim: int) -> NetShape:
        action, reads_images = env.action, self.reads_images
        continuous = action.kind is ActionKind.box
        low, high = action.bounds if continuous else ((), ())
        return NetShape(
            state_dim=env.state_dim,
            num_images=len(env.cameras.names) if reads_images else 0,
            image_size=env.cameras.size if reads_images else (0, 0),
            action_kind=action.kind,
            sizes=action.sizes,
            low=tuple(bound if math.isfinite(bound) else None for bound in low),
            high=tuple(bound if math.isfinite(bound) else None for bound in high),
            num_actions=cfg.num_action_chunks,
            hidden=tuple(cfg.hidden_sizes),
            value_dim=value_dim,
            activation=cfg.activation or ("relu" if reads_images else "tanh"),
            # Environments with continuous actions usually have many state dimensions; others have few, bounded ones.
            normalized=bool(env.state_dim) and (continuous if cfg.normalize_state is None else cfg.normalize_state),
            squashed=cfg.squashed and continuous,
            cameras=env.cameras.names if reads_images else (),
            grey=env.cameras.grey and reads_images,
        )


def _find_discrete_warnings(cfg: ActorCriticSettings, env: EnvSpec) -> tuple[str, ...]:
    """Return a warning for each key that applies only to continuous actions."""
    return tuple(
        f"model.{name} has no effect on the discrete actions of env '{env.name}'; fix: remove the key"
        for name in ("squashed", "log_std_init", "noise_correlation")
        if getattr(cfg, name)
    )


def _find_range_warnings(shape: NetShape) -> tuple[str, ...]:
    """Return a warning if squashed actions lack a lower or upper bound, so that the policy assumes a range."""
    bounds = zip(shape.low, shape.high, strict=True)
    unbounded = [index for index, (low, high) in enumerate(bounds) if low is None or high is None]
    if not shape.squashed or not unbounded:
        return ()
    return (
        f"action dimensions {unbounded} lack a lower or upper bound; model.squashed=true limits them to -1..1, or to a "
        "range of width 2 at their only bound; fix: bound the actions with a wrapper in env.wrappers",
    )


MLP = ActorCriticFactory(name="mlp", reads_images=False)
CNN = ActorCriticFactory(name="cnn", reads_images=True)
