"""pi0, pi0.5 and SmolVLA as policies, with memory estimates. Importing this package does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.flow.settings import check_steering, described, record_of
from embodyrl.policies.flow.specs import FlowSpec, LayersSpec, Pi0Spec, SmolVlaSpec, VisionSpec
from embodyrl.policies.flow.vla.folder import (
    check_prompts,
    contradictions,
    doubts,
    prompt_form,
    read_folder,
    read_units,
    reads_state,
)
from embodyrl.policies.flow.vla.settings import Pi05Settings, VlaSettings
from embodyrl.policies.protocol import Policy, PolicyRequest, seen_problems
from embodyrl.policies.settings import WARMUP_STEPS
from embodyrl.policies.vla.adapter import adapter_problems, lora_spec
from embodyrl.policies.vla.folder import lacking
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.types import ActionKind, EnvSpec, GripperConvention, PolicySpec

_PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of parameters, without RL heads."""

    model: FlowSpec
    backbone: int
    expert: int
    """Including the projections of states, actions and time."""

    @classmethod
    def of(cls, model: FlowSpec) -> Self:
        """Count the parameters of a model."""
        text, expert = model.language, model.expert
        adaptive = isinstance(model, Pi0Spec) and model.adaptive
        projector = _projector(model)
        backbone = _vision(model.vision) + projector + model.vocab * text.width + text.width
        backbone += text.depth * _layer(text, text.width, 0)
        kv_width, condition = text.kv_heads * text.head_dim, expert.width if adaptive else 0
        flow = _norm(expert, condition)
        for i in range(expert.depth):
            across = isinstance(model, SmolVlaSpec) and i % model.joint_every != 0
            flow += _layer(expert, kv_width if across else expert.width, condition)
        w = expert.width
        flow += model.action_dim * w + w + w * model.action_dim + model.action_dim
        flow += (w if adaptive else 2 * w) * w + w + w * w + w
        if not adaptive:
            out = text.width if isinstance(model, SmolVlaSpec) else w
            flow += model.state_dim * out + out
        return cls(model=model, backbone=backbone, expert=flow)

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.backbone + self.expert

    def adapters(self, rank: int, *, expert_only: bool) -> int:
        """Return the approximate parameters of adapters on all linear layers, and of fully trained modules."""
        stacks = (self.model.expert,) if expert_only else (self.model.expert, self.model.language)
        sides = sum(
            s.depth * (4 * s.width + 2 * (s.heads + s.kv_heads) * s.head_dim + 3 * (s.width + s.mlp)) for s in stacks
        )
        if not expert_only:
            v = self.model.vision
            sides += v.depth * (9 * v.width + 2 * v.mlp + v.width)
        w = self.model.expert.width
        return rank * sides + 3 * w * w + 3 * self.model.action_dim * w

    def activation_bytes(self, images: int, *, expert_only: bool) -> int:
        """Return the approximate bytes that a pass stores for the backward pass.

        Per token: 10 vectors of the width and 4 of the MLP.
        """
        model = self.model
        kept = (model.horizon + 1) * _kept(model.expert)
        if not expert_only:
            vision = model.vision
            kept += (images * model.image_tokens + _PROMPT_TOKENS) * _kept(model.language)
            kept += images * vision.patches * vision.depth * (8 * vision.width + 2 * vision.mlp)
        return 4 * kept


def _kept(layers: LayersSpec) -> int:
    return layers.depth * (10 * layers.width + 4 * layers.mlp)


def _projector(model: FlowSpec) -> int:
    if isinstance(model, SmolVlaSpec):
        return model.vision.width * model.shuffle**2 * model.language.width
    return (model.vision.width + 1) * model.language.width


def _vision(v: VisionSpec) -> int:
    block = 4 * (v.width + 1) * v.width + (v.width + 1) * v.mlp + (v.mlp + 1) * v.width + 4 * v.width
    return (3 * v.patch_size**2 + 1) * v.width + v.patches * v.width + v.depth * block + 2 * v.width


def _norm(layers: LayersSpec, condition: int) -> int:
    return 3 * layers.width * (condition + 1) if condition else layers.width


def _layer(layers: LayersSpec, kv_inputs: int, condition: int) -> int:
    heads, kv = layers.heads * layers.head_dim, layers.kv_heads * layers.head_dim
    attention = 2 * layers.width * heads + 2 * kv_inputs * kv
    return attention + 3 * layers.width * layers.mlp + 2 * _norm(layers, condition)


PUBLIC_LAYOUT = (
    "a local folder, or owner/name on the hub, "
    "with config.json, model*.safetensors, statistics and the language model's tokenizer.json, as "
    "openpi (PyTorch), lerobot, transformers or RLinf publish it"
)
TRY_NOW = "To try things without a download, use model=openvla_oft_tiny or model=flow_small."


