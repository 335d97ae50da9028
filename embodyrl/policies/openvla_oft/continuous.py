"""Probabilities of the continuous heads: a Gaussian around L1 regression, and the denoising chain of diffusion."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embodyrl.policies.flow.likelihood import (
    START,
    TIMES,
    Chosen,
    GaussianChain,
    Transition,
    Velocity,
    normals,
    seeds_of,
    uniforms,
)
from embodyrl.policies.openvla_oft.heads import TRAIN_STEPS, cumulative_alphas, ddim_step, ddim_steps
from embodyrl.policies.openvla_oft.model import ModelInputs, OpenVlaOft, denoise, noisy_hidden, predict_noise
from embodyrl.policies.openvla_oft.settings import OftSettings, record_of
from embodyrl.policies.tensors import on_device, standard_normal
from embodyrl.types import FloatArray, IntArray


class L1Gaussian:
    """The head's output is the mean, a learned number per action dimension the deviation.

    Temperature multiplies the deviation. Actions are not bounded: the environment clips them. A token is the bit
    pattern of a float32, so that what was drawn is what is scored.
    """

    def __init__(self, model: OpenVlaOft, forward: Callable[[ModelInputs], tuple[Tensor, Tensor]]) -> None:
        self._model, self._forward = model, forward

    def greedy(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Normalised actions [B, K, A] without noise, here the mean, and values [B, V]."""
        return self._forward(inputs)

    def propose(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Hidden rows [B, L, D] that actions are read from, and what `greedy` gives [B, K, A]."""
        hidden = self._model.action_hidden(self._model.prefix(inputs), inputs)
        return hidden, self._model.regress(hidden)

    def draw(self, inputs: ModelInputs, noise: FloatArray, temperature: float) -> tuple[Chosen, Tensor]:
        """Draw normalised chunks from uniforms [B, L], one for each row, by the inverse CDF; with values [B, V]."""
        spread, value = self._spread(inputs, temperature)
        normal = standard_normal(on_device(noise, value.device)).view_as(spread.mean)
        actions = spread.mean + spread.std * normal
        bits = actions.flatten(1).cpu().numpy().view(np.int32).astype(np.int64)
        return Chosen(state=actions, tokens=bits, logprob=spread.log_prob(actions)), value

    def score(self, inputs: ModelInputs, tokens: IntArray, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies [B, K, A] of what was drawn, and values [B, V]."""
        spread, value = self._spread(inputs, temperature)
        actions = on_device(tokens.astype(np.int32).view(np.float32), value.device).view_as(spread.mean)
        return spread.log_prob(actions), spread.entropy(), value

    def values(self, inputs: ModelInputs) -> Tensor:
        """[B, V]"""
        return self._forward(inputs)[1]

    def imitate(self, inputs: ModelInputs, target: Tensor) -> tuple[Tensor, Tensor]:
        """Supervised loss [B] of normalised actions [B, K, A], and what acting greedily gives; NaN: not computed.

        The loss is the mean distance, as in the official training.
        """
        mean, _ = self._forward(inputs)
        return (mean - target.to(mean.dtype)).abs().flatten(1).mean(1), mean.detach()

    def _spread(self, inputs: ModelInputs, temperature: float) -> tuple[Transition, Tensor]:
        mean, value = self._forward(inputs)
        assert self._model.action_scale is not None
        std = self._model.action_scale.log_std.exp() * temperature
        return Transition(mean=mean, std=std.expand_as(mean)), value


class DiffusionChain(GaussianChain):
    """Denoising steps as a policy (DPPO, arXiv 2409.00588): DDIM steps whose noise is never below a least deviation."""

    def __init__(self, cfg: OftSettings) -> None:
        steps = cfg.num_diffusion_steps_inference
        super().__init__(record_of(cfg), num_steps=steps, every_step=cfg.every_step, drawn_steps=steps)
        self._cfg, self._levels, self._alphas = cfg, torch.tensor(ddim_steps(steps)), cumulative_alphas()

    def _step(self, velocity: Velocity, x: Tensor, index: Tensor) -> tuple[Transition, Transition]:
        """The step with noise, and the certain one that greedy acting takes."""
        steps, alphas = self._cfg.num_diffusion_steps_inference, on_device(self._alphas, x.device)
        level = on_device(self._levels, x.device)[index]
        noise, _ = velocity(x, level)  # here what it predicts is the noise
        mean, sigma = ddim_step(x, noise, level, steps, alphas, self._cfg.diffusion_eta)
        certain, _ = ddim_step(x, noise, level, steps, alphas, 0.0)
        std = sigma.clamp(min=self._cfg.diffusion_min_std)
        return Transition(mean=mean, std=std), Transition(mean=certain, std=torch.zeros_like(std))


class Diffusion:
    """Acts by denoising; its likelihood is that of one noisy step of the chain, or of all."""

    def __init__(self, model: OpenVlaOft, cfg: OftSettings) -> None:
        self._model, self._cfg, self._chain = model, cfg, DiffusionChain(cfg)

    def greedy(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Without noise from one fixed start for every observation (see `L1Gaussian.greedy`)."""
        prefix = self._model.prefix(inputs)
        steps = self._cfg.num_diffusion_steps_inference
        return denoise(self._model, inputs, self._start(inputs), steps, prefix), self._value(inputs, prefix)

    def propose(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """See `L1Gaussian.propose`; the hidden rows are those of the first step."""
        prefix, start = self._model.prefix(inputs), self._start(inputs)
        steps = self._cfg.num_diffusion_steps_inference
        level = torch.full((len(prefix),), ddim_steps(steps)[0], device=prefix.device)
        hidden = noisy_hidden(self._model, inputs, prefix, start, level)
        return hidden, denoise(self._model, inputs, start, steps, prefix)

    def _start(self, inputs: ModelInputs) -> Tensor:
        """[B, K, A]"""
        shape = self._cfg.num_action_chunks, self._cfg.action_dim
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0)).flatten()
        start = on_device(standard_normal(drawn).view(shape), inputs.prompt_ids.device)
        return start.expand(len(inputs.prompt_ids), *shape)

    def draw(self, inputs: ModelInputs, noise: FloatArray, temperature: float) -> tuple[Chosen, Tensor]:
        """Denoise from drawn noise (see `L1Gaussian.draw`)."""
        prefix = self._model.prefix(inputs)
        device = inputs.prompt_ids.device
        chosen = self._chain.sample(self._network(inputs, prefix), seeds_of(noise), device, temperature)
        return chosen, self._value(inputs, prefix)

    def score(self, inputs: ModelInputs, tokens: IntArray, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `L1Gaussian.score`."""
        prefix = self._model.prefix(inputs)
        device = inputs.prompt_ids.device
        logprob, entropy = self._chain.score(self._network(inputs, prefix), tokens, device, temperature)
        return logprob, entropy, self._value(inputs, prefix)

    def values(self, inputs: ModelInputs) -> Tensor:
        """See `L1Gaussian.values`."""
        return self._value(inputs, self._model.prefix(inputs))

    def imitate(self, inputs: ModelInputs, target: Tensor) -> tuple[Tensor, Tensor]:
        """Squared error of the noise, at one of the training steps per row (see `L1Gaussian.imitate`).

        Without gradients (validation) noise and step are the same in every call.
        """
        trains = torch.is_grad_enabled()
        rows = torch.randint(2**47, (len(target),)).numpy() if trains else np.arange(len(target))
        noise = normals(rows, START, tuple(target.shape[1:]), target.device)
        level = on_device((uniforms(rows, TIMES, 1)[:, 0] * TRAIN_STEPS).astype(np.int64), target.device)
        share = cumulative_alphas().to(target.device)[level][:, None, None]
        noisy = share.sqrt() * target.float() + (1 - share).sqrt() * noise
        prefix = self._model.prefix(inputs)
        error = F.mse_loss(predict_noise(self._model, inputs, prefix, noisy, level), noise, reduction="none")
        found = torch.full_like(noise, torch.nan) if trains else self.greedy(inputs)[0]
        return error.flatten(1).mean(1), found

    def _network(self, inputs: ModelInputs, prefix: Tensor) -> Velocity:
        def network(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
            noise = predict_noise(self._model, inputs, prefix, x, level)
            return noise, noise

        return network

    def _value(self, inputs: ModelInputs, prefix: Tensor) -> Tensor:
        """[B, V] from the middle of the noise at the noisiest step, a function of the observation alone; its features
        have no gradient, so that the critic does not bend what the policy reads.
        """
        count, head = len(prefix), self._model.value_head
        if head is None:
            return torch.zeros(count, 0, device=prefix.device)
        with torch.no_grad():
            middle = torch.zeros(count, self._cfg.num_action_chunks, self._cfg.action_dim, device=prefix.device)
            level = torch.full((count,), TRAIN_STEPS - 1, device=prefix.device)
            hidden = noisy_hidden(self._model, inputs, prefix, middle, level)[:, 0]
        return head(hidden)


ContinuousHead = L1Gaussian | Diffusion
"""Acts, and says later how likely that was."""
