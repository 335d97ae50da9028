"""Networks of pi0, pi0.5 and SmolVLA, which map observations to velocities.

The module also converts between the environment's units and the normalized units of the models.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from embodyrl.policies.flow.layers import (
    AttentionContext,
    Decoder,
    DecoderLayer,
    KeysValues,
    build_block_mask,
    build_key_mask,
    build_rope,
)
from embodyrl.policies.flow.model import FlowInputs, FlowModel, Memory, Prefix, embed_time
from embodyrl.policies.flow.prompts import FlowPromptEncoder
from embodyrl.policies.flow.specs import FlowSpec, Pi0Spec, SmolVlaSpec
from embodyrl.policies.flow.vla.folder import from_deltas, get_prompt_format, pad_dims, read_normalizer, to_deltas
from embodyrl.policies.flow.vla.settings import VlaSettings
from embodyrl.policies.inputs import rotate_upright
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.folder import TOKENIZER_FILE
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.types import ByteArray, FloatArray, Observation


class Pi0(FlowModel):
    """Network of pi0 and pi0.5.

    In pi0, the suffix contains a state token and the actions. In pi0.5, the suffix contains only the actions, and the
    time conditions the norms.
    """

    spec: Pi0Spec

    def __init__(self, spec: Pi0Spec) -> None:
        width, adaptive = spec.expert.width, spec.adaptive
        time_mlp = ("time_mlp", width) if adaptive else ("action_time_mlp", 2 * width)
        super().__init__(spec, state_width=0 if adaptive else width, time_mlp=time_mlp)
        condition = width if adaptive else 0
        self.projector = nn.Linear(spec.vision.width, spec.language.width)
        self.language = Decoder(
            spec.language, [DecoderLayer(spec.language) for _ in range(spec.language.depth)], vocab=spec.vocab
        )
        self.expert = Decoder(
            spec.expert,
            [DecoderLayer(spec.expert, condition_width=condition) for _ in range(spec.expert.depth)],
            condition_width=condition,
        )

    def embed_images(self, images: Tensor) -> Tensor:
        """Return image tokens. Unlike text tokens, they are not scaled."""
        return self.projector(self.vision(images))

    def memory(self, prefix: Prefix) -> Memory:
        """Return one attention context per expert layer, with the keys and values of the same language layer.

        The state token does not attend to the actions.
        """
        # pi0's suffix starts with the state token.
        num_state_tokens = 0 if self.spec.adaptive else 1
        size, device = num_state_tokens + self.spec.horizon, prefix.valid.device
        blocks = (torch.arange(size, device=device) >= num_state_tokens).long()
        prefix_mask, suffix_mask = build_key_mask(prefix.valid), build_block_mask(blocks)
        mask = torch.cat(
            [prefix_mask.expand(-1, -1, size, -1), suffix_mask.expand(len(prefix_mask), -1, -1, -1)], dim=-1
        )
        positions = prefix.valid.sum(1, keepdim=True) + torch.arange(size, device=device)
        context = AttentionContext(build_rope(positions, self.spec.expert), mask)
        contexts = tuple(replace(context, memory=keys_values) for keys_values in prefix.layers)
        return Memory(contexts=contexts, state=prefix.state)

    def embed_suffix(self, memory: Memory, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of the noisy actions, and the input of the adaptive norms (pi0.5).

        For pi0, the tokens also contain the state, and the second value is None.
        """
        actions, time_features = self.action_in_proj(x), embed_time(time, self.spec.expert.width)
        if self.spec.adaptive:
            return actions, F.silu(self.time_mlp(time_features.to(actions.dtype)))
        state = self.state_proj(memory.state.to(actions.dtype))[:, None]
        return torch.cat([state, self._mix_time(actions, time_features)], dim=1), None


