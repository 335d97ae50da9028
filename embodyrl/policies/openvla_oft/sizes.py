"""What a model weighs, from its sizes alone: parameters, those of adapters, and activations; imports nothing heavy."""

from collections.abc import Iterator
from typing import NamedTuple

from embodyrl.policies.openvla_oft.config import VALUE_HIDDEN, OftConfig, OftOptions

PROMPT_TOKENS = 40
"""Tokens of an instruction in its template, about."""


class Linear(NamedTuple):
    """So many linear layers (or patch embeddings) of one size."""

    count: int
    inputs: int
    outputs: int
    bias: bool = True

    @property
    def parameters(self) -> int:
        """Weights and biases of all of them."""
        return self.count * (self.inputs + self.bias) * self.outputs


def body_layers(config: OftConfig, *, in_use: bool = False) -> Iterator[Linear]:
    """Layers of vision towers, projector and language model; `in_use`: only those that the output depends on."""
    for vit in config.towers:
        width, hidden, pool = vit.width, vit.mlp_hidden, int(vit.attn_pool and not in_use)
        depth = vit.depth - in_use  # features are those of the last but one block
        yield Linear(1, 3 * vit.patch_size**2, width)
        yield Linear(depth, width, 3 * width)
        yield Linear(depth + 2 * pool, width, width)
        yield Linear(pool, width, 2 * width)
        yield Linear(depth + pool, width, hidden)
        yield Linear(depth + pool, hidden, width)
    llama, vision = config.llama, sum(vit.width for vit in config.towers)
    width, hidden, depth = llama.hidden_size, llama.intermediate_size, llama.num_hidden_layers
    yield Linear(1, vision, 4 * vision)
    yield Linear(1, 4 * vision, width)
    yield Linear(1, width, width)
    yield Linear(4 * depth, width, width, bias=False)
    yield Linear(2 * depth, width, hidden, bias=False)
    yield Linear(depth, hidden, width, bias=False)
    yield Linear(1, width, llama.vocab_size, bias=False)


def head_layers(config: OftConfig, options: OftOptions) -> Iterator[Linear]:
    """Layers of the heads and projectors that the options ask for."""
    width, state, values = config.llama.hidden_size, options.state_dim, options.value_dim
    if state:
        yield from (Linear(1, state, width), Linear(1, width, width))
    if options.use_film:
        yield from (Linear(2 * vit.depth, width, vit.width) for vit in config.towers)
    if options.action_head != "discrete":
        rows = options.action_dim * width
        yield from (Linear(1, rows, width), Linear(2, width, width), Linear(1, width, options.action_dim))
    if options.action_head == "diffusion":
        yield from (Linear(1, 1, width), Linear(1, width, width))
    if options.action_head == "l1":
        yield Linear(1, 1, options.action_dim, bias=False)  # the deviations
    if values:
        first, second = VALUE_HIDDEN
        yield from (Linear(1, width, first), Linear(1, first, second), Linear(1, second, values, bias=False))


def head_parameters(config: OftConfig, options: OftOptions) -> int:
    """Parameters of all heads and projectors, which are trained in full beside adapters."""
    total = sum(layer.parameters for layer in head_layers(config, options))
    if options.action_head != "discrete":  # the norms before the first layer, in two blocks, and before the last one
        total += 2 * config.llama.hidden_size * (options.action_dim + 3)
    return total


def count_parameters(config: OftConfig, options: OftOptions) -> int:
    """Parameters of the model with all its heads and projectors, adapters excluded."""
    llama = config.llama
    total = sum(layer.parameters for layer in body_layers(config)) + head_parameters(config, options)
    total += llama.hidden_size * (llama.vocab_size + 2 * llama.num_hidden_layers + 1)  # embeddings and norms
    for vit in config.towers:
        per_block = 4 + 2 * vit.layer_scale  # two norms of two vectors, two scales
        vectors = vit.depth * per_block + 2 + vit.num_patches + vit.num_prefix + 3 * vit.attn_pool
        total += vit.width * vectors
    return total


def adapter_parameters(config: OftConfig, rank: int) -> int:
    """Trained parameters of adapters on all layers: an upper bound for those with targets of their own."""
    return rank * sum(layer.count * (layer.inputs + layer.outputs) for layer in body_layers(config, in_use=True))


def activation_bytes(config: OftConfig, *, images: int, tokens_per_chunk: int, recompute: bool = False) -> int:
    """Bytes that one sample's forward pass keeps for its backward pass.

    Per token and layer: 10 vectors of the width and 4 of the MLP in a Llama layer, 8 and 2 in a ViT block; with
    recomputation the layers' inputs, and all of the largest layer.
    """
    llama, towers = config.llama, config.towers
    tokens = images * max(vit.num_patches for vit in towers) + PROMPT_TOKENS + tokens_per_chunk
    layer = tokens * (10 * llama.hidden_size + 4 * llama.intermediate_size)
    blocks = [images * vit.num_patches * (8 * vit.width + 2 * vit.mlp_hidden) for vit in towers]
    if recompute:
        inputs = sum(vit.depth * images * vit.num_patches * vit.width for vit in towers)
        return 4 * (llama.num_hidden_layers * tokens * llama.hidden_size + inputs + max(layer, *blocks))
    return 4 * (llama.num_hidden_layers * layer + sum(v.depth * b for v, b in zip(towers, blocks, strict=True)))
