"""Action distributions of the continuous heads: a Gaussian around the L1 head's output, and a denoising chain."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embodyrl.policies.lerobot.diffusion.schedule import DenoisingChain
from embodyrl.policies.openvla_oft.config import ActionTokenizer
from embodyrl.policies.openvla_oft.heads import TRAIN_STEPS, build_ddim_schedule
from embodyrl.policies.openvla_oft.model import ModelInputs, OpenVlaOft, compute_noisy_hidden, predict_noise
from embodyrl.policies.openvla_oft.settings import OftSettings, get_chunk_record
from embodyrl.policies.tensors import standard_normal, to_device
from embodyrl.policies.vla.chains import Transition, Velocity
from embodyrl.policies.vla.sampling import SampledChunks, get_seeds, sample_training_noise
from embodyrl.types import FloatArray, ImitationLoss, IntArray


class L1Gaussian:
    """Gaussian around the output of the L1 head, with a learned standard deviation per action dimension.

    Same interface as `DiscreteTokens`. Temperature multiplies the standard deviation. Actions are unbounded; the
    environment clips actions. A token is the bit pattern of a float32 sample, so that log-probabilities are those of
    the exact samples.
    """

    def __init__(
        self, model: OpenVlaOft, forward: Callable[[ModelInputs], tuple[Tensor, Tensor]], tokenizer: ActionTokenizer
    ) -> None:
        self._model, self._forward, self._tokenizer = model, forward, tokenizer

    def act(self, inputs: ModelInputs, noise: FloatArray | None, temperature: float) -> tuple[SampledChunks, Tensor]:
        """Sample chunks [B, K, A] from uniform `noise` [B, L] (None: greedy); also return values [B, V]."""
        distribution, value = self._get_distribution(inputs, temperature)
        if noise is None:
            return SampledChunks.from_greedy(distribution.mean), value
        normal = standard_normal(to_device(noise, value.device)).view_as(distribution.mean)
        actions = distribution.mean + distribution.std * normal
        bits = actions.flatten(1).cpu().numpy().view(np.int32).astype(np.int64)
        return SampledChunks(state=actions, tokens=bits, logprob=distribution.log_prob(actions)), value

    def score(self, inputs: ModelInputs, tokens: IntArray, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities and entropies [B, K, A] of tokens [B, L], and values [B, V]."""
        distribution, value = self._get_distribution(inputs, temperature)
        actions = self.unpack_samples(tokens, value.device).view_as(distribution.mean)
        return distribution.log_prob(actions), distribution.entropy(), value

    @staticmethod
    def unpack_samples(tokens: IntArray, device: torch.device) -> Tensor:
        """Return the normalized actions [B, L] in tokens [B, L]."""
        return to_device(tokens.astype(np.int32).view(np.float32), device)

    def values(self, inputs: ModelInputs) -> Tensor:
        """Return values [B, V]."""
        return self._forward(inputs)[1]

    def propose(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the hidden states [B, L, D] of the action predictions, and the mean actions [B, K, A]."""
        hidden = self._model.compute_action_hidden(self._model.prefix(inputs), inputs)
        return hidden, self._model.regress(hidden)

    def imitate(self, inputs: ModelInputs, target: np.ndarray) -> ImitationLoss:
        """Return the mean absolute error (L1 loss) of normalized actions [B, K, A], as in the official training."""
        mean, _ = self._forward(inputs)
        loss = (mean - to_device(target, mean.device).to(mean.dtype)).abs().flatten(1).mean(1)
        return ImitationLoss(loss=loss, accuracy=compute_bin_accuracy(mean.detach(), target, self._tokenizer))

    def _get_distribution(self, inputs: ModelInputs, temperature: float) -> tuple[Transition, Tensor]:
        mean, value = self._forward(inputs)
        assert self._model.action_scale is not None
        std = self._model.action_scale.log_std.exp() * temperature
        return Transition(mean=mean, std=std.expand_as(mean)), value


class Diffusion:
    """Diffusion head, with the likelihood of one or all stochastic steps of the chain (see `DiscreteTokens`)."""

    def __init__(self, model: OpenVlaOft, cfg: OftSettings, tokenizer: ActionTokenizer) -> None:
        self._model, self._cfg, self._tokenizer = model, cfg, tokenizer
        steps = cfg.num_diffusion_steps_inference
        self._deterministic_schedule = build_ddim_schedule(steps)
        self._chain = DenoisingChain(
            get_chunk_record(cfg),
            build_ddim_schedule(steps, cfg.diffusion_eta),
            self._deterministic_schedule,
            every_step=cfg.every_step,
            min_std=cfg.diffusion_min_std,
        )

    def act(self, inputs: ModelInputs, noise: FloatArray | None, temperature: float) -> tuple[SampledChunks, Tensor]:
        """Denoise sampled noise to chunks; greedy chunks start from constant noise, equal for all observations."""
        prefix, device = self._model.prefix(inputs), inputs.prompt_ids.device
        if noise is None:
            sampled = SampledChunks.from_greedy(self._denoise(inputs, prefix))
        else:
            sampled = self._chain.sample(self._build_velocity(inputs, prefix), get_seeds(noise), device, temperature)
        return sampled, self._compute_value(inputs, prefix)

    def propose(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the hidden states [B, L, D] of the first denoising step, and the greedy actions [B, K, A]."""
        prefix = self._model.prefix(inputs)
        timestep = torch.full((len(prefix),), int(self._deterministic_schedule.timesteps[0]), device=prefix.device)
        hidden = compute_noisy_hidden(self._model, inputs, prefix, self._get_initial_noise(inputs), timestep)
        return hidden, self._denoise(inputs, prefix)

    def _denoise(self, inputs: ModelInputs, prefix: Tensor) -> Tensor:
        return self._deterministic_schedule.denoise(
            partial(predict_noise, self._model, inputs, prefix), self._get_initial_noise(inputs)
        )

    def _get_initial_noise(self, inputs: ModelInputs) -> Tensor:
        """Return the initial noise [B, K, A]."""
        shape = self._cfg.num_action_chunks, self._cfg.action_dim
        uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0)).flatten()
        start = to_device(standard_normal(uniform).view(shape), inputs.prompt_ids.device)
        return start.expand(len(inputs.prompt_ids), *shape)

    def score(self, inputs: ModelInputs, tokens: IntArray, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities and entropies [B, K, A] of the stochastic steps, and values [B, V]."""
        prefix, device = self._model.prefix(inputs), inputs.prompt_ids.device
        logprob, entropy = self._chain.score(self._build_velocity(inputs, prefix), tokens, device, temperature)
        return logprob, entropy, self._compute_value(inputs, prefix)

    def values(self, inputs: ModelInputs) -> Tensor:
        """Return values [B, V]."""
        return self._compute_value(inputs, self._model.prefix(inputs))

    def imitate(self, inputs: ModelInputs, target: np.ndarray) -> ImitationLoss:
        """Return the squared error of the predicted noise, at one random diffusion timestep per sample.

        Without gradients (validation), noise and timestep are the same in every call, and all denoising steps are run
        to compute the accuracy of actions.
        """
        trains = torch.is_grad_enabled()
        device = inputs.prompt_ids.device
        noise, uniform = sample_training_noise(len(target), target.shape[1:], device)
        timestep = to_device((uniform * TRAIN_STEPS).astype(np.int64), device)
        noisy = self._deterministic_schedule.add_noise(to_device(target, device).float(), noise, timestep)
        prefix = self._model.prefix(inputs)
        error = F.mse_loss(predict_noise(self._model, inputs, prefix, noisy, timestep), noise, reduction="none")
        predicted = torch.full_like(noise, torch.nan) if trains else self._denoise(inputs, prefix)
        accuracy = compute_bin_accuracy(predicted, target, self._tokenizer)
        return ImitationLoss(loss=error.flatten(1).mean(1), accuracy=accuracy)

    def _build_velocity(self, inputs: ModelInputs, prefix: Tensor) -> Velocity:
        def network(x: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
            noise = predict_noise(self._model, inputs, prefix, x, timestep)
            return noise, noise

        return network

    def _compute_value(self, inputs: ModelInputs, prefix: Tensor) -> Tensor:
        """Return values [B, V] for zero actions at the noisiest timestep, which depend only on the observations.

        The features are detached, so that the critic does not change the policy's features.
        """
        count, head = len(prefix), self._model.value_head
        if head is None:
            return torch.zeros(count, 0, device=prefix.device)
        with torch.no_grad():
            zero_actions = torch.zeros(count, self._cfg.num_action_chunks, self._cfg.action_dim, device=prefix.device)
            timestep = torch.full((count,), TRAIN_STEPS - 1, device=prefix.device)
            hidden = compute_noisy_hidden(self._model, inputs, prefix, zero_actions, timestep)[:, 0]
        return head(hidden)


def compute_bin_accuracy(predicted: Tensor, target: np.ndarray, tokenizer: ActionTokenizer) -> Tensor:
    """Return the fraction [B] of normalized actions [B, K, A] in the same bins as the targets; NaN matches no bin."""
    same = tokenizer.encode(predicted.nan_to_num().cpu().numpy()) == tokenizer.encode(target)
    return (to_device(same, predicted.device) & ~predicted.isnan()).flatten(1).float().mean(1)
