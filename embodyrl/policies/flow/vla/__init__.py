"""pi0, pi0.5 and SmolVLA policies. Importing this package does not import torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.flow.settings import get_chunk_record, get_flow_gripper, get_steering_shape
from embodyrl.policies.flow.specs import FlowSpec
from embodyrl.policies.flow.vla.folder import (
    check_prompts,
    find_warnings,
    get_prompt_format,
    read_flow_spec,
    read_normalizer,
)
from embodyrl.policies.flow.vla.settings import Normalization, Pi05Settings, VlaSettings, reads_state
from embodyrl.policies.flow.vla.sizes import estimate_costs
from embodyrl.policies.inputs import INPUTS_FILE
from embodyrl.policies.protocol import Policy, PolicyRequest, find_env_problems
from embodyrl.policies.steering.settings import SteeringShape, add_steering, add_steering_costs
from embodyrl.policies.vla.adapter import find_adapter_problems
from embodyrl.policies.vla.folder import TOKENIZER_FILE, Clip, find_missing_files
from embodyrl.policies.vla.processors import find_camera_order_problem, read_image_features
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.types import EnvSpec, InputSpec, PolicyCosts, PolicySpec

LAYOUT_DESCRIPTION = (
    "a local folder, or owner/name on the hub, with config.json, model*.safetensors, statistics and the language "
    "model's tokenizer.json, as openpi (PyTorch), lerobot, transformers or RLinf publish it"
)
_MAX_STATE = {Normalization.mean_std: 6.0, Normalization.quantiles: 2.0}
"""Largest plausible absolute value of a normalized state."""
NO_DOWNLOAD_HINT = "To start without a download, use model=openvla_oft_tiny or model=flow_small."


@dataclass(frozen=True, slots=True, kw_only=True)
class VlaFactory:
    """Factory of pi0, pi0.5 and SmolVLA policies; implements `PolicyFactory`."""

    settings: type[VlaSettings] = VlaSettings

    def validate(self, cfg: VlaSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        return find_adapter_problems(cfg) + _find_folder_problems(cfg)

    def spec(self, cfg: VlaSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec, read from the checkpoint's config, tokenizer and statistics.

        Raises:
            ConfigError: the checkpoint and the environment do not fit.
            CheckpointError: a file is missing or malformed.
        """
        folder = _get_folder(cfg)
        model = read_flow_spec(folder, cfg)
        if problems := _find_mismatches(cfg, model, env):
            raise ConfigError(problems)
        read_normalizer(folder, cfg, env.state_dim, env.action.dim)
        self._check_cameras(cfg, env, folder)
        check_prompts(get_prompt_format(cfg, model, folder), folder, env.instructions or env.tasks, env.state_dim)
        record = get_chunk_record(cfg, _build_chunk_shape(cfg, model, env))
        spec = PolicySpec(
            inputs=InputSpec(
                instructions=True,
                num_images=cfg.num_images_in_input,
                state=reads_state(cfg) or cfg.delta_dims > 0,
                rotates_images=True,
            ),
            name=cfg.model_type,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action.dim,
            tokens_per_chunk=record.tokens,
            scored=record.per_action,
            imitated=model.horizon,
            value_dim=value_dim,
            gripper=get_flow_gripper(env),
            warnings=find_warnings(folder, cfg),
        )
        return add_steering(spec, _get_steering_shape(cfg, model, env), cfg, folder)

    def _check_cameras(self, cfg: VlaSettings, env: EnvSpec, folder: Path) -> None:
        """Check that the cameras in LeRobot's config.json match the cameras of the environment."""
        if cfg.cameras is not None or (folder / INPUTS_FILE).is_file():
            return
        names, read_names = env.cameras.names, env.cameras.names[: cfg.num_images_in_input]
        if problem := find_camera_order_problem(read_image_features(folder), names, read_names):
            raise ConfigError(f"model={cfg.model_type} in env '{env.name}': {problem}")

    def costs(self, cfg: VlaSettings, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Estimate size and memory from the checkpoint's config.json."""
        model = read_flow_spec(_get_folder(cfg), cfg)
        return add_steering_costs(estimate_costs(model, cfg), _get_steering_shape(cfg, model, env))

    def describe_checkpoint(self, cfg: VlaSettings, env: EnvSpec) -> list[tuple[str, str]]:
        """Return (label, text) pairs that describe the checkpoint's files (see `PolicyFactory.describe_checkpoint`)."""
        folder = _get_folder(cfg)
        model = read_flow_spec(folder, cfg)
        size, limit = model.vision.image_size, get_prompt_format(cfg, model, folder).max_tokens
        return [
            ("statistics", f"{cfg.unnorm_key or 'the only data set'}; {cfg.normalization}"),
            ("tokenizer", f"{folder / TOKENIZER_FILE}; prompts of at most {limit} tokens"),
            ("images", f"{size}x{size} pixels, RGB, no crop; the model outputs {model.horizon} actions"),
        ]

    def state_limits(self, cfg: VlaSettings, env: EnvSpec) -> Clip | None:
        """Return the range of plausible states (see `PolicyFactory.state_limits`)."""
        affine = read_normalizer(_get_folder(cfg), cfg, env.state_dim, env.action.dim).state
        if affine is None:
            return None
        shift, half_range = np.array(affine.shift), np.array(affine.scale) * _MAX_STATE[cfg.normalization]
        return shift - half_range, shift + half_range

    def compare(self, cfg: VlaSettings, env: EnvSpec, folder: Path) -> None:
        """Check that the actor matches the actor in the folder (see `PolicyFactory.compare`)."""
        if (steering := _get_steering_shape(cfg, read_flow_spec(_get_folder(cfg), cfg), env)) is not None:
            steering.check(folder)

    def build(self, cfg: VlaSettings, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`.

        Raises:
            CheckpointError: a file is missing, truncated or does not fit.
            ConfigError: adapters match no layer.
        """
        from embodyrl.policies.flow.vla.build import build_policy

        folder, env = _get_folder(cfg), request.env
        model = read_flow_spec(folder, cfg)
        return build_policy(
            cfg, folder, model, self.spec(cfg, env, request.value_dim), _build_chunk_shape(cfg, model, env), request
        )


def _build_chunk_shape(cfg: VlaSettings, model: FlowSpec, env: EnvSpec) -> ChunkShape:
    return ChunkShape(
        horizon=model.horizon, width=model.action_dim, executed=cfg.num_action_chunks, action_dim=env.action.dim
    )


def _get_steering_shape(cfg: VlaSettings, model: FlowSpec, env: EnvSpec) -> SteeringShape | None:
    return get_steering_shape(cfg, _build_chunk_shape(cfg, model, env), model.expert.width)


def _find_mismatches(cfg: VlaSettings, model: FlowSpec, env: EnvSpec) -> list[str]:
    if problems := find_env_problems(cfg.model_type, env):
        return problems
    problems = []
    if cfg.num_action_chunks > model.horizon:
        problems.append(
            f"model.num_action_chunks={cfg.num_action_chunks}: this checkpoint predicts {model.horizon} actions per "
            f"chunk; set model.num_action_chunks={model.horizon} or less."
        )
    # pi0.5's state is text of any length, or unused.
    state_dim = 0 if isinstance(cfg, Pi05Settings) else env.state_dim
    for quantity, size, max_size in (
        ("actions", env.action.dim, model.action_dim),
        ("states", state_dim, model.state_dim),
    ):
        if size > max_size:
            problems.append(
                f"env '{env.name}' has {quantity} with {size} dimensions; {cfg.model_type} supports at most {max_size}."
            )
    if cfg.delta_dims > min(env.action.dim, env.state_dim):
        problems.append(
            f"model.delta_dims={cfg.delta_dims} exceeds the dimension of actions ({env.action.dim}) or states "
            f"({env.state_dim}) of env '{env.name}'; set a smaller number."
        )
    return problems


def _get_folder(cfg: VlaSettings) -> Path:
    if cfg.path is None:
        raise ConfigError(f"model.path is not set. Use {LAYOUT_DESCRIPTION}. {NO_DOWNLOAD_HINT}")
    return resolve_asset(cfg.path)


def _find_folder_problems(cfg: VlaSettings) -> list[str]:
    try:
        folder = _get_folder(cfg)
        if not folder.is_dir():
            raise ConfigError(f"model.path: {folder} is not a folder. Use {LAYOUT_DESCRIPTION}.")
        read_flow_spec(folder, cfg)
    except (ConfigError, CheckpointError) as error:
        return [str(error)]
    hint = (
        ", which published checkpoints do not contain; copy that of the language model there (pi0, pi0.5: PaliGemma's; "
        "SmolVLA: SmolVLM2's)."
    )
    return [*find_missing_files(folder, tokenizer=hint, adapted=cfg.uses_adapters)]


FACTORY = VlaFactory()
PI05 = VlaFactory(settings=Pi05Settings)
