"""OpenVLA-OFT and OpenVLA policies. Importing this package does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.openvla_oft.config import OftConfig, OftOptions, read_config
from embodyrl.policies.openvla_oft.settings import (
    ActionHead,
    ImagePipeline,
    OftSettings,
    OpenVlaSettings,
    get_chunk_record,
    to_oft_settings,
)
from embodyrl.policies.openvla_oft.sizes import count_value_parameters, estimate_oft_costs
from embodyrl.policies.protocol import Policy, PolicyRequest, find_env_problems
from embodyrl.policies.steering.settings import SteeringShape, add_steering, add_steering_costs
from embodyrl.policies.vla.adapter import find_adapter_problems
from embodyrl.policies.vla.folder import CONFIG_FILE, TOKENIZER_FILE, Clip, compute_clip_range, find_missing_files
from embodyrl.types import EnvSpec, GripperConvention, InputSpec, PolicyCosts, PolicySpec

NO_DOWNLOAD_HINT = "To start without a download, use model=openvla_oft_tiny."
LAYOUT_DESCRIPTION = (
    "a local folder, or owner/name on the hub, in the published OpenVLA-OFT layout (config.json, "
    "preprocessor_config.json, tokenizer.json, dataset_statistics.json, model*.safetensors)"
)
NO_PATH_ERROR = (
    f"model.path is not set. Set it to {LAYOUT_DESCRIPTION}. Suitable checkpoints have discrete action tokens: "
    "Haozhan72/Openvla-oft-SFT-libero-{spatial,object,goal}-traj1, -libero10-traj1, -libero10-trajall, or "
    "RLinf/RLinf-OpenVLAOFT-LIBERO-130, or L1 regression (moojink/openvla-7b-oft-finetuned-libero-*) with "
    f"model=openvla_oft_official. {NO_DOWNLOAD_HINT}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaOftFactory:
    """Factory of OpenVLA or OpenVLA-OFT policies of any size; implements `PolicyFactory`."""

    settings: type[OpenVlaSettings] = OftSettings
    """Settings class of the keys under `model`."""
    autoregressive: bool = False
    """True for OpenVLA: one action per inference, token by token; False for OpenVLA-OFT: a whole chunk in parallel."""

    def validate(self, cfg: OpenVlaSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        cfg = to_oft_settings(cfg)
        problems = []
        if self.autoregressive and cfg.num_action_chunks != 1:
            problems.append(
                f"model.num_action_chunks={cfg.num_action_chunks}: OpenVLA predicts one action per inference; set "
                "model.num_action_chunks=1."
            )
        return problems + find_adapter_problems(cfg) + _find_folder_problems(cfg)

    def spec(self, cfg: OpenVlaSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec, read from the checkpoint's JSON files.

        Raises:
            ConfigError: the checkpoint and the environment do not fit.
            CheckpointError: a JSON file is missing or malformed.
        """
        cfg = to_oft_settings(cfg)
        config = read_config(_get_folder(cfg))
        if problems := _find_mismatches(cfg, config, env):
            raise ConfigError(problems)
        options = self._build_options(cfg, env, value_dim)
        is_diffusion = cfg.action_head == ActionHead.diffusion
        spec = PolicySpec(
            inputs=InputSpec(
                instructions=True,
                num_images=cfg.num_images_in_input,
                state=cfg.use_proprio,
                rotates_images=True,
                resized=config.image_size if cfg.image_pipeline is ImagePipeline.rlinf else 0,
            ),
            name="openvla" if self.autoregressive else "openvla_oft",
            num_action_chunks=cfg.num_action_chunks,
            action_dim=cfg.action_dim,
            tokens_per_chunk=get_chunk_record(cfg).tokens if is_diffusion else options.num_action_tokens,
            scored=get_chunk_record(cfg).per_action if is_diffusion else 0,
            value_dim=value_dim,
            gripper=GripperConvention(open=1.0, closed=0.0),
            regresses=cfg.action_head == ActionHead.l1 and not cfg.is_residual,
        )
        return add_steering(spec, _get_steering_shape(cfg, config), cfg, config.folder)

    def costs(self, cfg: OpenVlaSettings, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Estimate parameters, memory and FLOPs from the checkpoint's JSON files."""
        cfg = to_oft_settings(cfg)
        config, options = read_config(_get_folder(cfg)), self._build_options(cfg, env, value_dim)
        steering, num_other_trained = _get_steering_shape(cfg, config), count_value_parameters(config, options)
        return add_steering_costs(estimate_oft_costs(config, options), steering, num_other_trained=num_other_trained)

    def describe_checkpoint(self, cfg: OpenVlaSettings, env: EnvSpec) -> list[tuple[str, str]]:
        """Return (label, text) pairs that describe the checkpoint's files (see `PolicyFactory.describe_checkpoint`)."""
        cfg = to_oft_settings(cfg)
        config = read_config(_get_folder(cfg))
        key = config.statistics.find(cfg.unnorm_key, env.benchmark.unnorm_key)
        crop = "JPEG, lanczos, crop of 0.9" if cfg.image_pipeline == "official" else "bicubic, no crop"
        return [
            ("statistics", f"{key} of {', '.join(sorted(config.statistics.sets))}; {cfg.action_normalization}"),
            ("tokenizer", f"{config.folder / TOKENIZER_FILE}; {config.n_bins} action bins, head {cfg.action_head}"),
            ("images", f"{config.image_size}x{config.image_size} pixels, RGB; {cfg.image_pipeline} ({crop})"),
        ]

    def state_limits(self, cfg: OpenVlaSettings, env: EnvSpec) -> Clip | None:
        """Return the range of plausible states (see `PolicyFactory.state_limits`)."""
        cfg = to_oft_settings(cfg)
        if not cfg.use_proprio:
            return None
        statistics = read_config(_get_folder(cfg)).statistics
        key = statistics.find(cfg.unnorm_key, env.benchmark.unnorm_key)
        bounds = statistics.bounds(key, "proprio", cfg.action_normalization)
        return compute_clip_range({"min": bounds.low, "max": bounds.high})

    def compare(self, cfg: OpenVlaSettings, env: EnvSpec, folder: Path) -> None:
        """Check that the sizes of model and actor match a folder (see `PolicyFactory.compare`)."""
        cfg, saved = to_oft_settings(cfg), read_config(folder)
        base_config = read_config(_get_folder(cfg))
        if (saved.towers, saved.llama) != (base_config.towers, base_config.llama):
            raise CheckpointError(
                f"{folder} and model.path={cfg.path} contain models of different sizes. "
                "Set model.path to the base model of this run."
            )
        if not cfg.use_proprio and any(folder.glob("*proprio_projector*")):
            raise CheckpointError(
                f"{folder} was trained with proprioception (it has a proprio_projector). Set model.use_proprio=true."
            )
        if (steering := _get_steering_shape(cfg, base_config)) is not None:
            steering.check(folder)

    def build(self, cfg: OpenVlaSettings, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`.

        Raises:
            CheckpointError: a file is missing, truncated or does not fit.
        """
        from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy
        from embodyrl.policies.openvla_oft.residual import ResidualOftPolicy

        cfg = to_oft_settings(cfg)
        spec = self.spec(cfg, request.env, request.value_dim)
        options = self._build_options(cfg, request.env, request.value_dim)
        policy_class = ResidualOftPolicy if cfg.is_residual else OpenVlaOftPolicy
        return policy_class(read_config(_get_folder(cfg)), spec, options, request)

    def _build_options(self, cfg: OftSettings, env: EnvSpec, value_dim: int) -> OftOptions:
        state_dim = env.state_dim if cfg.use_proprio else 0
        return OftOptions(cfg=cfg, autoregressive=self.autoregressive, state_dim=state_dim, value_dim=value_dim)


def _get_steering_shape(cfg: OftSettings, config: OftConfig) -> SteeringShape | None:
    return SteeringShape.for_residual(cfg, config.llama.hidden_size, cfg.action_dim) if cfg.is_residual else None


def _find_mismatches(cfg: OftSettings, config: OftConfig, env: EnvSpec) -> list[str]:
    if problems := find_env_problems("OpenVLA", env):
        return problems
    data_set = config.statistics.find(cfg.unnorm_key, env.benchmark.unnorm_key)
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
                f"dimensions, but env '{env.name}' has {env.state_dim}; set another unnorm_key, or use_proprio=false."
            )
    return problems


def _get_folder(cfg: OftSettings) -> Path:
    if cfg.path is None:
        raise ConfigError(NO_PATH_ERROR)
    return resolve_asset(cfg.path)


def _find_folder_problems(cfg: OftSettings) -> list[str]:
    if cfg.path is None:
        return [NO_PATH_ERROR]
    folder = resolve_asset(cfg.path)
    if not folder.is_dir():
        return [f"model.path: {folder} is not a folder. Set it to {LAYOUT_DESCRIPTION}. {NO_DOWNLOAD_HINT}"]
    if not (folder / CONFIG_FILE).exists():
        return [f"model.path: {folder} has no {CONFIG_FILE}. Use {LAYOUT_DESCRIPTION}. {NO_DOWNLOAD_HINT}"]
    try:
        read_config(folder)
    except CheckpointError as error:
        return [f"model.path: {error}"]
    problems = [
        *find_missing_files(folder, tokenizer="; download the whole repository again.", adapted=cfg.uses_adapters)
    ]
    if any(folder.glob("vision_backbone--*checkpoint.pt")):
        problems.append(
            f"model.path: {folder} has FiLM layers (OFT+), which are not supported; use another checkpoint."
        )
    if cfg.action_head == "discrete" and any(folder.glob("action_head--*checkpoint.pt")):
        problems.append(
            f"model.path: {folder} contains a continuous action head (L1 or diffusion), so its language model was not "
            "trained on action tokens. Set model.action_head=l1 or diffusion, or use a checkpoint with discrete tokens."
        )
    return problems


FACTORY = OpenVlaOftFactory()
OPENVLA = OpenVlaOftFactory(settings=OpenVlaSettings, autoregressive=True)
