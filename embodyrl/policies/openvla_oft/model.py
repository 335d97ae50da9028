"""OpenVLA-OFT with discrete actions: images and prompt in, the logits of a whole action chunk out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.openvla_oft.config import VALUE_HIDDEN, OftConfig
from embodyrl.policies.openvla_oft.llama import LanguageModel, RmsNorm
from embodyrl.policies.openvla_oft.vision import LayerScale, Projector, VisionBackbone


class ValueHead(nn.Module):
    """MLP from a hidden row to V value estimates, always in float32."""

    def __init__(self, width: int, value_dim: int) -> None:
        super().__init__()
        first, second = VALUE_HIDDEN
        self.mlp = nn.Sequential(
            nn.Linear(width, first),
            nn.GELU(),
            nn.Linear(first, second),
            nn.GELU(),
            nn.Linear(second, value_dim, bias=False),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, D] to [B, V]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.mlp(hidden.float())


class OpenVlaOft(nn.Module):
    """One model class for every size; parameter names are those of the public checkpoints."""

    def __init__(self, config: OftConfig, *, num_action_tokens: int, append_stop: bool, value_dim: int) -> None:
        super().__init__()
        self.num_action_tokens = num_action_tokens
        self.append_stop = append_stop
        self.stop_token_id = config.llama.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.action_columns = slice(config.action_vocab_start, config.action_vocab_end)
        width = config.llama.hidden_size
        self.vision_backbone = VisionBackbone(config.towers)
        self.projector = Projector(sum(t.width for t in config.towers), width)
        self.language_model = LanguageModel(config.llama)
        self.value_head = ValueHead(width, value_dim) if value_dim else None

    def forward(self, pixels: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Predict all action tokens of a chunk at once.

        Args:
            pixels: [B, 6*images, S, S] normalised.
            prompt_ids: [B, W] token ids from BOS to the final empty token, padded right with anything.
            prompt_lengths: [B] number of real prompt tokens of each row.

        Returns:
            Float32 logits [B, L, bins] of the action ids in ascending order (before the temperature), and values
            [B, V] (V = 0 without a value head).
        """
        embeddings, key_mask, last_prompt = self.embed(pixels, prompt_ids, prompt_lengths)
        hidden = self.language_model.model(embeddings, key_mask)
        # Row j predicts action token j: the last prompt token predicts the first, placeholder j-1 the j-th.
        offset = torch.arange(self.num_action_tokens, device=hidden.device)
        row = torch.arange(len(hidden), device=hidden.device)[:, None]
        action_hidden = self.language_model.model.norm(hidden[row, last_prompt[:, None] + offset])
        logits = F.linear(action_hidden, self.language_model.lm_head.weight[self.action_columns]).float()
        if self.value_head is None:
            return logits, logits.new_zeros(len(logits), 0)
        return logits, self.value_head(action_hidden[:, 0])

    def embed(self, pixels: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lay out [BOS, patches, prompt, zeros for the actions, STOP, padding] for each row.

        Padding sits at the far right of its row, so that positions are 0..T-1 for every row.

        Returns:
            Embeddings [B, T, D], key mask [B, T] and the index [B] of the last prompt token.
        """
        width, stop = prompt_ids.shape[1], int(self.append_stop)
        index = torch.arange(width + self.num_action_tokens + stop, device=prompt_ids.device)
        lengths = prompt_lengths[:, None]
        in_prompt = index < lengths
        is_stop = (index == lengths + self.num_action_tokens) & self.append_stop
        ids = F.pad(prompt_ids, (0, len(index) - width)).where(in_prompt, self.pad_token_id)
        ids = ids.masked_fill(is_stop, self.stop_token_id)
        tokens = self.language_model.model.embed_tokens(ids)
        tokens = tokens * (in_prompt | is_stop)[..., None].to(tokens.dtype)
        patches = self.projector(self.vision_backbone(pixels)).to(tokens.dtype)
        mask = index < lengths + self.num_action_tokens + stop
        seen = mask.new_ones(patches.shape[:2])
        embeddings = torch.cat([tokens[:, :1], patches, tokens[:, 1:]], dim=1)
        return embeddings, torch.cat([seen, mask], dim=1), patches.shape[1] + prompt_lengths - 1

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw all weights but the value head's: unit-scale residual streams and unit-variance logits.

        A smaller output matrix would start closer to uniform, but learns several times slower.
        """
        generator = torch.Generator().manual_seed(seed)
        depth = max(len(self.language_model.model.layers), len(self.vision_backbone.fused_featurizer.blocks))
        for module_name, module in self.named_modules():
            if module_name.startswith("value_head"):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                std = _init_std(module, module_name, name, parameter, depth)
                if std is None:
                    parameter.fill_(0.0 if name == "bias" else 1.0)
                else:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                    parameter.copy_(noise * std)

    @torch.no_grad()
    def init_value_head(self, seed: int) -> None:
        """Kaiming-normal (fan out) hidden layers with zero biases; the last layer is N(0, 0.02)."""
        if self.value_head is None:
            return
        generator = torch.Generator().manual_seed(seed)
        linears = [m for m in self.value_head.mlp if isinstance(m, nn.Linear)]
        for linear in linears:
            std = 0.02 if linear is linears[-1] else (2.0 / linear.out_features) ** 0.5
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * std)
            if linear.bias is not None:
                linear.bias.zero_()


def _init_std(module: nn.Module, module_name: str, name: str, parameter: Tensor, depth: int) -> float | None:
    """Standard deviation of a weight; None for biases (0) and for norms and layer scales (1)."""
    if name == "bias" or isinstance(module, nn.LayerNorm | RmsNorm | LayerScale):
        return None
    if isinstance(module, nn.Embedding):
        return 1.0
    if isinstance(module, nn.Linear | nn.Conv2d):
        fan_in = parameter[0].numel()
        # Each layer adds twice to a residual stream.
        into_stream = module_name.endswith((".attn.proj", ".mlp.fc2", ".o_proj", ".down_proj"))
        return fan_in**-0.5 / ((2 * depth) ** 0.5 if into_stream else 1.0)
    return 0.5  # position, class, register and pooling tokens
