"""OpenVLA-OFT and OpenVLA. Importing this package does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.openvla_oft.adapter import adapter_problems, lora_spec
from embodyrl.policies.openvla_oft.config import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILE,
    OftConfig,
    OftOptions,
    read_config,
)
from embodyrl.policies.openvla_oft.settings import OftSettings, OpenVlaSettings, as_oft, record_of
from embodyrl.policies.openvla_oft.sizes import (
    adapter_parameters,
    count_parameters,
    head_parameters,
    layer_parameters,
    outside_parameters,
    sample_size,
)
from embodyrl.policies.protocol import Policy, PolicyRequest, seen_problems
from embodyrl.policies.settings import WARMUP_STEPS
from embodyrl.types import EnvSpec, GripperConvention, PolicySpec

TRY_NOW = "To try things without a download, use model=openvla_oft_tiny."
PUBLIC_LAYOUT = (
    "a local folder, or owner/name on the hub, "
    "in the public OpenVLA-OFT layout (config.json, preprocessor_config.json, tokenizer.json, "
    "dataset_statistics.json, model*.safetensors)"
)
NO_PATH = (
    f"model.path is not set: it wants {PUBLIC_LAYOUT}. Checkpoints with discrete action tokens fit: "
    "Haozhan72/Openvla-oft-SFT-libero-{spatial,object,goal}-traj1, -libero10-traj1, -libero10-trajall, or "
    "RLinf/RLinf-OpenVLAOFT-LIBERO-130 and -LIBERO-130-Base-Lora (its adapter goes to model.lora.path), or the "
    f"L1-regression ones (moojink/openvla-7b-oft-finetuned-libero-*) with model=openvla_oft_official. {TRY_NOW}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaOftFactory:
    """Builds policies of any size; implements `PolicyFactory`."""

    settings: type[OpenVlaSettings] = OftSettings
    """Its keys below `model`."""
    autoregressive: bool = False
    """OpenVLA: one action per query, token by token; false: OpenVLA-OFT, a whole chunk at once."""

    def validate(self, cfg: OpenVlaSettings) -> list[str]:
        """Return config problems, one line each with the fix."""
        cfg = as_oft(cfg)
        problems = []
        if self.autoregressive and cfg.num_action_chunks != 1:
            problems.append(
                f"model.num_action_chunks is {cfg.num_action_chunks}; OpenVLA gives one action per query, set it to 1."
            )
        return problems + _training_problems(cfg) + _folder_problems(cfg)

    def spec(self, cfg: OpenVlaSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy from the checkpoint's JSON files.

        Raises:
            ConfigError: the checkpoint and the environment do not fit together.
            CheckpointError: a JSON file is missing or malformed.
        """
        cfg = as_oft(cfg)
        config = read_config(_folder(cfg))
        if problems := _mismatches(cfg, config, env):
            raise ConfigError(problems)
        options = self._options(cfg, env, value_dim)
        tokens, images = options.num_action_tokens, cfg.num_images_in_input
        diffuses = cfg.action_head == "diffusion"
        passes = cfg.num_diffusion_steps_inference if diffuses and cfg.every_step else 1
        size = sample_size(config, images=images, tokens_per_chunk=tokens, half=cfg.half, adapters=cfg.is_lora)
        return PolicySpec(
            name="openvla" if self.autoregressive else "openvla_oft",
            num_action_chunks=cfg.num_action_chunks,
            action_dim=cfg.action_dim,
            tokens_per_chunk=record_of(cfg).tokens if diffuses else tokens,
            value_dim=value_dim,
            num_images=images,
            uses_state=cfg.use_proprio,
            gripper=GripperConvention(open=1.0, closed=0.0),
            num_parameters=count_parameters(config, options),
            num_trained=_trained(cfg, config, options) if cfg.is_lora else None,
            activation_bytes=passes * size.kept,
            recomputed_bytes=passes * size.recomputed,
            largest_layer=(layer_parameters(config), size.layer),
            outside_layers=outside_parameters(config, options),
            acting_bytes=size.acting,
            forward_flops=passes * size.flops,
            act_passes=cfg.action_dim if self.autoregressive else passes,
            warmup_steps=WARMUP_STEPS if diffuses else 0,
        )

    def build(self, cfg: OpenVlaSettings, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`.

        Raises:
            CheckpointError: a file is missing, truncated or does not fit.
        """
        from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy

        cfg = as_oft(cfg)
        spec = self.spec(cfg, request.env, request.value_dim)
        options = self._options(cfg, request.env, request.value_dim)
        return OpenVlaOftPolicy(cfg, read_config(_folder(cfg)), spec, options, request)

    def _options(self, cfg: OftSettings, env: EnvSpec, value_dim: int) -> OftOptions:
        return OftOptions(
            num_action_chunks=cfg.num_action_chunks,
            action_dim=cfg.action_dim,
            action_head=cfg.action_head,
            autoregressive=self.autoregressive,
            append_stop=cfg.append_stop,
            state_dim=env.state_dim if cfg.use_proprio else 0,
            use_film=cfg.use_film,
            rope_bf16_table=cfg.rope_bf16_table,
            value_dim=value_dim,
        )


def _trained(cfg: OftSettings, config: OftConfig, options: OftOptions) -> int:
    return adapter_parameters(config, lora_spec(cfg).r) + head_parameters(config, options)


def _mismatches(cfg: OftSettings, config: OftConfig, env: EnvSpec) -> list[str]:
    if problems := seen_problems("OpenVLA", env):
        return problems
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
    return problems


def _training_problems(cfg: OftSettings) -> list[str]:
    """Keys of adapters that nothing would read, and adapters that do not exist."""
    problems = adapter_problems(cfg)
    if cfg.is_lora and cfg.use_film:
        problems.append("model.is_lora=true trains, but use_film is for evaluation; see lora.path.")
    return problems


def _folder(cfg: OftSettings) -> Path:
    if cfg.path is None:
        raise ConfigError(NO_PATH)
    return resolve_asset(cfg.path)


def _folder_problems(cfg: OftSettings) -> list[str]:
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
    if cfg.action_head == "discrete" and any(folder.glob("action_head--*checkpoint.pt")):
        problems.append(
            f"model.path: {folder} holds a continuous action head (L1 or diffusion). Its language model never learned "
            f"action tokens, so RL on tokens starts at zero success; set model.action_head=l1 or diffusion, whichever "
            f"it has, or take one trained with discrete tokens."
        )
    if cfg.is_lora and config.random_init:
        problems.append(
            f"model.is_lora=true: {folder} has no trained weights, and adapters on random ones cannot learn; set "
            f"model.is_lora=false, or model.path to a trained checkpoint."
        )
    has_weights = (folder / INDEX_FILE).exists() or any(folder.glob("model*.safetensors"))
    if not has_weights and not config.random_init:
        problems.append(f"model.path: {folder} holds no model*.safetensors; fetch the weights too. {TRY_NOW}")
    return problems


FACTORY = OpenVlaOftFactory()
OPENVLA = OpenVlaOftFactory(settings=OpenVlaSettings, autoregressive=True)
