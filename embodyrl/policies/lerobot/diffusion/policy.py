"""Diffusion Policy: denoising of chunks, likelihood of the denoising chain (DPPO), and the SFT loss."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.lerobot.diffusion.network import Diffusion
from embodyrl.policies.lerobot.diffusion.schedule import DenoisingChain, Schedule
from embodyrl.policies.lerobot.diffusion.settings import DiffusionSettings, GreedyStart, get_chunk_record
from embodyrl.policies.lerobot.policy import (
    EncodedObservations,
    LeRobotPolicy,
    NoiseSteeredLeRobotPolicy,
    ResidualLeRobotPolicy,
)
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.sampling import (
    START,
    SampledChunks,
    get_observation_seeds,
    sample_normals,
    sample_training_noise,
)
from embodyrl.types import BoolArray, FloatArray, ImitationLoss, IntArray, Observation


class DiffusionPolicy(LeRobotPolicy):
    """Policy with a diffusion network; implements `Policy`."""

    prefix = "diffusion."
    _cfg: DiffusionSettings
    _config: DiffusionConfig
    _network: Diffusion

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        config, cfg = self._config, self._cfg
        self._schedule = Schedule(config, config.steps, config.noise_scheduler_type)
        self._deterministic_schedule = Schedule(config, config.steps, "DDIM")
        self._chain = DenoisingChain(
            get_chunk_record(cfg, config),
            Schedule(config, config.steps, config.noise_scheduler_type, cfg.diffusion_eta),
            self._deterministic_schedule,
            every_step=cfg.every_step,
            min_std=cfg.diffusion_min_std,
            first_executed=config.first_executed,
        )

    def _encode(self, obs: Observation) -> EncodedObservations:
        """Return the condition [B, D] of the U-Net."""
        condition = self._network.condition(self._build_inputs(obs))
        return EncodedObservations(condition, condition)

    def _predict(self, condition: Tensor, x: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        predicted = self._network.unet(x, timestep, condition)
        return predicted, predicted

    def _compute_greedy_actions(self, obs: Observation, encoding: EncodedObservations) -> Tensor:
        """Denoise zeros or noise, which is seeded by the observation, and return the executed actions."""
        if self._cfg.greedy_start is GreedyStart.zero:
            start, seeds = torch.zeros(len(obs), *self._size, device=self._device), None
        else:
            seeds = get_observation_seeds(obs)
            start = sample_normals(seeds, START, self._size, self._device)
        return self._select_executed(
            self._schedule.denoise(partial(self._network.unet, condition=encoding.model), start, seeds)
        )

    @property
    def _size(self) -> tuple[int, int]:
        return self._shape.horizon, self._shape.width

    def _sample(self, encoding: EncodedObservations, seeds: IntArray, temperature: float) -> SampledChunks:
        """Sample executed actions [B, K, A] with the denoising chain."""
        sampled = self._chain.sample(partial(self._predict, encoding.model), seeds, self._device, temperature)
        return SampledChunks(state=self._select_executed(sampled.state), tokens=sampled.tokens, logprob=sampled.logprob)

    def _score(self, encoding: EncodedObservations, tokens: IntArray) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the chain's denoising steps."""
        return self._chain.score(partial(self._predict, encoding.model), tokens, self._device, self._temperature)

    def imitate_padded(self, obs: Observation, actions: FloatArray, padding: BoolArray) -> ImitationLoss:
        """Return the SFT loss of actions [B, H', A]: squared error of the noise, or of the chunk (`prediction_type`).

        Actions marked in `padding` [B, H'] are ignored with `do_mask_loss_for_padding`; the sum is divided by H A.
        Missing actions before the current step repeat the first action and are ignored. Without gradients, noise and
        timestep are the same in every call, and `error` is the mean absolute error of the executed actions in the
        environment's units.
        """
        past = self._shape.horizon - actions.shape[1]
        actions = np.concatenate([actions[:, :1].repeat(past, 1), actions], 1)
        excluded = np.pad(padding & self._config.do_mask_loss_for_padding, ((0, 0), (past, 0)), constant_values=True)
        target = self._from_actions(actions)
        noise, uniform = sample_training_noise(len(target), self._size, self._device)
        timestep = to_device((uniform * self._config.num_train_timesteps).astype(np.int64), self._device)
        encoding = self._encode(obs)
        included = to_device(~excluded, self._device)[..., None]
        loss = (self.compute_errors(encoding.model, target, noise, timestep) * included).flatten(1).mean(1)
        if torch.is_grad_enabled():
            return ImitationLoss(loss=loss, accuracy=torch.zeros_like(loss))
        predicted = to_device(self._to_actions(self._compute_greedy_actions(obs, encoding)), self._device)
        error = (predicted - self._select_executed(to_device(actions, self._device))).abs().flatten(1).mean(1)
        return ImitationLoss(loss=loss, accuracy=torch.zeros_like(error), error=error)

    def compute_errors(self, condition: Tensor, target: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Add `noise` to normalized chunks at timesteps `timestep` [B]; return squared denoising errors [B, H, A]."""
        predicted = self._network.unet(self._schedule.add_noise(target, noise, timestep), timestep, condition)
        return (predicted - (target if self._config.prediction_type == "sample" else noise)).square()


class SteeredDiffusionPolicy(NoiseSteeredLeRobotPolicy, DiffusionPolicy):
    """DSRL policy: an actor chooses the initial noise of a frozen diffusion policy with deterministic DDIM steps."""

    def _from_actor_output(self, encoding: EncodedObservations, actor_output: Tensor) -> Tensor:
        with torch.no_grad():
            # With `noise_repeated`, all rows have the same noise.
            start = actor_output.unflatten(1, (-1, self._shape.width)).expand(-1, self._shape.horizon, -1)
            return self._select_executed(
                self._deterministic_schedule.denoise(partial(self._network.unet, condition=encoding.model), start)
            )


class ResidualDiffusionPolicy(ResidualLeRobotPolicy, DiffusionPolicy):
    """Residual policy: an actor corrects the chunk of a frozen diffusion policy."""