class SmolVla(FlowModel):
    """Network of SmolVLA. The state is the last token of the prefix; images and text do not attend to it.

    Actions do not attend to later actions. The state is not part of `Prefix`: its token passes through the language
    model in `memory`, so its projection can be trained with a frozen backbone without storing the activations of
    images and text.
    """

    spec: SmolVlaSpec

    def __init__(self, spec: SmolVlaSpec) -> None:
        text, width = spec.language, spec.expert.width
        super().__init__(spec, state_width=text.width, time_mlp=("action_time_mlp", 2 * width))
        self.projector = nn.Linear(spec.vision.width * spec.shuffle**2, text.width, bias=False)
        self.language = Decoder(text, [DecoderLayer(text) for _ in range(text.depth)], vocab=spec.vocab)
        kv_width = text.kv_heads * text.head_dim
        self.expert = Decoder(
            spec.expert,
            [
                DecoderLayer(spec.expert, kv_inputs=None if self._is_joint_layer(i) else kv_width)
                for i in range(text.depth)
            ],
        )

    def embed_images(self, images: Tensor) -> Tensor:
        """Merge each s x s square of patches into one token, row by row, scaled like the text embeddings."""
        features, shuffle = self.vision(images), self.spec.shuffle
        side = math.isqrt(features.shape[1])
        squares = (
            features.unflatten(1, (side // shuffle, shuffle, side // shuffle, shuffle))
            .transpose(2, 3)
            .flatten(3)
            .flatten(1, 2)
        )
        return self.projector(squares) * math.sqrt(self.spec.language.width)

    def memory(self, prefix: Prefix) -> Memory:
        """Append the state to the keys and values of the prefix, and project both for layers with cross-attention."""
        text, size, device = self.spec.language, self.spec.horizon, prefix.valid.device
        valid = torch.cat([prefix.valid, prefix.valid.new_ones(len(prefix.valid), 1)], dim=1)
        prefix_mask, count = build_key_mask(valid), valid.sum(1, keepdim=True)
        state = AttentionContext(build_rope(count - 1, text), prefix_mask)
        layers = self._append_state(prefix, state)
        steps = torch.arange(size, device=device)
        suffix_mask = build_block_mask(steps).expand(len(prefix_mask), -1, -1, -1)
        joint_context = AttentionContext(
            build_rope(count + steps, self.spec.expert),
            torch.cat([prefix_mask.expand(-1, -1, size, -1), suffix_mask], dim=-1),
        )
        # Positions start at 0; keys projected from the language model are already rotated.
        cross_context = AttentionContext(build_rope(steps[None], self.spec.expert), prefix_mask, self_attention=False)
        contexts = []
        for i, (layer, pair) in enumerate(zip(self.expert.layers, layers, strict=True)):
            context = joint_context if self._is_joint_layer(i) else cross_context
            keys_values = pair if self._is_joint_layer(i) else layer(None, pair)[1]
            contexts.append(replace(context, memory=keys_values))
        return Memory(contexts=tuple(contexts), state=prefix.state)

    def embed_suffix(self, memory: Memory, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return action tokens with time embeddings, whose angles are computed in float64 as in the published code."""
        time_features = embed_time(time, self.spec.expert.width, double=True)
        return self._mix_time(self.action_in_proj(x), time_features), None

    def _append_state(self, prefix: Prefix, context: AttentionContext) -> tuple[KeysValues, ...]:
        """Append the keys and values of the state token to the keys and values of images and text."""
        token = self.state_proj(prefix.state.to(self.state_proj.weight.dtype))[:, None]
        contexts = [replace(context, memory=keys_values) for keys_values in prefix.layers]
        state_keys_values, _ = self.language.compute_keys_values(token, contexts)
        return tuple(
            (torch.cat([past_k, k.to(past_k.dtype)], dim=2), torch.cat([past_v, v.to(past_v.dtype)], dim=2))
            for (past_k, past_v), (k, v) in zip(prefix.layers, state_keys_values, strict=True)
        )

    def _is_joint_layer(self, layer: int) -> bool:
        return layer % self.spec.joint_every == 0


BLACK = -1.0


def compute_fitted_size(frames: ByteArray, side: int) -> tuple[int, int]:
    """Return height and width of frames [N, H, W, 3] after scaling to fit into a square of `side` pixels."""
    _, height, width, _ = frames.shape
    ratio = max(width / side, height / side)
    return int(height / ratio), int(width / ratio)


def pad_centered(frames: ByteArray, side: int) -> Tensor:
    """Resize frames [N, H, W, 3] uint8 to [N, 3, side, side] in -1..1, centered with black padding.

    Uses Pillow's bilinear filter (which antialiases) on bytes, as openpi's data transforms and client do.
    """
    height, width = compute_fitted_size(frames, side)
    canvas = np.zeros((len(frames), side, side, 3), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    for target, frame in zip(canvas, frames, strict=True):
        image = Image.fromarray(frame)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        target[top : top + height, left : left + width] = np.asarray(image)
    return _to_signed_unit_range(torch.from_numpy(canvas))


def pad_left_top(frames: ByteArray, side: int, device: torch.device | None = None) -> Tensor:
    """Resize frames [N, H, W, 3] uint8 to [N, 3, side, side] in -1..1, padded with black on the left and top.

    Uses bilinear interpolation in float32 without antialiasing, as LeRobot's SmolVLA does.
    """
    pixels = _to_signed_unit_range(to_device(np.array(frames), device or "cpu"))
    height, width = compute_fitted_size(frames, side)
    # Pixels must be the same for acting and training; inside autocast, resizing would run in bfloat16.
    with torch.autocast(pixels.device.type, enabled=False):
        pixels = F.interpolate(pixels, size=(height, width), mode="bilinear", align_corners=False)
    return F.pad(pixels, (side - width, 0, side - height, 0), value=BLACK)


def _to_signed_unit_range(frames: Tensor) -> Tensor:
    """Convert [N, H, W, 3] bytes to [N, 3, H, W] in -1..1."""
    return frames.permute(0, 3, 1, 2).float() / 255.0 * 2.0 - 1.0


class VlaProcessor:
    """Converts observations and actions to the model's inputs; implements `ActionScale`."""

    def __init__(self, cfg: VlaSettings, spec: FlowSpec, folder: Path, request: PolicyRequest) -> None:
        """Read the tokenizer and the statistics of a folder.

        Raises:
            CheckpointError: the files are missing, damaged or do not fit the environment.
        """
        self.cfg, self._spec, self._env = cfg, spec, request.env
        self._device = torch.device(request.device)
        prompt_format = get_prompt_format(cfg, spec, folder)
        self._prompts = FlowPromptEncoder(
            folder / TOKENIZER_FILE,
            prompt_format,
            tasks=() if prompt_format.reads_state else request.env.instructions or request.env.tasks,
        )
        self.load_statistics(folder)

    def load_statistics(self, folder: Path) -> None:
        """Read the normalization statistics of a weights folder."""
        self._normalizer = read_normalizer(folder, self.cfg, self._env.state_dim, self._env.action.dim)
        # The scale of constant dimensions is a tiny number, which only avoids a division by 0.
        self.varying_mask = (np.array(self._normalizer.actions.scale) > 1e-5).astype(np.float32)

    def encode(self, obs: Observation) -> FlowInputs:
        """Convert observations to model inputs.

        Images [B, C, H, W, 3] have the simulator's orientation; states [B, S] are unnormalized.
        """
        count, cameras = len(obs), self.cfg.num_images_in_input
        frames = rotate_upright(obs.images[:, :cameras], self._env.cameras.rotation_deg)
        frames = np.ascontiguousarray(frames.reshape(-1, *frames.shape[2:]))
        side = self._spec.vision.image_size
        if isinstance(self._spec, Pi0Spec):
            pixels = to_device(pad_centered(frames, side), self._device)
        else:
            pixels = pad_left_top(frames, side, self._device)
        state = np.asarray(obs.state, np.float32)
        if self._normalizer.state is not None:
            state = self._normalizer.state.normalize(state)
        ids, token_mask = self._prompts.batch(
            obs.instructions, state if self._prompts.prompt_format.reads_state else None
        )
        return FlowInputs(
            images=pixels.unflatten(0, (count, cameras)),
            # Masked cameras are left out: no token attends to a masked camera, and masked tokens have no position.
            image_mask=torch.ones(count, cameras, dtype=torch.bool, device=self._device),
            tokens=to_device(ids, self._device),
            token_mask=to_device(token_mask, self._device),
            # Only pi0's and SmolVLA's state is a token, whose size was checked (`VlaFactory.spec`).
            state=to_device(pad_dims(state[:, : self._spec.state_dim], self._spec.state_dim), self._device),
        )

    def to_actions(self, x: FloatArray, obs: Observation) -> FloatArray:
        """Convert flow outputs [B, K, D] to environment actions [B, K, A]."""
        actions = self._normalizer.actions.unnormalize(x[..., : self._env.action.dim])
        return from_deltas(actions, obs.state, self.cfg.delta_dims)

    def from_actions(self, actions: FloatArray, obs: Observation) -> FloatArray:
        """Convert environment actions [B, H, A] to flow targets [B, H, D], padded with zeros."""
        relative = to_deltas(actions, obs.state, self.cfg.delta_dims)
        return pad_dims(self._normalizer.actions.normalize(relative), self._spec.action_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class VlaPrefix:
    """Encoded observations, computed once for all denoising steps."""

    memory: Memory
    pooled: Tensor | None
    """[B, width of the language model] mean over images and text, if values need it."""


class VlaNetwork(nn.Module):
    """Network of a `FlowModule` for pi0, pi0.5 and SmolVLA."""

    def __init__(self, model: FlowModel, processor: VlaProcessor, shape: ChunkShape, *, pools_prefix: bool) -> None:
        """Combine a model and its processor.

        If `pools_prefix`, also run the last backbone layer and average the prefix's hidden states for a value head.
        """
        super().__init__()
        self.model = model
        self.shape = shape
        self.prefix_width, self.hidden_width = model.spec.language.width, model.spec.expert.width
        self.processor = processor
        self._pools_prefix = pools_prefix

    def encode_prefix(self, obs: Observation) -> VlaPrefix:
        """Run the backbone, and the parts of the expert that do not depend on time."""
        prefix = self.model.prefix(self.processor.encode(obs), output=self._pools_prefix)
        pooled = None
        if prefix.hidden is not None:
            mask = prefix.valid[..., None].float()
            pooled = (prefix.hidden.float() * mask).sum(1) / mask.sum(1)
        return VlaPrefix(memory=self.model.memory(prefix), pooled=pooled)

    def velocity(self, prefix: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Run one pass of the expert (see `FlowModule`)."""
        return self.model.denoise(prefix.memory, x, t)
