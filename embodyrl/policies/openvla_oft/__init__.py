"""OpenVLA-OFT with discrete action tokens. Importing this package does not import torch."""

from __future__ import annotations

from pathlib import Path

from embodyrl.config.paths import resolve_asset
from embodyrl.config.schema import ModelConfig
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.openvla_oft.config import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILE,
    OftConfig,
    proprio_parameters,
    read_config,
    value_head_parameters,
)
from embodyrl.policies.openvla_oft.statistics import NORMALISATIONS
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.registry import closest
from embodyrl.types import EnvSpec, GripperConvention, PolicySpec

PIPELINES = ("rlinf", "official")
TRY_NOW = "To try things without a download, use model=openvla_oft_tiny."
PUBLIC_LAYOUT = (
    "a local folder in the public OpenVLA-OFT layout (config.json, preprocessor_config.json, tokenizer.json, "
    "dataset_statistics.json, model*.safetensors)"
)
NO_PATH = (
    f"model.path is not set: it wants {PUBLIC_LAYOUT}. Checkpoints with discrete action tokens fit: "
    "Haozhan72/Openvla-oft-SFT-libero-{spatial,object,goal}-traj1, -libero10-traj1, -libero10-trajall, or "
    "RLinf/RLinf-OpenVLAOFT-LIBERO-130 and -LIBERO-130-Base-Lora (a separate adapter must be merged first); not the "
    f"L1-regression ones (moojink/openvla-7b-oft-finetuned-libero-*). {TRY_NOW}"
)


class OpenVlaOftFactory:
    """Builds OpenVLA-OFT policies of any size; implements `PolicyFactory`."""

    consumes = frozenset(
        {
            "path",
            "action_dim",
            "num_action_chunks",
            "unnorm_key",
            "num_images_in_input",
            "use_proprio",
            "precision",
            "image_pipeline",
            "append_stop",
            "action_normalization",
            "is_lora",
        }
    )

    def validate(self, cfg: ModelConfig) -> list[str]:
        """Return config problems, one line each with the cure."""
        problems = [
            f"model.{name} is {value}; it must be at least 1."
            for name, value in (
                ("action_dim", cfg.action_dim),
                ("num_action_chunks", cfg.num_action_chunks),
                ("num_images_in_input", cfg.num_images_in_input),
            )
            if value < 1
        ]
        if cfg.image_pipeline not in PIPELINES:
            problems.append(
                f"model.image_pipeline is '{cfg.image_pipeline}'.{closest(cfg.image_pipeline, PIPELINES)} "
                f"Known: {', '.join(PIPELINES)}; take the recipe that the checkpoint was trained with."
            )
        if cfg.action_normalization not in NORMALISATIONS:
            problems.append(
                f"model.action_normalization is '{cfg.action_normalization}'."
                f"{closest(cfg.action_normalization, NORMALISATIONS)} Known: {', '.join(NORMALISATIONS)}."
            )
        if cfg.is_lora:
            problems.append(
                "model.is_lora=true: low-rank adapters are not built yet for OpenVLA-OFT; train all weights with "
                "model.is_lora=false."
            )
        return problems + _folder_problems(cfg)

    def spec(self, cfg: ModelConfig, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy from the checkpoint's JSON files.

        Raises:
            ConfigError: the checkpoint and the environment do not fit together.
            CheckpointError: a JSON file is missing or malformed.
        """
        return _spec(cfg, read_config(_folder(cfg)), env, value_dim)

    def build(self, cfg: ModelConfig, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`.

        Raises:
            CheckpointError: a file is missing, truncated or does not fit.
        """
        from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy

        config = read_config(_folder(cfg))
        return OpenVlaOftPolicy(cfg, config, _spec(cfg, config, request.env, request.value_dim), request)


def _spec(cfg: ModelConfig, config: OftConfig, env: EnvSpec, value_dim: int) -> PolicySpec:
    data_set = config.statistics.find(cfg.unnorm_key, env.unnorm_key)
    problems = []
    width = len(config.statistics.bounds(data_set, "action", cfg.action_normalization).mask)
    if width != cfg.action_dim:
        problems.append(
            f"model.action_dim is {cfg.action_dim}, but the action statistics '{data_set}' in {config.folder} have "
            f"{width} dimensions; set model.action_dim={width} or another unnorm_key."
        )
    if cfg.use_proprio:
        width = len(config.statistics.bounds(data_set, "proprio", cfg.action_normalization).mask)
        if width != env.state_dim:
            problems.append(
                f"model.use_proprio=true: the proprio statistics '{data_set}' in {config.folder} have {width} "
                f"dimensions, env '{env.name}' gives {env.state_dim}; set another unnorm_key, or use_proprio=false."
            )
    if len(env.cameras) < cfg.num_images_in_input:
        problems.append(
            f"model.num_images_in_input is {cfg.num_images_in_input}, but env '{env.name}' has {len(env.cameras)} "
            f"cameras; lower it or name more in env.init_params.camera_names."
        )
    if env.image_rotation_deg not in (0, 180):
        problems.append(f"env '{env.name}' declares image_rotation_deg={env.image_rotation_deg}; only 0 and 180 work.")
    if problems:
        raise ConfigError(problems)
    return PolicySpec(
        name="openvla_oft",
        num_action_chunks=cfg.num_action_chunks,
        action_dim=cfg.action_dim,
        tokens_per_chunk=cfg.num_action_chunks * cfg.action_dim,
        value_dim=value_dim,
        num_images=cfg.num_images_in_input,
        uses_state=cfg.use_proprio,
        gripper=GripperConvention(open=1.0, closed=0.0),
        num_parameters=config.num_parameters
        + value_head_parameters(config.llama.hidden_size, value_dim)
        + proprio_parameters(config.llama.hidden_size, env.state_dim if cfg.use_proprio else 0),
    )


def _folder(cfg: ModelConfig) -> Path:
    if cfg.path is None:
        raise ConfigError(NO_PATH)
    return resolve_asset(cfg.path)


def _folder_problems(cfg: ModelConfig) -> list[str]:
    if cfg.path is None:
        return [NO_PATH]
    folder = resolve_asset(cfg.path)
    if not folder.is_dir():
        return [f"model.path: {folder} does not exist or is no folder; it wants {PUBLIC_LAYOUT}. {TRY_NOW}"]
    if not (folder / CONFIG_FILE).exists():
        return [f"model.path: {folder} has no {CONFIG_FILE}; it wants {PUBLIC_LAYOUT}. {TRY_NOW}"]
    try:
        config = read_config(folder)
        if cfg.unnorm_key:
            config.statistics.find(cfg.unnorm_key)
    except CheckpointError as error:
        return [f"model.path: {error}"]
    problems = []
    if not (folder / TOKENIZER_FILE).exists():
        problems.append(f"model.path: {folder} has no {TOKENIZER_FILE}; fetch the whole repository again.")
    if any(folder.glob("action_head--*checkpoint.pt")):
        problems.append(
            f"model.path: {folder} holds a continuous action head (L1 or diffusion). Its language model never learned "
            f"action tokens, so RL on tokens starts at zero success; take a checkpoint trained with discrete tokens."
        )
    has_weights = (folder / INDEX_FILE).exists() or any(folder.glob("model*.safetensors"))
    if not has_weights and not config.random_init:
        problems.append(f"model.path: {folder} holds no model*.safetensors; fetch the weights too. {TRY_NOW}")
    return problems


FACTORY = OpenVlaOftFactory()
