"""OpenVLA-OFT as a policy: acting and scoring are one code path, so that their log-probabilities agree."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from embodyrl.config.schema import ModelConfig, Precision
from embodyrl.policies.openvla_oft.actions import ActionTokenizer
from embodyrl.policies.openvla_oft.checkpoint import load_into, read_side_files, save_from
from embodyrl.policies.openvla_oft.config import TOKENIZER_FILE, OftConfig, OftOptions
from embodyrl.policies.openvla_oft.images import preprocess
from embodyrl.policies.openvla_oft.model import ModelInputs, OpenVlaOft
from embodyrl.policies.openvla_oft.prompt import PromptEncoder
from embodyrl.policies.openvla_oft.statistics import normalise, unnormalise
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import FloatArray, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec


class OpenVlaOftPolicy:
    """A checkpoint bound to an environment's orientation, tasks and statistics; implements `Policy`."""

    def __init__(self, cfg: ModelConfig, config: OftConfig, spec: PolicySpec, request: PolicyRequest) -> None:
        self.spec = spec
        self.module: nn.Module = build_module(cfg, config, spec, request)
        self._config = config
        self._temperature = request.temperature
        self._device = torch.device(request.device)
        self._rotation_deg = request.env.image_rotation_deg
        self._pipeline = cfg.image_pipeline
        self._side_files = read_side_files(config.folder)
        data_set = config.statistics.find(cfg.unnorm_key, request.env.unnorm_key)
        self._bounds = config.statistics.bounds(data_set, "action", cfg.action_normalization)
        self._state_bounds = (
            config.statistics.bounds(data_set, "proprio", cfg.action_normalization) if spec.uses_state else None
        )
        self._actions = ActionTokenizer(vocab_end=config.action_vocab_end, n_bins=config.n_bins)
        self._prompts = PromptEncoder(
            config.folder / TOKENIZER_FILE, bos_token_id=config.llama.bos_token_id, tasks=request.env.tasks
        )
        half = cfg.precision == Precision.bf16
        self._autocast = half and request.trainable
        self._input_dtype = torch.bfloat16 if half and not request.trainable else torch.float32

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None) -> PolicyOutput:
        """Choose a chunk for each observation (see `Policy.act`).

        Token ids are absolute ids of the vocabulary, as the public code stores them.
        """
        logits, value = self._forward(obs)
        scaled = logits / self._temperature
        if noise is None:
            choice = logits.argmax(dim=-1)
        else:
            choice = sample_inverse_cdf(scaled, torch.tensor(noise, device=self._device))
        logprob = scaled.log_softmax(dim=-1).gather(-1, choice[..., None])[..., 0]
        tokens = (choice + self._config.action_vocab_start).cpu().numpy()
        shape = (len(obs), self.spec.num_action_chunks, self.spec.action_dim)
        return PolicyOutput(
            actions=unnormalise(self._actions.decode(tokens).reshape(shape), self._bounds),
            tokens=tokens,
            logprob=logprob.cpu().numpy(),
            value=value.cpu().numpy(),
        )

    def encode(self, actions: FloatArray) -> IntArray:
        """Token ids [B, L] of actions [B, K, A] in the units of the training data (see `Policy.encode`)."""
        return self._actions.encode(normalise(actions, self._bounds)).reshape(len(actions), -1)

    @torch.no_grad()
    def values(self, obs: Observation) -> FloatArray:
        """Value estimates [B, V]."""
        return self._forward(obs)[1].cpu().numpy()

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Log-probabilities, entropies and values of given tokens [B, L], with gradients."""
        logits, value = self._forward(obs)
        choice = torch.tensor(tokens, device=self._device) - self._config.action_vocab_start
        return score_tokens(logits / self._temperature, choice, value)

    def save(self, folder: Path) -> None:
        """Write the weights in the public layout, in the dtype they are kept in (fp32 while training)."""
        save_from(self.module, folder, self._side_files)

    def load_weights(self, folder: Path) -> None:
        """Replace the weights in place (see `Policy.load_weights`); without a saved value head, ours stays."""
        load_into(self.module, folder)

    def _forward(self, obs: Observation) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return self.module(self._inputs(obs))

    def _inputs(self, obs: Observation) -> ModelInputs:
        pixels = preprocess(
            obs.images[:, : self.spec.num_images],
            rotation_deg=self._rotation_deg,
            pipeline=self._pipeline,
            size=self._config.image_size,
            norms=self._config.pixel_norms,
            device=self._device,
        )
        ids, lengths = (torch.tensor(x, device=self._device) for x in self._prompts.batch(obs.instructions))
        state = None
        if self._state_bounds is not None:
            normalised = normalise(obs.state, self._state_bounds, flat_to_zero=False)
            state = torch.tensor(normalised, device=self._device, dtype=self._input_dtype)
        return ModelInputs(pixels=pixels.to(self._input_dtype), prompt_ids=ids, prompt_lengths=lengths, state=state)


def build_module(cfg: ModelConfig, config: OftConfig, spec: PolicySpec, request: PolicyRequest) -> OpenVlaOft:
    """Build the model on the meta device, give it memory once, and fill it from the checkpoint or at random."""
    with torch.device("meta"):
        module = OpenVlaOft(config, model_options(cfg, spec, request))
    if not request.trainable:
        module.requires_grad_(False)
        if cfg.precision == Precision.bf16:
            module.to(torch.bfloat16)
            if module.value_head is not None:
                module.value_head.float()
    module.to_empty(device=request.device)
    module.init_value_head(request.seed)
    if config.random_init:
        module.init_weights(request.seed)
    else:
        load_into(module, config.folder)
    return module


def model_options(cfg: ModelConfig, spec: PolicySpec, request: PolicyRequest) -> OftOptions:
    """What the config says about the model."""
    return OftOptions(
        num_action_chunks=spec.num_action_chunks,
        action_dim=spec.action_dim,
        append_stop=cfg.append_stop,
        state_dim=request.env.state_dim if spec.uses_state else 0,
        value_dim=request.value_dim,
    )


def sample_inverse_cdf(scaled: Tensor, noise: Tensor) -> Tensor:
    """Draw one bin per token: the first whose cumulative probability exceeds the uniform number.

    Args:
        scaled: [B, L, bins] logits divided by the temperature.
        noise: [B, L] uniform in [0, 1).

    Returns:
        [B, L] int64. The sum runs in float64: in float32 it loses the rare bins.
    """
    cdf = scaled.double().softmax(dim=-1).cumsum(dim=-1)
    found = torch.searchsorted(cdf, noise.double()[..., None].contiguous(), right=True)[..., 0]
    return found.clamp_(max=scaled.shape[-1] - 1)


def score_tokens(scaled: Tensor, choice: Tensor, value: Tensor) -> PolicyScores:
    """Log-probability and entropy (nat) of chosen bins [B, L] under logits [B, L, bins] divided by the temperature."""
    log_probs = scaled.log_softmax(dim=-1)
    return PolicyScores(
        logprob=log_probs.gather(-1, choice[..., None])[..., 0],
        entropy=-(log_probs.exp() * log_probs).sum(dim=-1),
        value=value,
    )
