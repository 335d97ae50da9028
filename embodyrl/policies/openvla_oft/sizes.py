"""Parameters, memory and work of OpenVLA-OFT, from its config files. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from embodyrl.policies.openvla_oft.config import VALUE_HIDDEN, OftConfig, OftOptions
from embodyrl.policies.openvla_oft.settings import ActionHead
from embodyrl.policies.vla.adapter import lora_spec
from embodyrl.types import PolicyCosts

PROMPT_TOKENS = 40
"""Approximate number of tokens of an instruction in its template."""


class Linear(NamedTuple):
    """Several linear layers (or patch embeddings) of one size."""

    count: int
    inputs: int
    outputs: int
    bias: bool = True

    @property
    def parameters(self) -> int:
        """Number of weights and biases of all layers."""
        return self.count * (self.inputs + self.bias) * self.outputs


def body_layers(config: OftConfig, *, in_use: bool = False) -> Iterator[Linear]:
    """Yield the layers of vision towers, projector and language model; `in_use`: only layers that affect the output."""
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
    """Bytes stored by a forward pass for its backward pass."""
    recomputed: int
    """Bytes stored with recomputed layers: their inputs."""
    layer: int
    """Bytes stored by the largest layer while it is recomputed."""
    acting: int
    """Maximum bytes without gradients."""
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


def oft_costs(config: OftConfig, options: OftOptions) -> PolicyCosts:
    """Estimate size, memory and work of a model with the heads of `options`."""
    cfg, images, tokens = options.cfg, options.cfg.num_images_in_input, options.num_action_tokens
    repeated = cfg.action_head == ActionHead.diffusion and (cfg.every_step or cfg.corrects)
    passes = cfg.num_diffusion_steps_inference if repeated else 1
    size = sample_size(config, images=images, tokens_per_chunk=tokens, half=cfg.half, adapters=cfg.is_lora)
    trained = adapter_parameters(config, lora_spec(cfg).r) + head_parameters(config, options) if cfg.is_lora else None
    return PolicyCosts(
        num_parameters=count_parameters(config, options),
        num_trained=trained,
        # A frozen model stores no activations for backward.
        activation_bytes=size.acting if cfg.corrects else passes * size.kept,
        recomputed_bytes=size.acting if cfg.corrects else passes * size.recomputed,
        largest_layer=(layer_parameters(config), size.layer),
        outside_layers=outside_parameters(config, options),
        acting_bytes=size.acting,
        forward_flops=passes * size.flops,
        act_passes=cfg.action_dim if options.autoregressive else passes,
    )
