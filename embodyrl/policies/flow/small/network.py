"""Small flow network: convolutions, word embeddings, state, and an expert with time conditioning as in pi0.5."""

import math
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.policies.flow.layouts import HEADS
from embodyrl.policies.flow.small.config import NormalizationBounds, SmallConfig
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.folder import CONFIG_FILE, WEIGHTS_FILE
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.policies.vla.tokens import pad_right
from embodyrl.policies.weights import fill_weights
from embodyrl.types import FloatArray, Observation


@dataclass(frozen=True, slots=True)
class SmallFlowWeightIO:
    """Reader and writer of `model.safetensors` and `config.json`; implements `WeightIO`."""

    config: SmallConfig

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write weights and config into a folder."""
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE)
        self.config.save(folder)

    def load(self, module: nn.Module, folder: Path) -> None:
        """Read the weights of a folder into a module.

        Raises:
            CheckpointError: weights are missing, damaged or of another shape; the message names them.
        """
        fix = f"Use the {CONFIG_FILE} and the model settings of that run."
        fill_weights(module.state_dict(), folder / WEIGHTS_FILE, optional=HEADS, fix=fix)


POSITION_SCALE = 0.3
"""Scale of position embeddings relative to features with initial scale 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPrefix:
    """Prefix of N tokens: keys and values of each layer, [B, heads, N, W / heads], and the input of a value head."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    """[B, 1, 1, N + H] bool: attention mask of action tokens."""
    pooled: Tensor


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, heads, N, W / heads]."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


def _build_mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))


class EncoderBlock(nn.Module):
    """Pre-norm transformer block of the prefix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = _Attention(width, heads), _build_mlp(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map tokens [B, N, width] to the same shape."""
        x = x + self.attention.attend(*self.attention.project(self.norm1(x)), mask)
        return x + self.mlp(self.norm2(x))


class ExpertBlock(nn.Module):
    """Transformer block for action tokens; one attention layer covers the action tokens and the whole prefix.

    Unlike in pi0, every layer attends to the last layer of the prefix, because there are only two or three layers. Time
    sets scale, shift and gate of attention and MLP (adaptive norm, arXiv 2212.09748); initially all three are 0.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention, self.mlp = _Attention(width, heads), _build_mlp(width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, time: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Apply the block to action tokens x [B, H, width], with `time` [B, width] and the prefix's keys and values."""
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(time)[:, None].chunk(6, dim=2)
        q, k, v = self.attention.project(self.norm(x) * (1 + scale1) + shift1)
        keys_values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        x = x + (1 + gate1) * self.attention.attend(q, *keys_values, mask)
        return x + (1 + gate2) * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class InstructionAttention(nn.Module):
    """Network that locates what the instruction names in images, by spatial softmax (arXiv 1504.00702).

    The instruction scales and shifts the features (FiLM, arXiv 1709.07871); initially, features are unchanged.
    """

    def __init__(self, planes: tuple[int, ...], maps: int, width: int) -> None:
        super().__init__()
        self.halving = nn.ModuleList(_build_downsampling(a, b) for a, b in pairwise((3, *planes)))
        last = planes[-1]
        self.norm1, self.norm2 = nn.GroupNorm(8, last), nn.GroupNorm(8, last)
        self.between = nn.Conv2d(last, last, 3, 1, 1)
        self.film = nn.Linear(width, 4 * last)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.maps = nn.Conv2d(last, maps, 1)
        self.out = nn.Linear(2 * maps, width)

    def forward(self, pixels: Tensor, language: Tensor) -> Tensor:
        """Return a token [B, width] for an image [B, 3, h, w] in -1..1 and the mean word embedding [B, width]."""
        scale1, shift1, scale2, shift2 = self.film(language)[:, :, None, None].chunk(4, dim=1)
        grid = pixels
        for layer in self.halving:
            grid = layer(grid)
        grid = self.between(F.gelu(self.norm1(grid) * (1 + scale1) + shift1))
        maps = self.maps(F.gelu(self.norm2(grid) * (1 + scale2) + shift2))
        height, width = maps.shape[2:]
        # Softmax over locations: the expected location has a gradient towards bright parts of the map.
        attention = maps.flatten(2).softmax(2).unflatten(2, (height, width))
        row = (attention.sum(3) * torch.linspace(-1, 1, height, device=maps.device)).sum(2)
        column = (attention.sum(2) * torch.linspace(-1, 1, width, device=maps.device)).sum(2)
        return self.out(torch.cat([row, column], 1))


def _build_downsampling(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 5 if inputs == 3 else 3, 2, 2 if inputs == 3 else 1), nn.GELU())


class SmallFlow(nn.Module):
    """Small flow network of a `FlowModule`; implements `ActionScale`. Normalization bounds are saved as buffers."""

    action_low: Tensor
    action_high: Tensor
    state_low: Tensor
    state_high: Tensor

    def __init__(self, config: SmallConfig, shape: ChunkShape, bounds: NormalizationBounds, min_words: int) -> None:
        """Build the network with weights from torch's random generator.

        Args:
            config: sizes.
            shape: sizes of a chunk.
            bounds: bounds of actions and states.
            min_words: minimum padded width of instructions; longer instructions widen their batch.
        """
        super().__init__()
        self.config, self.shape = config, shape
        self.prefix_width = self.hidden_width = width = config.width
        self._min_words = min_words
        self.varying_mask = np.ones(shape.action_dim, np.float32)
        for name in ("action_low", "action_high", "state_low", "state_high"):
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(getattr(bounds, name))))
        if config.num_images:
            self.eye = InstructionAttention(config.planes, config.maps, width)
            self.camera = nn.Parameter(0.02 * torch.randn(config.num_images, width))
        if config.state_dim:
            self.state = nn.Linear(config.state_dim, width)
        self.word = nn.Embedding(config.vocabulary, width)
        self.encoder = nn.ModuleList(EncoderBlock(width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.memory = nn.Linear(width, 2 * width * config.layers)
        self.action_in = nn.Linear(shape.width, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.expert = nn.ModuleList(ExpertBlock(width, config.heads) for _ in range(config.layers))
        self.out_norm = nn.LayerNorm(width)
        self.action_out = nn.Linear(width, shape.width)

    def encode_prefix(self, obs: Observation) -> SmallPrefix:
        """Encode observations: instructions, images [B, C, h, w, 3] and unnormalized states [B, S]."""
        ids = to_device(self._hash_words(obs.instructions), self.action_in.weight.device)
        words, word_mask = self.word(ids), ids > 0
        token_groups = [words + _embed_positions(ids.shape[1], self.config.width, ids.device)]
        if self.config.num_images:
            # `word_mask` is never empty: an empty instruction is one unknown word.
            mean = (words * word_mask[..., None]).sum(1) / word_mask.sum(1, keepdim=True)
            token_groups.append(self._encode_images(obs, mean))
        if self.config.state_dim:
            state = to_device(np.ascontiguousarray(obs.state), ids.device)
            token_groups.append(self.state(self._normalize_state(state))[:, None])
        tokens = torch.cat(token_groups, 1)
        other_mask = torch.ones(len(ids), tokens.shape[1] - ids.shape[1], dtype=torch.bool, device=ids.device)
        token_mask = torch.cat([word_mask, other_mask], 1)[:, None, None]
        for block in self.encoder:
            tokens = block(tokens, token_mask)
        tokens = self.norm(tokens)
        keys_values = self.memory(tokens).unflatten(2, (2, self.config.layers, self.config.heads, -1))
        # Keys and values are computed once for all layers and steps of the expert, because no step changes them.
        keys, values = keys_values.permute(2, 3, 0, 4, 1, 5).unbind()
        mask = F.pad(token_mask, (0, self.shape.horizon), value=True)
        weights = token_mask[:, 0, 0, :, None] / token_mask.sum(3, keepdim=True)[:, 0]
        pooled = (tokens * weights).sum(1)
        return SmallPrefix(keys=keys.unbind(), values=values.unbind(), mask=mask, pooled=pooled)

    def velocity(self, prefix: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity and the hidden states of the action tokens (see `FlowModule`)."""
        width = self.config.width
        tokens = self.action_in(x) + _embed_positions(x.shape[1], width, x.device)
        time = self.time(_embed_times(t, width))
        for block, keys, values in zip(self.expert, prefix.keys, prefix.values, strict=True):
            tokens = block(tokens, time, keys, values, prefix.mask)
        hidden = self.out_norm(tokens)
        return self.action_out(hidden), hidden

    def to_actions(self, x: FloatArray, obs: Observation) -> FloatArray:
        """Convert flow outputs to environment actions, both [B, K, A]; constant dimensions keep their value."""
        low, high = self.action_low.cpu().numpy(), self.action_high.cpu().numpy()
        return low + 0.5 * (x + 1.0) * (high - low)

    def from_actions(self, actions: FloatArray, obs: Observation) -> FloatArray:
        """Convert environment actions to flow targets in -1..1 (clipped), both [B, K, A]; 0 for constant dimensions."""
        low, high = self.action_low.cpu().numpy(), self.action_high.cpu().numpy()
        targets = 2.0 * (actions - low) / np.maximum(high - low, 1e-6) - 1.0
        return np.where(high > low, np.clip(targets, -1.0, 1.0), 0.0).astype(np.float32)

    def _normalize_state(self, state: Tensor) -> Tensor:
        """Scale states [B, S] so that the data range becomes -1..1, and clip to -2..2; constant dimensions become 0."""
        span = self.state_high - self.state_low
        scaled = 2.0 * (state - self.state_low) / span.clamp(min=1e-6) - 1.0
        return torch.where(span > 0, scaled.clamp(-2.0, 2.0), torch.zeros_like(scaled))

    def _encode_images(self, obs: Observation, language: Tensor) -> Tensor:
        images = to_device(np.ascontiguousarray(obs.images[:, : self.config.num_images]), language.device)
        pixels = images.permute(0, 1, 4, 2, 3).flatten(0, 1).float() / 127.5 - 1.0
        instruction_rows = language.repeat_interleave(self.config.num_images, dim=0)
        return self.eye(pixels, instruction_rows).unflatten(0, (len(obs), -1)) + self.camera

    def _hash_words(self, instructions: tuple[str, ...]) -> np.ndarray:
        """Return indices of words [B, N], padded with 0; an empty instruction is one unknown word, index 1."""
        word_rows = [
            [1 + zlib.crc32(w.encode()) % (self.config.vocabulary - 1) for w in text.lower().split()] or [1]
            for text in instructions
        ]
        return pad_right(word_rows, max(self._min_words, *map(len, word_rows)))


def _embed_positions(count: int, width: int, device: torch.device) -> Tensor:
    """Return sinusoidal position embeddings [count, width] (arXiv 1706.03762), scaled down."""
    position = torch.arange(count, device=device)[:, None]
    angle = position * torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(1e4) / width))
    return POSITION_SCALE * torch.cat([angle.sin(), angle.cos()], 1)


def _embed_times(t: Tensor, width: int) -> Tensor:
    """Return sinusoidal embeddings [B, width] of times [B], with geometric periods from 0.004 to 4 (openpi)."""
    fraction = torch.linspace(0, 1, width // 2, device=t.device)
    angle = t[:, None] * (2 * math.pi / (4e-3 * (4.0 / 4e-3) ** fraction))
    return torch.cat([angle.sin(), angle.cos()], -1)