@dataclass(frozen=True, slots=True, kw_only=True)
class VlaFactory:
    """Builds flow policies of all sizes; implements `PolicyFactory`."""

    settings: type[VlaSettings] = VlaSettings

    def validate(self, cfg: VlaSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        return adapter_problems(cfg) + _folder_problems(cfg)

    def spec(self, cfg: VlaSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy from the checkpoint's small files.

        Raises:
            ConfigError: the checkpoint and the environment do not fit.
            CheckpointError: a file is missing or malformed.
        """
        folder = _folder(cfg)
        model = read_folder(folder, cfg)
        if problems := _mismatches(cfg, model, env):
            raise ConfigError(problems)
        read_units(folder, cfg, env.state_dim, env.action_dim)
        check_prompts(prompt_form(cfg, model, folder), folder, env.instructions or env.tasks, env.state_dim)
        sizes, only = Sizes.of(model), cfg.train_expert_only
        lora = sizes.adapters(lora_spec(cfg).r, expert_only=only) if cfg.is_lora else None
        kept = sizes.activation_bytes(cfg.num_images_in_input, expert_only=only)
        shape = _shape(cfg, model, env)
        spec = PolicySpec(
            reads_instructions=True,
            name=cfg.model_type,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action_dim,
            tokens_per_chunk=record_of(cfg, shape).tokens,
            imitated=model.horizon,
            value_dim=value_dim,
            num_images=cfg.num_images_in_input,
            uses_state=reads_state(cfg) or cfg.delta_dims > 0,
            # The convention of LIBERO's simulator and demonstrations, and of checkpoints trained on them.
            turns_images=True,
            gripper=None if env.gripper is None else GripperConvention(open=-1.0, closed=1.0, index=env.gripper.index),
            num_parameters=sizes.total,
            num_trained=lora if lora is not None else sizes.expert if only else None,
            activation_bytes=kept,
            recomputed_bytes=kept // 10,
            warmup_steps=WARMUP_STEPS,
            action_kinds=frozenset({ActionKind.box}),
            doubts=doubts(folder, cfg),
        )
        return described(spec, cfg, shape, model.expert.width, folder)

    def compare(self, cfg: VlaSettings, env: EnvSpec, folder: Path) -> None:
        """Compare the actor on the flow (see `ComparesWeights`)."""
        model = read_folder(_folder(cfg), cfg)
        check_steering(cfg, _shape(cfg, model, env), model.expert.width, folder)

    def build(self, cfg: VlaSettings, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`.

        Raises:
            CheckpointError: a file is missing, truncated or does not fit.
            ConfigError: adapters match no layer.
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
    if problems := seen_problems(cfg.model_type, env):
        return problems
    problems = []
    if cfg.num_action_chunks > model.horizon:
        problems.append(
            f"model.num_action_chunks={cfg.num_action_chunks} executes more than the {model.horizon} actions of this "
            "checkpoint's chunk; lower it."
        )
    # pi0.5's state is text of any length, or unused.
    state = 0 if isinstance(cfg, Pi05Settings) else env.state_dim
    for what, size, most in (("actions", env.action_dim, model.action_dim), ("states", state, model.state_dim)):
        if size > most:
            problems.append(f"env '{env.name}' has {what} of {size} numbers, {cfg.model_type} takes {most} at most.")
    if cfg.delta_dims > min(env.action_dim, env.state_dim):
        problems.append(
            f"model.delta_dims={cfg.delta_dims}: env '{env.name}' has {env.action_dim} numbers in an action and "
            f"{env.state_dim} in its state."
        )
    return problems


def _folder(cfg: VlaSettings) -> Path:
    if cfg.path is None:
        raise ConfigError(f"model.path is not set. Use {PUBLIC_LAYOUT}. {TRY_NOW}")
    return resolve_asset(cfg.path)


def _folder_problems(cfg: VlaSettings) -> list[str]:
    try:
        folder = _folder(cfg)
        if not folder.is_dir():
            raise ConfigError(f"model.path: {folder} does not exist or is no folder. Use {PUBLIC_LAYOUT}.")
        read_folder(folder, cfg)
    except (ConfigError, CheckpointError) as error:
        return [str(error)]
    where = (
        ", which public checkpoints do not contain; copy that of the language model there (pi0, pi0.5: PaliGemma's; "
        "SmolVLA: SmolVLM2's)."
    )
    return [
        *contradictions(folder, cfg),
        *lacking(folder, tokenizer=where, adapted=cfg.uses_adapters),
    ]


FACTORY = VlaFactory()
PI05 = VlaFactory(settings=Pi05Settings)
