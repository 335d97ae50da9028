"""OpenVLA-OFT network: maps images, prompt and proprioception to the logits of a whole action chunk.

Functions for prediction in several passes, token by token (OpenVLA) or by denoising, are at the end of the file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.openvla_oft.checkpoint import SFT_COMPONENTS, VALUE_HEAD
from embodyrl.policies.openvla_oft.config import VALUE_HIDDEN, OftConfig, OftOptions
from embodyrl.policies.openvla_oft.heads import (
    ActionScale,
    DiffusionHead,
    L1Head,
    embed_time,
)
from embodyrl.policies.openvla_oft.llama import KeyValueCache, LanguageModel, RepeatedTokens, RmsNorm
from embodyrl.policies.openvla_oft.settings import ActionHead
from embodyrl.policies.openvla_oft.vision import LayerScale, Mlp, Projector, VisionBackbone
from embodyrl.policies.steering.actor import SteeringActor
from embodyrl.policies.steering.settings import SteeringShape

BODY = ("vision_backbone", "projector", "language_model", *SFT_COMPONENTS)
"""Names of all submodules except those that RL adds (value head, action scale, residual actor)."""


class ValueHead(nn.Module):
    """MLP that maps a hidden state to V value estimates, always computed in float32."""

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
        """Map hidden states [B, D] to values [B, V]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.mlp(hidden.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """One batch of model inputs."""

    pixels: Tensor
    """[B, 6*images, S, S] normalized pixels: the DINOv2 and SigLIP channels of each image."""
    prompt_ids: Tensor
    """[B, W] token ids from BOS to the final empty token, padded on the right."""
    prompt_lengths: Tensor
    """[B] number of prompt tokens of each row without padding."""
    state: Tensor | None = None
    """[B, S] proprioception, normalized to -1..1."""


class OpenVlaOft(nn.Module):
    """OpenVLA-OFT network of any size and with any head, with the parameter names of published checkpoints."""

    def __init__(self, config: OftConfig, options: OftOptions) -> None:
        super().__init__()
        self.options = options
        self.append_stop = options.cfg.append_stop and not options.autoregressive
        self.stop_token_id = config.llama.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.action_columns = slice(config.action_vocab_start, config.action_vocab_end)
        width = config.llama.hidden_size
        self.vision_backbone = VisionBackbone(config.towers)
        self.projector = Projector(sum(t.width for t in config.towers), width)
        self.language_model = LanguageModel(config.llama, rope_bf16_table=options.cfg.rope_bf16_table)
        self.proprio_projector = Mlp(options.state_dim, width, width) if options.state_dim else None
        self.value_head = ValueHead(width, options.value_dim) if options.value_dim else None
        self.residual_actor: SteeringActor | None = None
        self.action_head: nn.Module | None = None
        self.action_scale: ActionScale | None = None
        self.noisy_action_projector: nn.Module | None = None
        if options.cfg.action_head == "l1":
            self.action_head = L1Head(options.cfg.action_dim, width)
            self.action_scale = ActionScale(options.cfg.action_dim)
        elif options.cfg.action_head == ActionHead.diffusion:
            self.action_head = DiffusionHead(options.cfg.action_dim, width)
            self.noisy_action_projector = Mlp(1, width, width)

    def forward(
        self, inputs: ModelInputs, tokens: Tensor | None = None, *, whole_vocabulary: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Predict the whole chunk in parallel.

        Args:
            inputs: the batch.
            tokens: [B, L] chosen ids, for autoregressive models; parallel models ignore them.
            whole_vocabulary: return the logits of all ids, for SFT.

        Returns:
            Outputs and values [B, V]. The outputs are float32 logits [B, L, bins] of the action ids in ascending order,
            before the temperature. With `whole_vocabulary`, they are logits [B, L+1, ids] of all ids, with the last row
            for STOP. With the L1 head, they are normalized actions [B, K, A].
        """
        placeholders = None
        if self.options.autoregressive:
            assert tokens is not None, "an autoregressive model needs tokens; use decode_tokens to act"
            placeholders = self.language_model.model.embed_tokens(tokens)
        hidden = self.compute_action_hidden(self.prefix(inputs), inputs, placeholders, more_rows=int(whole_vocabulary))
        if isinstance(self.action_head, L1Head):
            return self.regress(hidden), self.value(hidden)
        return self.compute_logits(hidden, slice(None) if whole_vocabulary else self.action_columns)

    def compute_logits(self, hidden: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return float32 logits [B, n, columns] of hidden states [B, n, D], and values [B, V] of the first state."""
        return apply_sliced_linear(self.language_model.lm_head, hidden, columns).float(), self.value(hidden)

    def regress(self, hidden: Tensor) -> Tensor:
        """Return the L1 head's normalized actions [B, K, A] for hidden states [B, L, D]."""
        assert self.action_head is not None
        return self.action_head(hidden).float()

    def value(self, hidden: Tensor) -> Tensor:
        """Return value estimates [B, V], computed from the first of n hidden states [B, n, D]."""
        if self.value_head is None:
            return hidden.new_zeros(len(hidden), 0, dtype=torch.float32)
        return self.value_head(hidden[:, 0])

    def prefix(self, inputs: ModelInputs) -> Tensor:
        """Return embeddings [B, P, D] of the tokens after BOS: image patches, then proprioception."""
        parts = [self.projector(self.vision_backbone(inputs.pixels))]
        if self.proprio_projector is not None:
            assert inputs.state is not None, "this model needs proprioception"
            parts.append(self.proprio_projector(inputs.state)[:, None])
        return torch.cat(parts, dim=1)

    def compute_action_hidden(
        self, prefix: Tensor, inputs: ModelInputs, placeholders: Tensor | None = None, *, more_rows: int = 0
    ) -> Tensor:
        """Run the language model; return the hidden states [B, L + more_rows, D] that predict the action tokens.

        State 0, at the last prompt token, predicts the first action token; state j, at placeholder j - 1, token j.
        """
        body, repeated = self.language_model.model, None
        if placeholders is None and self._can_merge_placeholders(prefix):
            embeddings, mask, last_prompt, repeated = self._embed_merged_placeholders(prefix, inputs)
        else:
            embeddings, mask, last_prompt = self.embed(prefix, inputs, placeholders)
        offset = torch.arange(self.options.num_action_tokens + more_rows, device=embeddings.device)
        rows = last_prompt[:, None] + offset
        return body(embeddings, self.build_attention_mask(mask), rows=rows, repeated=repeated)

    def _can_merge_placeholders(self, prefix: Tensor) -> bool:
        # bfloat16 rounds the logarithm of the number of placeholders; in a deep model, one layer saves little time.
        plain = prefix.device.type == "cpu" and prefix.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return plain and not self.options.autoregressive and len(self.language_model.model.layers) > 1

    def _embed_merged_placeholders(
        self, prefix: Tensor, inputs: ModelInputs
    ) -> tuple[Tensor, Tensor, Tensor, RepeatedTokens]:
        """Embed the inputs like `embed`, but with one action placeholder instead of L identical (zero) ones."""
        num_merged = self.options.num_action_tokens - 1
        embeddings, key_mask, last_prompt = self.embed(prefix, inputs, num_placeholders=1)
        placeholder = last_prompt[:, None] + 1
        distinct_positions = torch.arange(embeddings.shape[1], device=placeholder.device)
        all_positions = torch.arange(embeddings.shape[1] + num_merged, device=placeholder.device)
        distinct_index = all_positions - (all_positions - placeholder).clamp(0, num_merged)
        log_multiplicity = (distinct_positions == placeholder).float() * math.log(num_merged + 1)
        mask = log_multiplicity.masked_fill(~key_mask, -math.inf)[:, None, None]
        repeated = RepeatedTokens(
            distinct_positions + (distinct_positions > placeholder) * num_merged, mask, distinct_index
        )
        return embeddings, key_mask.gather(1, distinct_index), last_prompt, repeated

    def build_attention_mask(self, key_mask: Tensor) -> Tensor:
        """Return the attention mask [B, 1, 1 or T, T] for a key mask [B, T]: causal if decoding is autoregressive."""
        mask = key_mask[:, None, None, :]
        if self.options.autoregressive:
            size = key_mask.shape[1]
            mask = mask & torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
        return mask

    def embed(
        self,
        prefix: Tensor,
        inputs: ModelInputs,
        placeholders: Tensor | None = None,
        *,
        num_placeholders: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed [BOS, prefix, prompt, action placeholders, STOP, padding] for each row.

        Padding is on the right of its row, so that positions are 0..T-1 for every row.

        Args:
            prefix: [B, P, D] see `prefix`.
            inputs: the batch.
            placeholders: [B, L, D] embeddings of the action placeholders; default: zeros.
            num_placeholders: number of action placeholders; default: L.

        Returns:
            Embeddings [B, T, D], key mask [B, T] and the index [B] of the last prompt token.
        """
        if num_placeholders is None:
            num_placeholders = self.options.num_action_tokens
        tokens = self._embed_text(inputs, num_placeholders)
        lengths = inputs.prompt_lengths[:, None]
        if placeholders is not None:
            columns = lengths + torch.arange(num_placeholders, device=lengths.device)
            tokens = tokens.scatter(1, columns[..., None].expand_as(placeholders), placeholders.to(tokens.dtype))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = positions < lengths + num_placeholders + int(self.append_stop)
        prefix_mask = mask.new_ones(prefix.shape[:2])
        embeddings = torch.cat([tokens[:, :1], prefix.to(tokens.dtype), tokens[:, 1:]], dim=1)
        return embeddings, torch.cat([prefix_mask, mask], dim=1), prefix.shape[1] + inputs.prompt_lengths - 1

    def _embed_text(self, inputs: ModelInputs, num_placeholders: int) -> Tensor:
        """Embed [prompt, placeholders, STOP, padding]: [B, W + n + 1, D]; placeholders and padding are zeros."""
        width, lengths = inputs.prompt_ids.shape[1], inputs.prompt_lengths[:, None]
        positions = torch.arange(width + num_placeholders + int(self.append_stop), device=inputs.prompt_ids.device)
        in_prompt = positions < lengths
        is_stop = (positions == lengths + num_placeholders) & self.append_stop
        ids = F.pad(inputs.prompt_ids, (0, len(positions) - width)).where(in_prompt, self.pad_token_id)
        ids = ids.masked_fill(is_stop, self.stop_token_id)
        tokens = self.language_model.model.embed_tokens(ids)
        return tokens * (in_prompt | is_stop)[..., None].to(tokens.dtype)

    def add_residual_actor(self, seed: int) -> None:
        """Add the actor that corrects the model's actions; initial corrections are zero."""
        cfg, width = self.options.cfg, self.language_model.lm_head.in_features
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            actor = SteeringActor(SteeringShape.for_residual(cfg, width, cfg.action_dim), gain=0.0)
        self.residual_actor = actor.to(self.language_model.lm_head.weight.device)

    def recompute_activations(self) -> None:
        """Enable activation checkpointing: the backward pass recomputes all activations except the inputs of layers."""
        self.language_model.model.gradient_checkpointing = True
        self.vision_backbone.featurizer.gradient_checkpointing = True
        self.vision_backbone.fused_featurizer.gradient_checkpointing = True

    @torch.no_grad()
    def init_weights(self, seed: int, parts: tuple[str, ...] = BODY, *, source: str = "cpu") -> None:
        """Initialize the submodules `parts` so that residual streams have unit scale and logits have unit variance.

        A smaller output matrix would start closer to uniform, but learns several times more slowly. The random numbers
        are generated on the device `source`; numbers from the CPU are the same on every machine.
        """
        generator = torch.Generator(source).manual_seed(seed)
        depth = max(len(self.language_model.model.layers), len(self.vision_backbone.fused_featurizer.blocks))
        for module_name, module in self.named_modules():
            if module_name.partition(".")[0] not in parts:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                std = _get_init_std(module, module_name, name, parameter, depth)
                if std is None:
                    parameter.fill_(0.0 if name == "bias" else 1.0)
                else:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device=source)
                    parameter.copy_(noise * std)


def _get_init_std(module: nn.Module, module_name: str, name: str, parameter: Tensor, depth: int) -> float | None:
    """Return the standard deviation of initial weights; None for biases (all 0), norms and layer scales (all 1)."""
    if name == "bias" or isinstance(module, nn.LayerNorm | RmsNorm | LayerScale):
        return None
    if isinstance(module, nn.Embedding):
        return 1.0
    if module_name.startswith(VALUE_HEAD):
        # Kaiming (fan out); the last layer starts with small values.
        return 0.02 if module.bias is None else (2.0 / len(parameter)) ** 0.5
    if isinstance(module, nn.Linear | nn.Conv2d):
        fan_in = parameter[0].numel()
        # Each layer adds twice to a residual stream.
        into_stream = module_name.endswith((".attn.proj", ".mlp.fc2", ".o_proj", ".down_proj"))
        return fan_in**-0.5 / ((2 * depth) ** 0.5 if into_stream else 1.0)
    return 0.5  # position, class, register and pooling tokens


def apply_sliced_linear(layer: nn.Module, x: Tensor, columns: slice) -> Tensor:
    """Compute selected output columns of a bias-free linear layer, which may have low-rank adapters (peft)."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, layer.weight[columns])
    wrapped: Any = layer
    out = F.linear(x, wrapped.base_layer.weight[columns])
    for name in wrapped.active_adapters:
        low, high = wrapped.lora_A[name], wrapped.lora_B[name]
        out = out + F.linear(low(x), high.weight[columns]) * wrapped.scaling[name]
    return out


ChooseBin = Callable[[int, Tensor], Tensor]
"""Function from (token index, logits [B, 1, bins]) to the index of the chosen bin [B, 1]."""


def decode_tokens(model: OpenVlaOft, inputs: ModelInputs, choose: ChooseBin) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the action tokens one by one with a key-value cache.

    Returns:
        Logits [B, L, bins], chosen bins [B, L] and values [B, V], equal to those of `model(inputs, tokens)`.
    """
    body = model.language_model.model
    embeddings, key_mask, last_prompt = model.embed(model.prefix(inputs), inputs, num_placeholders=0)
    cache = KeyValueCache()
    hidden = body(embeddings, model.build_attention_mask(key_mask), rows=last_prompt[:, None], cache=cache)
    logits, value = model.compute_logits(hidden, model.action_columns)
    all_logits, bins = [logits], [choose(0, logits)]
    for index in range(1, model.options.num_action_tokens):
        # The token chosen last becomes an additional key.
        key_mask = torch.cat([key_mask, key_mask.new_ones(len(key_mask), 1)], dim=1)
        token = body.embed_tokens(bins[-1] + model.action_columns.start)
        # In the cache, padding separates a short prompt from its new tokens, so positions differ from cache indices.
        position = (last_prompt + index)[:, None]
        hidden = body(token, key_mask[:, None, None, :], positions=position, cache=cache)
        logits, _ = model.compute_logits(hidden, model.action_columns)
        all_logits.append(logits)
        bins.append(choose(index, logits))
    return torch.cat(all_logits, dim=1), torch.cat(bins, dim=1), value


def predict_noise(model: OpenVlaOft, inputs: ModelInputs, prefix: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
    """Return the predicted noise [B, K, A] in noisy chunks at diffusion timesteps [B], with the prefix of `embed`."""
    assert model.action_head is not None
    return model.action_head(compute_noisy_hidden(model, inputs, prefix, noisy, step)).float()


def compute_noisy_hidden(model: OpenVlaOft, inputs: ModelInputs, prefix: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
    """Return hidden states [B, L, D] that predict the noise in chunks [B, K, A] at diffusion timesteps [B]."""
    assert model.noisy_action_projector is not None
    # Each noisy number is projected to the embedding of its action placeholder.
    placeholders = model.noisy_action_projector(noisy.to(prefix.dtype).flatten(1)[..., None])
    time = embed_time(step, prefix.shape[-1]).to(prefix)[:, None]
    return model.compute_action_hidden(torch.cat([prefix, time], dim=1), inputs, placeholders)
