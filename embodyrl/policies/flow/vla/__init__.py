"""pi0, pi0.5 and SmolVLA as policies. Importing this package does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.flow.configs import CONFIG_FILE
from embodyrl.policies.flow.record import ChunkRecord, ChunkShape
from embodyrl.policies.flow.specs import FlowSpec
from embodyrl.policies.flow.vla.folder import (
    TOKENIZER_FILE,
    read_folder,
    read_units,
    reads_state,
    reads_state_as_text,
    starts_random,
)
from embodyrl.policies.flow.vla.settings import Pi05Settings, VlaSettings
from embodyrl.policies.flow.vla.sizes import Sizes
from embodyrl.policies.openvla_oft.adapter import adapter_problems, lora_spec
from embodyrl.policies.protocol import Policy, PolicyRequest, fitting_models
from embodyrl.policies.settings import WARMUP_STEPS
from embodyrl.types import ActionKind, EnvSpec, GripperConvention, PolicySpec

PUBLIC_LAYOUT = (
    "a local folder with config.json, model*.safetensors, statistics and the language model's tokenizer.json, as "
    "openpi (PyTorch), lerobot, transformers or RLinf publish it"
)
TRY_NOW = "To try things without a download, use model=openvla_oft_tiny or model=flow_small."


@dataclass(frozen=True, slots=True, kw_only=True)
class VlaFactory:
    """Builds flow policies of any size; implements `PolicyFactory`."""

    settings: type[VlaSettings] = VlaSettings

    def validate(self, cfg: VlaSettings) -> list[str]:
        """Return config problems, one line each with the fix."""
        return adapter_problems(cfg) + _folder_problems(cfg)

    def spec(self, cfg: VlaSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy from the checkpoint's small files.

        Raises:
            ConfigError: the checkpoint and the environment do not fit together.
            CheckpointError: a file is missing or malformed.
        """
        folder = _folder(cfg)
        model = read_folder(folder, cfg)
        if problems := _mismatches(cfg, model, env):
            raise ConfigError(problems)
        read_units(folder, cfg, env.state_dim, env.action_dim)
        sizes, only = Sizes.of(model), cfg.train_expert_only
        lora = sizes.adapters(lora_spec(cfg).r, expert_only=only) if cfg.is_lora else None
        kept = sizes.activation_bytes(cfg.num_images_in_input, expert_only=only)
        return PolicySpec(
            name=cfg.model_type,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action_dim,
            tokens_per_chunk=ChunkRecord.of(cfg, _shape(cfg, model, env)).tokens,
            imitated=model.horizon,
            value_dim=value_dim,
            num_images=cfg.num_images_in_input,
            uses_state=reads_state(cfg),
            # As LIBERO's simulator and demonstrations have it, and so the checkpoints that were trained on them.
            gripper=None if env.gripper is None else GripperConvention(open=-1.0, closed=1.0, index=env.gripper.index),
            num_parameters=sizes.total,
            num_trained=lora if lora is not None else sizes.expert if only else None,
            activation_bytes=kept,
            recomputed_bytes=kept // 10,
            warmup_steps=WARMUP_STEPS,
            action_kinds=frozenset({ActionKind.box}),
        )

    def build(self, cfg: VlaSettings, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`.

        Raises:
            CheckpointError: a file is missing, truncated or does not fit.
            ConfigError: adapters fit no layer.
        """
        from embodyrl.policies.flow.vla.build import build_policy

        folder, env = _folder(cfg), request.env
        model = read_folder(folder, cfg)
        return build_policy(
            cfg, folder, model, self.spec(cfg, env, request.value_dim), _shape(cfg, model, env), request
        )


def _shape(cfg: VlaSettings, model: FlowSpec, env: EnvSpec) -> ChunkShape:
    return ChunkShape(
        horizon=model.horizon, width=model.action_dim, executed=cfg.num_action_chunks, action_dim=env.action_dim
    )


def _mismatches(cfg: VlaSettings, model: FlowSpec, env: EnvSpec) -> list[str]:
    if not env.cameras or env.action_kind != ActionKind.box:
        has = f"{len(env.cameras)} cameras and {env.action_kind} actions"
        return [
            f"{cfg.model_type} reads camera images and gives box actions, env '{env.name}' has {has}; choose another "
            f"model, for example {fitting_models(env)}."
        ]
    problems = []
    if cfg.num_action_chunks > model.horizon:
        problems.append(
            f"model.num_action_chunks={cfg.num_action_chunks} executes more than the {model.horizon} actions of this "
            "checkpoint's chunk; lower it."
        )
    state = 0 if reads_state_as_text(cfg) else env.state_dim
    for what, size, most in (("actions", env.action_dim, model.action_dim), ("states", state, model.state_dim)):
        if size > most:
            problems.append(f"env '{env.name}' has {what} of {size} numbers, {cfg.model_type} takes {most} at most.")
    if cfg.delta_dims > min(env.action_dim, env.state_dim):
        problems.append(
            f"model.delta_dims={cfg.delta_dims}: env '{env.name}' has {env.action_dim} numbers in an action and "
            f"{env.state_dim} in its state."
        )
    if env.image_rotation_deg not in (0, 180):
        problems.append(f"env '{env.name}' declares image_rotation_deg={env.image_rotation_deg}; only 0 and 180 work.")
    return problems


def _folder(cfg: VlaSettings) -> Path:
    if cfg.path is None:
        raise ConfigError(f"model.path is not set: it wants {PUBLIC_LAYOUT}. {TRY_NOW}")
    return resolve_asset(cfg.path)


def _folder_problems(cfg: VlaSettings) -> list[str]:
    try:
        folder = _folder(cfg)
        if not folder.is_dir():
            raise ConfigError(f"model.path: {folder} does not exist or is no folder; it wants {PUBLIC_LAYOUT}.")
        read_folder(folder, cfg)
    except (ConfigError, CheckpointError) as error:
        return [str(error)]
    problems = []
    if not (folder / TOKENIZER_FILE).exists():
        problems.append(
            f"model.path: {folder} has no {TOKENIZER_FILE}, which public checkpoints leave to another repository; copy "
            "that of the language model there (pi0, pi0.5: PaliGemma's; SmolVLA: SmolVLM2's)."
        )
    random = starts_random(folder)
    if not random and not any(folder.glob("model*.safetensors")):
        problems.append(f"model.path: {folder} holds {CONFIG_FILE} but no model*.safetensors; fetch the weights too.")
    if random and cfg.is_lora:
        problems.append(
            f"model.is_lora=true: {folder} has no trained weights, and adapters on random ones cannot learn; set "
            "model.is_lora=false."
        )
    return problems


FACTORY = VlaFactory()
PI05 = VlaFactory(settings=Pi05Settings)
