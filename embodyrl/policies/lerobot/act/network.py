"""The action chunking transformer (ACT, arXiv 2304.13705), with LeRobot's weight names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.lerobot.act.config import ActConfig
from embodyrl.policies.lerobot.normalization import Inputs
from embodyrl.policies.lerobot.resnet import FrozenBatchNorm, build_resnet_parts
from embodyrl.policies.lerobot.resnet_sizes import count_last_channels

TEMPERATURE = 10_000.0
POSITION_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Encoder inputs of B observations: N tokens, including the latent token that `Act.encode` adds first."""

    content: Tensor
    """[N - 1, B, D] token embeddings, without the latent token."""
    positions: Tensor
    """[N, 1, D] position embeddings, including that of the latent token."""


class Posterior(NamedTuple):
    """Gaussian posterior of the VAE latent, given the actions."""

    mean: Tensor
    """[B, Z] mean of the latent."""
    log_variance: Tensor
    """[B, Z] log-variance of the latent."""

    def divergence(self) -> Tensor:
        """Return the KL divergence [B] from the standard normal distribution, summed over the latent dimensions."""
        return -0.5 * (1 + self.log_variance - self.mean.square() - self.log_variance.exp()).sum(1)


class _FeedForward(nn.Module):
    """Base class of encoder and decoder layers: two linear layers, dropout, and pre-norm or post-norm."""

    def __init__(self, config: ActConfig, norms: int) -> None:
        super().__init__()
        width, hidden = config.dim_model, config.dim_feedforward
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(config.dropout)
        for index in range(1, norms + 1):
            self.add_module(f"norm{index}", nn.LayerNorm(width))
            self.add_module(f"dropout{index}", nn.Dropout(config.dropout))
        self._activate = F.gelu if config.feedforward_activation == "gelu" else F.relu
        self._pre_norm = config.pre_norm

    def feed_forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, B, D] to the same shape."""
        return self.linear2(self.dropout(self._activate(self.linear1(x))))

    def apply_residual(self, x: Tensor, index: int, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x + inner(x), with the norm before `inner` (pre-norm) or after the sum."""
        norm, dropout = getattr(self, f"norm{index}"), getattr(self, f"dropout{index}")
        if self._pre_norm:
            return x + dropout(inner(norm(x)))
        return norm(x + dropout(inner(x)))


class EncoderLayer(_FeedForward):
    """Encoder layer: self-attention and a feed-forward network."""

    def __init__(self, config: ActConfig) -> None:
        super().__init__(config, 2)
        self.self_attn = nn.MultiheadAttention(config.dim_model, config.n_heads, dropout=config.dropout)

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor | None) -> Tensor:
        """Map tokens [N, B, D] to the same shape; `padding` [B, N] is True for ignored tokens.

        Positions are added to queries and keys.
        """

        def attend(tokens: Tensor) -> Tensor:
            tokens_with_positions = tokens + positions
            return self.self_attn(
                tokens_with_positions, tokens_with_positions, tokens, key_padding_mask=padding, need_weights=False
            )[0]

        return self.apply_residual(self.apply_residual(x, 1, attend), 2, self.feed_forward)


class Encoder(nn.Module):
    """Encoder layers, with a final norm if layers are pre-norm."""

    def __init__(self, config: ActConfig, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(layers))
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor | None = None) -> Tensor:
        """Apply all layers to tokens [N, B, D] (see `EncoderLayer`)."""
        for layer in self.layers:
            x = layer(x, positions, padding)
        return self.norm(x)


class DecoderLayer(_FeedForward):
    """Decoder layer: self-attention of the queries, attention to the encoder's output, and a feed-forward network."""

    def __init__(self, config: ActConfig) -> None:
        super().__init__(config, 3)
        self.self_attn = nn.MultiheadAttention(config.dim_model, config.n_heads, dropout=config.dropout)
        self.multihead_attn = nn.MultiheadAttention(config.dim_model, config.n_heads, dropout=config.dropout)

    def forward(self, x: Tensor, encoded: Tensor, positions: Tensor, encoded_positions: Tensor) -> Tensor:
        """Map queries x [H, B, D] to the same shape.

        `encoded` [N, B, D] is the encoder's output. `positions` [H, 1, D] and `encoded_positions` are the position
        embeddings of queries and output.
        """

        def attend(queries: Tensor) -> Tensor:
            tokens_with_positions = queries + positions
            return self.self_attn(tokens_with_positions, tokens_with_positions, queries, need_weights=False)[0]

        def cross_attend(queries: Tensor) -> Tensor:
            keys = encoded + encoded_positions
            return self.multihead_attn(queries + positions, keys, encoded, need_weights=False)[0]

        return self.apply_residual(
            self.apply_residual(self.apply_residual(x, 1, attend), 2, cross_attend), 3, self.feed_forward
        )


class Decoder(nn.Module):
    """Decoder layers and a final norm."""

    def __init__(self, config: ActConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_decoder_layers))
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(self, x: Tensor, encoded: Tensor, positions: Tensor, encoded_positions: Tensor) -> Tensor:
        """Apply all layers to queries [H, B, D] (see `DecoderLayer`)."""
        for layer in self.layers:
            x = layer(x, encoded, positions, encoded_positions)
        return self.norm(x)


