"""OpenVLA-OFT and OpenVLA: factories and memory estimates. Importing this package does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.openvla_oft.config import (
    VALUE_HIDDEN,
    OftConfig,
    OftOptions,
    read_config,
)
from embodyrl.policies.openvla_oft.settings import (
    ActionHead,
    OftSettings,
    OpenVlaSettings,
    as_oft,
    correction_of,
    record_of,
)
from embodyrl.policies.protocol import Policy, PolicyRequest, seen_problems
from embodyrl.policies.settings import WARMUP_STEPS
from embodyrl.policies.steering.settings import SteeringShape, steered
from embodyrl.policies.vla.adapter import adapter_problems, lora_spec
from embodyrl.policies.vla.folder import CONFIG_FILE, lacking
from embodyrl.types import EnvSpec, GripperConvention, PolicySpec

PROMPT_TOKENS = 40
"""Approximate number of tokens of an instruction in its template."""


class Linear(NamedTuple):
    """A number of linear layers (or patch embeddings) of one size."""

    count: int
    inputs: int
    outputs: int
    bias: bool = True

    @property
    def parameters(self) -> int:
        """Weights and biases of all of them."""
        return self.count * (self.inputs + self.bias) * self.outputs


def body_layers(config: OftConfig, *, in_use: bool = False) -> Iterator[Linear]:
    """Yield the layers of vision towers, projector and language model; `in_use`: only those that affect the output."""
    yield from _vision_layers(config, in_use=in_use)
    yield from _language_layers(config)
    yield Linear(1, config.llama.hidden_size, config.llama.vocab_size, bias=False)


def _vision_layers(config: OftConfig, *, in_use: bool) -> Iterator[Linear]:
    for vit in config.towers:
        width, hidden, pool = vit.width, vit.mlp_hidden, int(vit.attn_pool and not in_use)
        depth = vit.depth - in_use  # features are those of the second to last block
        yield Linear(1, 3 * vit.patch_size**2, width)
        yield Linear(depth, width, 3 * width)
        yield Linear(depth + 2 * pool, width, width)
        yield Linear(pool, width, 2 * width)
        yield Linear(depth + pool, width, hidden)
        yield Linear(depth + pool, hidden, width)
    yield from _projector_layers(config)


def _projector_layers(config: OftConfig) -> Iterator[Linear]:
    vision, width = sum(vit.width for vit in config.towers), config.llama.hidden_size
    yield Linear(1, vision, 4 * vision)
    yield Linear(1, 4 * vision, width)
    yield Linear(1, width, width)


def _language_layers(config: OftConfig) -> Iterator[Linear]:
    llama = config.llama
    width, hidden, depth = llama.hidden_size, llama.intermediate_size, llama.num_hidden_layers
    yield Linear(4 * depth, width, width, bias=False)
    yield Linear(2 * depth, width, hidden, bias=False)
    yield Linear(depth, hidden, width, bias=False)


def layer_parameters(config: OftConfig) -> int:
    """Return the number of parameters of a layer of the language model."""
    layers = _language_layers(config)
    return sum(layer.parameters for layer in layers) // max(1, config.llama.num_hidden_layers)


def outside_parameters(config: OftConfig, options: OftOptions) -> int:
    """Return the number of parameters of embeddings, output matrix, projectors and heads."""
    vocabulary = 2 * config.llama.hidden_size * config.llama.vocab_size
    return vocabulary + sum(x.parameters for x in _projector_layers(config)) + head_parameters(config, options)


def head_layers(config: OftConfig, options: OftOptions) -> Iterator[Linear]:
    """Yield the layers of the heads and projectors of the options."""
    width, state, values = config.llama.hidden_size, options.state_dim, options.value_dim
    if state:
        yield from (Linear(1, state, width), Linear(1, width, width))
    if options.cfg.use_film:
        yield from (Linear(2 * vit.depth, width, vit.width) for vit in config.towers)
    if options.cfg.action_head != "discrete":
        rows = options.cfg.action_dim * width
        yield from (Linear(1, rows, width), Linear(2, width, width), Linear(1, width, options.cfg.action_dim))
    if options.cfg.action_head == ActionHead.diffusion:
        yield from (Linear(1, 1, width), Linear(1, width, width))
    if options.cfg.action_head == "l1":
        yield Linear(1, 1, options.cfg.action_dim, bias=False)  # the deviations
    yield from value_layers(config, values)


def value_layers(config: OftConfig, values: int) -> Iterator[Linear]:
    """Yield the layers of the value head; none without values."""
    if values:
        first, second = VALUE_HIDDEN
        yield Linear(1, config.llama.hidden_size, first)
        yield from (Linear(1, first, second), Linear(1, second, values, bias=False))


def head_parameters(config: OftConfig, options: OftOptions) -> int:
    """Return the number of parameters of all heads and projectors, which are fully trained next to adapters."""
    total = sum(layer.parameters for layer in head_layers(config, options))
    if options.cfg.action_head != "discrete":
        # Norms before the first layer, in two blocks, and before the last layer.
        total += 2 * config.llama.hidden_size * (options.cfg.action_dim + 3)
    return total


def count_parameters(config: OftConfig, options: OftOptions) -> int:
    """Return the number of parameters of the model with all heads and projectors, without adapters."""
    llama = config.llama
    total = sum(layer.parameters for layer in body_layers(config)) + head_parameters(config, options)
    total += llama.hidden_size * (llama.vocab_size + 2 * llama.num_hidden_layers + 1)  # embeddings and norms
    for vit in config.towers:
        per_block = 4 + 2 * vit.layer_scale  # two norms of two vectors, two scales
        vectors = vit.depth * per_block + 2 + vit.num_patches + vit.num_prefix + 3 * vit.attn_pool
        total += vit.width * vectors
    return total


def adapter_parameters(config: OftConfig, rank: int) -> int:
    """Return the number of parameters of adapters on all layers: an upper bound for selected targets."""
    return rank * sum(layer.count * (layer.inputs + layer.outputs) for layer in body_layers(config, in_use=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """Bytes and FLOPs of one sample in a precision."""

    kept: int
    """Stored by a forward pass for its backward pass."""
    recomputed: int
    """The same with recomputed layers: their inputs."""
    layer: int
    """Stored by the largest layer while it is recomputed."""
    acting: int
    """Maximum without gradients."""
    flops: float
    """FLOPs of the forward pass."""


def sample_size(config: OftConfig, *, images: int, tokens_per_chunk: int, half: bool, adapters: bool) -> SampleSize:
    """Return the memory and FLOPs of one sample, counted tensor by tensor.

    Bytes that a layer stores per token, with width D and MLP width M (`tests/fakegpu` measures the same sums):

    * float32: 10 D + 4 M numbers in a Llama layer, 8 D + 2 M in a ViT block.
    * bfloat16, adapters: the residual stream is bfloat16. Two inputs of norms and their outputs, queries, keys, values
      and the attention output; gate, SiLU, up and product.
    * bfloat16, all trained: the stream is float32, and autocast copies a norm's output for each linear layer.
    """
    llama, towers = config.llama, config.towers
    tokens = images * max(vit.num_patches for vit in towers) + PROMPT_TOKENS + tokens_per_chunk
    d, m = llama.hidden_size, llama.intermediate_size
    per_token, stream = (16 * d + 8 * m, 2) if adapters else (30 * d + 8 * m, 4)
    if not half:
        per_token, stream = 4 * (10 * d + 4 * m), 4
    blocks = []
    for vit in towers:
        w, hidden = vit.width, vit.mlp_hidden
        block = (16 * w + 4 * hidden) if adapters else (24 * w + 4 * hidden)
        blocks.append(images * (vit.num_patches + vit.num_prefix) * (block if half else 4 * (8 * w + 2 * hidden)))
    inputs = sum(stream * v.depth * images * (v.num_patches + v.num_prefix) * v.width for v in towers)
    weights = sum(layer.count * layer.inputs * layer.outputs for layer in _language_layers(config))
    seen = sum(layer.count * layer.inputs * layer.outputs for layer in _vision_layers(config, in_use=True))
    attention = 2 * tokens**2 * d * llama.num_hidden_layers
    return SampleSize(
        kept=llama.num_hidden_layers * tokens * per_token
        + sum((v.depth - 1) * b for v, b in zip(towers, blocks, strict=True)),
        recomputed=llama.num_hidden_layers * tokens * stream * d + inputs,
        # And equally many gradients: of gate, SiLU, up, product and the inputs of the adapters or weights.
        layer=max(tokens * (per_token + 12 * m * (1 if half else 2)), *blocks),
        # Gate, SiLU, up and product; embeddings, stream, a norm's output and the tables of positions.
        acting=tokens * ((8 * m + 3 * d) * (1 if half else 2) + 2 * stream * d),
        flops=2.0 * (tokens * weights + images * towers[0].num_patches * seen) + 2.0 * attention,
    )


TRY_NOW = "To try things without a download, use model=openvla_oft_tiny."
PUBLIC_LAYOUT = (
    "a local folder, or owner/name on the hub, "
    "in the public OpenVLA-OFT layout (config.json, preprocessor_config.json, tokenizer.json, "
    "dataset_statistics.json, model*.safetensors)"
)
NO_PATH = (
    f"model.path is not set. Set it to {PUBLIC_LAYOUT}. Suitable checkpoints have discrete action tokens: "
    "Haozhan72/Openvla-oft-SFT-libero-{spatial,object,goal}-traj1, -libero10-traj1, -libero10-trajall, or "
    "RLinf/RLinf-OpenVLAOFT-LIBERO-130 and -LIBERO-130-Base-Lora (set its adapter with model.lora.path), or L1 "
    "regression (moojink/openvla-7b-oft-finetuned-libero-*) with model=openvla_oft_official. "
    f"{TRY_NOW}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaOftFactory:
    """Builds policies of any size; implements `PolicyFactory`."""

    settings: type[OpenVlaSettings] = OftSettings
    """Keys below `model`."""
    autoregressive: bool = False
    """OpenVLA: one action per inference, token by token; False: OpenVLA-OFT, a whole chunk in parallel."""

    def validate(self, cfg: OpenVlaSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        cfg = as_oft(cfg)
        problems = []
        if self.autoregressive and cfg.num_action_chunks != 1:
            problems.append(
                f"model.num_action_chunks is {cfg.num_action_chunks}; OpenVLA predicts one action per inference, set "
                f"it to 1."
            )
        return problems + _training_problems(cfg) + _folder_problems(cfg)

    def spec(self, cfg: OpenVlaSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy from the checkpoint's JSON files.

        Raises:
            ConfigError: the checkpoint and the environment do not fit.
            CheckpointError: a JSON file is missing or malformed.
        """
        cfg = as_oft(cfg)
        config = read_config(_folder(cfg))
        if problems := _mismatches(cfg, config, env):
            raise ConfigError(problems)
        options = self._options(cfg, env, value_dim)
        tokens, images = options.num_action_tokens, cfg.num_images_in_input
        diffuses = cfg.action_head == ActionHead.diffusion
        passes = cfg.num_diffusion_steps_inference if diffuses and (cfg.every_step or cfg.corrects) else 1
        size = sample_size(config, images=images, tokens_per_chunk=tokens, half=cfg.half, adapters=cfg.is_lora)
        spec = PolicySpec(
            reads_instructions=True,
            name="openvla" if self.autoregressive else "openvla_oft",
            num_action_chunks=cfg.num_action_chunks,
            action_dim=cfg.action_dim,
            tokens_per_chunk=record_of(cfg).tokens if diffuses or cfg.corrects else tokens,
            scored=record_of(cfg).per_action if diffuses else 0,
            value_dim=value_dim,
            num_images=images,
            uses_state=cfg.use_proprio,
            turns_images=True,
            gripper=GripperConvention(open=1.0, closed=0.0),
            num_parameters=count_parameters(config, options),
            num_trained=_trained(config, options) if cfg.is_lora else None,
            # A frozen model stores nothing for the backward pass.
            activation_bytes=size.acting if cfg.corrects else passes * size.kept,
            recomputed_bytes=size.acting if cfg.corrects else passes * size.recomputed,
            largest_layer=(layer_parameters(config), size.layer),
            outside_layers=outside_parameters(config, options),
            acting_bytes=size.acting,
            forward_flops=passes * size.flops,
            act_passes=cfg.action_dim if self.autoregressive else passes,
            warmup_steps=WARMUP_STEPS if diffuses or cfg.corrects else 0,
        )
        if not cfg.corrects:
            return spec
        learns, shape = sum(layer.parameters for layer in value_layers(config, value_dim)), _correction(cfg)
        shape.check(config.folder)
        return steered(spec, shape, cfg.likelihood, beside=learns)

    def compare(self, cfg: OpenVlaSettings, env: EnvSpec, folder: Path) -> None:
        """Compare sizes, and the actor on the model (see `ComparesWeights`)."""
        cfg, saved = as_oft(cfg), read_config(folder)
        mine = read_config(_folder(cfg))
        if (saved.towers, saved.llama) != (mine.towers, mine.llama):
            raise CheckpointError(f"{folder} contains a model of another size than model.path={cfg.path}.")
        if not cfg.use_proprio and any(folder.glob("*proprio_projector*")):
            raise CheckpointError(
                f"{folder} was trained with proprioception (it has a proprio_projector). Fix: set "
                f"model.use_proprio=true."
            )
        if cfg.corrects:
            _correction(cfg).check(folder)

    def build(self, cfg: OpenVlaSettings, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`.

        Raises:
            CheckpointError: a file is missing, truncated or does not fit.
        """
        from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy

        cfg = as_oft(cfg)
        spec = self.spec(cfg, request.env, request.value_dim)
        options = self._options(cfg, request.env, request.value_dim)
        if cfg.corrects:
            from embodyrl.policies.openvla_oft.residual import ResidualOftPolicy

            return ResidualOftPolicy(read_config(_folder(cfg)), spec, options, request)
        return OpenVlaOftPolicy(read_config(_folder(cfg)), spec, options, request)

    def _options(self, cfg: OftSettings, env: EnvSpec, value_dim: int) -> OftOptions:
        state_dim = env.state_dim if cfg.use_proprio else 0
        return OftOptions(cfg=cfg, autoregressive=self.autoregressive, state_dim=state_dim, value_dim=value_dim)


def _correction(cfg: OftSettings) -> SteeringShape:
    return correction_of(cfg, read_config(_folder(cfg)).llama.hidden_size)


def _trained(config: OftConfig, options: OftOptions) -> int:
    return adapter_parameters(config, lora_spec(options.cfg).r) + head_parameters(config, options)


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
                f"dimensions, but env '{env.name}' gives {env.state_dim}; set another unnorm_key, or use_proprio=false."
            )
    return problems


def _training_problems(cfg: OftSettings) -> list[str]:
    """Return errors of adapter keys: keys without effect, and missing adapters."""
    problems = adapter_problems(cfg)
    if cfg.is_lora and cfg.use_film:
        problems.append("model.use_film=true supports evaluation only; set model.is_lora=false (see model.lora.path).")
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
        return [f"model.path: {folder} is not a folder. Set it to {PUBLIC_LAYOUT}. {TRY_NOW}"]
    if not (folder / CONFIG_FILE).exists():
        return [f"model.path: {folder} has no {CONFIG_FILE}. Use {PUBLIC_LAYOUT}. {TRY_NOW}"]
    try:
        statistics = read_config(folder).statistics
        if cfg.unnorm_key:
            statistics.find(cfg.unnorm_key)
    except CheckpointError as error:
        return [f"model.path: {error}"]
    problems = [*lacking(folder, tokenizer="; download the whole repository again.", adapted=cfg.uses_adapters)]
    if cfg.action_head == "discrete" and any(folder.glob("action_head--*checkpoint.pt")):
        problems.append(
            f"model.path: {folder} contains a continuous action head (L1 or diffusion), so its language model was not "
            f"trained on action tokens. Set model.action_head=l1 or diffusion, or use a checkpoint with discrete "
            f"tokens."
        )
    return problems


FACTORY = OpenVlaOftFactory()
OPENVLA = OpenVlaOftFactory(settings=OpenVlaSettings, autoregressive=True)
