"""A small flow policy with its own network. Importing this package does not import torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from embodyrl.config.paths import resolve_asset
from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.settings import (
    FlowSettings,
    add_actor_costs,
    add_actor_spec,
    check_steering,
    get_chunk_record,
    get_flow_gripper,
)
from embodyrl.policies.flow.small.config import NormalizationBounds, SmallConfig, read_bounds
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.vla.folder import CONFIG_FILE
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.policies.vla.weights import count, weight_sizes
from embodyrl.types import ActionKind, EnvSpec, InputSpec, PolicyCosts, PolicySpec

_NETWORK_CLASS = "embodyrl.policies.flow.small.network:SmallFlow"


class SmallFlowSettings(FlowSettings):
    """Config keys for the small flow policy."""

    num_steps: Annotated[int, Field(ge=1, le=10**6)] = 4
    """Number of Euler steps from noise to an action chunk."""
    num_images_in_input: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of camera images per inference."""
    use_proprio: bool = True
    """Use proprioception as an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Config, chunk shape and bounds of a policy whose weights are not yet loaded."""

    config: SmallConfig
    bounds: NormalizationBounds
    shape: ChunkShape
    random: bool


class SmallFlowFactory:
    """Builds `FlowPolicy` with a `SmallFlow`; implements `PolicyFactory`."""

    settings: ClassVar = SmallFlowSettings

    def validate(self, cfg: SmallFlowSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        if cfg.precision is Precision.fp32:
            return []
        return [f"model.precision={cfg.precision.value}: flow_small supports fp32 only; set model.precision=fp32."]

    def spec(self, cfg: SmallFlowSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec, derived from the environment's observations and actions.

        Raises:
            CheckpointError: the folder's JSON files are malformed.
        """
        plan = _plan(cfg, env)
        spec = PolicySpec(
            inputs=InputSpec(instructions=True, num_images=plan.config.num_images, state=plan.config.state_dim > 0),
            name="flow_small",
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action.dim,
            tokens_per_chunk=get_chunk_record(cfg, plan.shape).tokens,
            value_dim=value_dim,
            gripper=get_flow_gripper(env),
            action_kinds=frozenset({ActionKind.box}),
        )
        return add_actor_spec(spec, cfg, env, plan.shape, plan.config.width, _folder(cfg))

    def costs(self, cfg: SmallFlowSettings, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Return the number of parameters."""
        plan = _plan(cfg, env)
        weights = weight_sizes(_NETWORK_CLASS, plan.config, plan.shape, plan.bounds, min_words=1)
        costs = PolicyCosts(num_parameters=count(weights))
        return add_actor_costs(costs, cfg, plan.shape, plan.config.width)

    def compare(self, cfg: SmallFlowSettings, env: EnvSpec, folder: Path) -> None:
        """Check that sizes and actor match the weights in a folder (see `PolicyFactory.compare`)."""
        plan, saved = _plan(cfg, env), asdict(SmallConfig.read(folder)[0])
        mismatches = [
            f"{k} is {saved[k]} (this run needs {v})" for k, v in asdict(plan.config).items() if saved[k] != v
        ]
        if mismatches:
            raise CheckpointError(
                f"{folder / CONFIG_FILE} does not match this run: {', '.join(mismatches)}. Use the environment and "
                "model with which the checkpoint was trained."
            )
        check_steering(cfg, plan.shape, plan.config.width, folder)

    def build(self, cfg: SmallFlowSettings, request: PolicyRequest) -> Policy:
        """Build the policy with weights initialized from the seed, or with those in `cfg.path`.

        Raises:
            CheckpointError: the folder has no weights of this shape.
        """
        from embodyrl.policies.flow.small.network import build_policy

        plan = _plan(cfg, request.env)
        spec = self.spec(cfg, request.env, request.value_dim)
        folder = None if plan.random else _folder(cfg)
        return build_policy(cfg, spec, plan.config, plan.shape, plan.bounds, folder, request)


def _plan(cfg: SmallFlowSettings, env: EnvSpec) -> _Plan:
    config, random = SmallConfig.read(_folder(cfg))
    bounds = read_bounds(env, get_flow_gripper(env), _folder(cfg))
    config = replace(
        config,
        num_images=cfg.num_images_in_input,
        state_dim=env.state_dim if cfg.use_proprio else 0,
        action_width=env.action.dim,
    )
    chunk, width = cfg.num_action_chunks, env.action.dim
    shape = ChunkShape(horizon=chunk, width=width, executed=chunk, action_dim=width)
    return _Plan(config=config, bounds=bounds, shape=shape, random=random)


def _folder(cfg: SmallFlowSettings) -> Path | None:
    return None if cfg.path is None else resolve_asset(cfg.path)


FACTORY = SmallFlowFactory()