class Act(nn.Module):
    """Network of an ACT policy: a transformer, and the VAE encoder for training."""

    vae_encoder_pos_enc: Tensor

    def __init__(self, config: ActConfig) -> None:
        super().__init__()
        self.config = config
        width, state, actions = config.dim_model, config.state_dim, config.action_dim
        if config.use_vae:
            self.vae_encoder = Encoder(config, config.n_vae_encoder_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state, width)
            self.vae_encoder_action_input_proj = nn.Linear(actions, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * config.latent_dim)
            table = build_position_table(1 + bool(state) + config.chunk_size, width)
            self.register_buffer("vae_encoder_pos_enc", table[None])
        if config.cameras:
            dilated = config.replace_final_stride_with_dilation
            parts = build_resnet_parts(config.vision_backbone, FrozenBatchNorm, dilated=dilated)
            self.backbone = nn.Sequential(parts)
        self.encoder, self.decoder = Encoder(config, config.n_encoder_layers), Decoder(config)
        if state:
            self.encoder_robot_state_input_proj = nn.Linear(state, width)
        if config.environment_dim:
            self.encoder_env_state_input_proj = nn.Linear(config.environment_dim, width)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, width)
        if config.cameras:
            self.encoder_img_feat_input_proj = nn.Conv2d(count_last_channels(config.vision_backbone), width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + bool(state) + bool(config.environment_dim), width)
        self.decoder_pos_embed = nn.Embedding(config.chunk_size, width)
        self.action_head = nn.Linear(width, actions)
        for parameter in chain(self.encoder.parameters(), self.decoder.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def embed(self, inputs: Inputs) -> Tokens:
        """Convert normalized observations to tokens: robot state, environment state, and pixels of the feature maps."""
        tokens, positions = [], [*self.encoder_1d_feature_pos_embed.weight[:, None]]
        if inputs.state is not None:
            tokens.append(self.encoder_robot_state_input_proj(inputs.state[:, 0]))
        if inputs.environment is not None:
            tokens.append(self.encoder_env_state_input_proj(inputs.environment[:, 0]))
        if inputs.images is not None:
            for images in inputs.images[:, 0].unbind(1):
                grid = self.backbone(images)
                positions += [*build_grid_positions(grid, self.config.dim_model // 2).flatten(2).permute(2, 0, 1)]
                tokens += [*self.encoder_img_feat_input_proj(grid).flatten(2).permute(2, 0, 1)]
        return Tokens(content=torch.stack(tokens), positions=torch.stack(positions))

    def encode(self, tokens: Tokens, latent: Tensor) -> Tensor:
        """Return the encoder's output [N, B, D] for latents [B, Z]."""
        first = self.encoder_latent_input_proj(latent)[None]
        return self.encoder(torch.cat([first, tokens.content]), tokens.positions)

    def decode(self, tokens: Tokens, encoded: Tensor) -> Tensor:
        """Return chunks [B, H, A] of normalized actions for the encoder's output [N, B, D]."""
        queries = encoded.new_zeros(self.config.chunk_size, encoded.shape[1], encoded.shape[2])
        hidden = self.decoder(queries, encoded, self.decoder_pos_embed.weight[:, None], tokens.positions)
        return self.action_head(hidden.transpose(0, 1))

    def posterior(self, inputs: Inputs, actions: Tensor, padding: Tensor) -> Posterior:
        """Return the latent's posterior for normalized actions [B, H, A]; `padding` [B, H] marks padded actions."""
        parts = [self.vae_encoder_cls_embed.weight[None].expand(len(actions), -1, -1)]
        if inputs.state is not None:
            parts.append(self.vae_encoder_robot_state_input_proj(inputs.state[:, :1]))
        vae_tokens = torch.cat([*parts, self.vae_encoder_action_input_proj(actions)], 1).transpose(0, 1)
        mask = F.pad(padding, (len(parts), 0), value=False)
        first = self.vae_encoder(vae_tokens, self.vae_encoder_pos_enc.transpose(0, 1), mask)[0]
        mean, log_variance = self.vae_encoder_latent_output_proj(first).chunk(2, 1)
        return Posterior(mean, log_variance)


def build_position_table(count: int, width: int) -> Tensor:
    """Return sinusoidal position embeddings [count, D] (arXiv 1706.03762): sines at even, cosines at odd indices."""
    index = torch.arange(width, dtype=torch.float64)
    angle = torch.arange(count, dtype=torch.float64)[:, None] / TEMPERATURE ** (2 * (index // 2) / width)
    return torch.where(index % 2 == 0, angle.sin(), angle.cos()).float()


def build_grid_positions(grid: Tensor, half: int) -> Tensor:
    """Return position embeddings [1, 2 half, H, W] of a feature map [B, C, H, W] (DETR, arXiv 2005.12872).

    The first half of the channels encodes rows, the second half columns.
    """
    height, width = grid.shape[2:]
    device = grid.device
    rows, columns = (
        torch.arange(1, size + 1, dtype=torch.float32, device=device) / (size + POSITION_EPS) * (2 * math.pi)
        for size in (height, width)
    )
    index = torch.arange(half, dtype=torch.float32, device=device)
    period = TEMPERATURE ** (2 * (index // 2) / half)
    row_positions, column_positions = (
        _interleave_sin_cos(positions[:, None] / period) for positions in (rows, columns)
    )
    grid_positions = [row_positions[:, None].expand(-1, width, -1), column_positions[None].expand(height, -1, -1)]
    return torch.cat(grid_positions, 2).permute(2, 0, 1)[None].to(grid.dtype)


def _interleave_sin_cos(angle: Tensor) -> Tensor:
    """Return the sine of even and the cosine of odd columns of `angle`, interleaved."""
    return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], 2).flatten(1)
