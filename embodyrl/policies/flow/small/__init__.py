"""A small flow policy with its own network. Importing this package does not import torch."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from embodyrl.config.paths import resolve_asset
from embodyrl.config.shared import Precision
from embodyrl.policies.files import check_equal
from embodyrl.policies.flow.settings import (
    FlowSettings,
    get_chunk_record,
    get_flow_gripper,
    get_steering_shape,
)
from embodyrl.policies.flow.small.config import NormalizationBounds, SmallConfig, read_bounds
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.steering.settings import SteeringShape, add_steering, add_steering_costs
from embodyrl.policies.vla.folder import CONFIG_FILE, has_random_init
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.policies.vla.weights import count_parameters, get_weight_sizes
from embodyrl.types import EnvSpec, InputSpec, PolicyCosts, PolicySpec

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
    """Config, chunk shape, bounds and actor of a policy whose weights are not yet loaded."""

    config: SmallConfig
    bounds: NormalizationBounds
    shape: ChunkShape
    steering: SteeringShape | None


class SmallFlowFactory:
    """Factory of `FlowPolicy` with a `SmallFlow` network; implements `PolicyFactory`."""

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
        plan = _build_plan(cfg, env)
        record = get_chunk_record(cfg, plan.shape)
        spec = PolicySpec(
            inputs=InputSpec(instructions=True, num_images=plan.config.num_images, state=plan.config.state_dim > 0),
            name="flow_small",
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action.dim,
            tokens_per_chunk=record.tokens,
            scored=record.per_action,
            value_dim=value_dim,
            gripper=get_flow_gripper(env),
        )
        return add_steering(spec, plan.steering, cfg, _get_folder(cfg))

    def costs(self, cfg: SmallFlowSettings, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Estimate parameters and activation memory."""
        plan = _build_plan(cfg, env)
        weights = get_weight_sizes(_NETWORK_CLASS, plan.config, plan.shape, plan.bounds, 1)
        inferred, stored = _count_activations(plan.config, cfg, env)
        costs = PolicyCosts(
            num_parameters=count_parameters(weights),
            activation_bytes=4 * stored,
            inference_bytes=4 * inferred,
        )
        return add_steering_costs(costs, plan.steering)

    def compare(self, cfg: SmallFlowSettings, env: EnvSpec, folder: Path) -> None:
        """Check that sizes and actor match the weights in a folder (see `PolicyFactory.compare`)."""
        plan = _build_plan(cfg, env)
        fix = "Use the environment and model with which the checkpoint was trained."
        check_equal(asdict(SmallConfig.read(folder)), asdict(plan.config), folder / CONFIG_FILE, fix)
        if plan.steering is not None:
            plan.steering.check(folder)

    def build(self, cfg: SmallFlowSettings, request: PolicyRequest) -> Policy:
        """Build the policy with weights initialized from the seed, or with those in `cfg.path`.

        Raises:
            CheckpointError: the folder has no weights of this shape.
        """
        import torch

        from embodyrl.policies.flow.policy import FlowModule
        from embodyrl.policies.flow.small.network import SmallFlow, SmallFlowWeightIO
        from embodyrl.policies.flow.steering import select_policy_class

        env, folder, plan = request.env, _get_folder(cfg), _build_plan(cfg, request.env)
        longest = max((len(task.split()) for task in env.instructions or env.tasks), default=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            network = SmallFlow(plan.config, plan.shape, plan.bounds, max(1, longest))
            module = FlowModule(network, cfg, request.value_dim)
        spec = self.spec(cfg, env, request.value_dim)
        policy = select_policy_class(cfg)(spec, cfg, module, network, SmallFlowWeightIO(plan.config), request)
        if folder is not None and not has_random_init(folder):
            policy.load_weights(folder)
        return policy


def _build_plan(cfg: SmallFlowSettings, env: EnvSpec) -> _Plan:
    config = replace(
        SmallConfig.read(_get_folder(cfg)),
        num_images=cfg.num_images_in_input,
        state_dim=env.state_dim if cfg.use_proprio else 0,
        action_width=env.action.dim,
    )
    chunk, width = cfg.num_action_chunks, env.action.dim
    shape = ChunkShape(horizon=chunk, width=width, executed=chunk, action_dim=width)
    bounds = read_bounds(env, get_flow_gripper(env), _get_folder(cfg))
    return _Plan(config=config, bounds=bounds, shape=shape, steering=get_steering_shape(cfg, shape, config.width))


def _count_activations(config: SmallConfig, cfg: SmallFlowSettings, env: EnvSpec) -> tuple[int, int]:
    """Return the approximate numbers of activations per sample: in inference, and stored for the backward pass."""
    pixels, channels = math.prod(env.cameras.size), config.planes[-1]
    image = 3 * pixels
    for planes in config.planes:
        pixels //= 4
        image += 2 * planes * pixels  # before and after the nonlinearity
    images = config.num_images * (image + 7 * channels * pixels)
    tokens = max((len(task.split()) for task in env.tasks), default=1) + config.num_images + 1
    # Vectors of each token of a layer; each pass of the expert also stores keys and values of all tokens.
    vectors = 17 * tokens + cfg.scored_passes * (20 * cfg.num_action_chunks + 2 * tokens)
    return images, images + config.layers * config.width * vectors


def _get_folder(cfg: SmallFlowSettings) -> Path | None:
    return None if cfg.path is None else resolve_asset(cfg.path)


FACTORY = SmallFlowFactory()
