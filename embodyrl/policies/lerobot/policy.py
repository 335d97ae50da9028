"""Base classes of LeRobot's imitation policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.policies.inputs import rotate_upright
from embodyrl.policies.lerobot.config import ACTION, STATE, LeRobotConfig
from embodyrl.policies.lerobot.files import LeRobotFiles, read_files
from embodyrl.policies.lerobot.normalization import Inputs, Normalizer
from embodyrl.policies.lerobot.settings import LeRobotSettings, get_chunk_shape
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.steering.actor import FrozenOutputs, ModuleWithHeads, ResidualPolicy, SteeredPolicy
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.folder import CONFIG_FILE
from embodyrl.policies.vla.sampling import SampledChunks, build_scores, get_seeds, get_varying_dimensions
from embodyrl.types import (
    BoolArray,
    FloatArray,
    ImitationLoss,
    IntArray,
    Observation,
    PolicyOutput,
    PolicyScores,
    PolicySpec,
)


class EncodedObservations(NamedTuple):
    """Encoding of B observations, computed once for all chunks that are sampled for the same observation."""

    pooled: Tensor
    """[B, F] input of value heads and actors."""
    model: Any
    """Encoded observations of the subclass, passed to `_compute_greedy_actions` and `_sample`."""


class LeRobotPolicy(ABC):
    """Base class of policies that encode observations once and output chunks; implements `Policy`.

    Chunks [B, H, A] are normalized; the executed actions begin at index `LeRobotConfig.first_executed`. Tokens have the
    layout of `ChunkRecord`; the log-probabilities of an action are stored at its first tokens.
    """

    prefix: ClassVar[str]
    """Prefix of the names of all weights in LeRobot's files."""

    def __init__(
        self,
        spec: PolicySpec,
        cfg: LeRobotSettings,
        config: LeRobotConfig,
        module: ModuleWithHeads,
        files: LeRobotFiles,
        request: PolicyRequest,
    ) -> None:
        self.spec = spec
        self._cfg, self._config, self._files, self._shape = cfg, config, files, get_chunk_shape(config)
        self._temperature, self._rotation_deg = request.temperature, request.env.cameras.rotation_deg
        self._device = torch.device(request.device)
        self._normalizer = Normalizer(config, files.eps, self._device)
        self._normalizer.set_statistics(files.statistics, cfg.path)
        self._module = module.to(self._device).requires_grad_(request.trainable)
        if module.steering_actor is not None:
            # Features of a frozen network can be stored in the replay buffer.
            module.network.requires_grad_(False)
        self._network: Any = module.network
        # Dropout and random crops are active only in `imitate`.
        self.module: nn.Module = module.eval()
        self._by_dimension = module.steering_actor is None
        self._update_scored_dimensions()

    @abstractmethod
    def _encode(self, obs: Observation) -> EncodedObservations:
        """Encode observations, with gradients."""

    @abstractmethod
    def _compute_greedy_actions(self, obs: Observation, encoding: EncodedObservations) -> Tensor:
        """Return the greedy executed actions [B, K, A]."""

    @abstractmethod
    def _sample(self, encoding: EncodedObservations, seeds: IntArray, temperature: float) -> SampledChunks:
        """Sample executed actions [B, K, A]."""

    @abstractmethod
    def _score(self, encoding: EncodedObservations, tokens: IntArray) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [B, K, A] of tokens from `_sample`, with gradients."""

    @abstractmethod
    def imitate_padded(self, obs: Observation, actions: FloatArray, padding: BoolArray) -> ImitationLoss:
        """Return the SFT loss of actions [B, H', A]; `padding` [B, H'] is True for repeated actions."""

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationLoss:
        """Return the loss of actions [B, H', A] without padding (see `imitate_padded`)."""
        return self.imitate_padded(obs, actions, np.zeros(actions.shape[:2], np.bool_))

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return a chunk for each observation (see `Policy.act`). Greedy chunks have zero tokens."""
        encoding = self._encode(obs)
        if noise is None:
            sampled = SampledChunks.from_greedy(self._compute_greedy_actions(obs, encoding))
        else:
            sampled = self._sample(encoding, get_seeds(noise), temperature or self._temperature)
        actions, value = self._to_actions(sampled.state), self._compute_value(encoding)
        return sampled.to_output(actions, value, self.spec, self._varying)

    @torch.no_grad()
    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V]."""
        return self._compute_value(self._encode(obs)).cpu().numpy()

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities and entropies [B, L] of tokens from `act`, and values [B, V], with gradients."""
        encoding = self._encode(obs)
        return build_scores(self._score(encoding, tokens), self._compute_value(encoding), self.spec, self._varying)

    def save(self, folder: Path) -> None:
        """Write the policy in LeRobot's layout, and RL heads in a separate file."""
        self._files.save(self._module, folder)

    def load_weights(self, folder: Path) -> None:
        """Replace weights and statistics in place (see `Policy.load_weights`); heads are optional."""
        self._files.load(self._module, folder)
        if (folder / CONFIG_FILE).is_file():
            self._files = read_files(folder, self._config, self.spec.name, self.prefix, self._cfg)
            self._normalizer.set_statistics(self._files.statistics, folder)
            self._update_scored_dimensions()

    def _compute_value(self, encoding: EncodedObservations) -> Tensor:
        """Return value estimates [B, V] from detached features, so that the critic does not train the network."""
        head = self._module.value_head
        pooled = encoding.pooled.detach()
        return pooled.new_zeros(len(pooled), 0) if head is None else head(pooled)

    def _build_inputs(self, obs: Observation) -> Inputs:
        """Return normalized observations. In `obs`, state and cameras contain all history steps, oldest first."""
        config, steps, normalizer = self._config, self._config.n_obs_steps, self._normalizer
        numbers = to_device(np.ascontiguousarray(obs.state), self._device).unflatten(1, (steps, -1))
        state = environment = images = None
        first, end = config.state_dim, config.state_dim + config.environment_dim
        if config.state_dim:
            state = normalizer.normalize(STATE, numbers[:, :, :first])
        if config.environment_dim:
            environment = normalizer.normalize(config.environment_name, numbers[:, :, first:end])
        if config.cameras:
            frames = rotate_upright(obs.images[:, : steps * len(config.cameras)], self._rotation_deg)
            pixels = to_device(np.ascontiguousarray(frames), self._device).permute(0, 1, 4, 2, 3)
            views = pixels.float().div(255.0).unflatten(1, (steps, -1)).unbind(2)
            images = torch.stack([normalizer.normalize(*pair) for pair in zip(config.cameras, views, strict=True)], 2)
        return Inputs(state=state, environment=environment, images=images)

    def _select_executed(self, chunk: Tensor) -> Tensor:
        """Return the executed actions [B, K, A] of chunks [B, H, A]."""
        first = self._config.first_executed
        return chunk[:, first : first + self._shape.executed]

    def _to_actions(self, rows: Tensor, obs: Observation | None = None) -> FloatArray:
        """Convert normalized actions [B, K, A] to environment actions, which do not depend on the observations."""
        return self._normalizer.unnormalize(ACTION, rows).cpu().numpy()

    def _from_actions(self, actions: FloatArray) -> Tensor:
        rows = to_device(np.ascontiguousarray(actions, np.float32), self._device)
        return self._normalizer.normalize(ACTION, rows)

    def _update_scored_dimensions(self) -> None:
        """Find the action dimensions that have log-probabilities, which are the dimensions that vary in the data."""
        varying_mask, self._varying = self._normalizer.get_varying_mask(), None
        if self._by_dimension and varying_mask is not None:
            self._varying = get_varying_dimensions(varying_mask.cpu().numpy())
            self.spec = replace(self.spec, scored=len(self._varying))


class SteeredLeRobotPolicy(SteeredPolicy, LeRobotPolicy):
    """Base class of policies with a frozen network and an actor; implements `SoftActor`."""

    def _normalize_actions(self, actions: FloatArray, obs: Observation) -> Tensor:
        return self._from_actions(actions)


class NoiseSteeredLeRobotPolicy(SteeredLeRobotPolicy):
    """DSRL policy (arXiv 2506.15799): the actor chooses the initial noise or latent of the network."""

    def _run_frozen_model(self, obs: Observation) -> FrozenOutputs:
        with torch.no_grad():
            encoding = self._encode(obs)
        return FrozenOutputs(encoding.pooled, self._compute_value(encoding), encoding)

    @abstractmethod
    def _from_actor_output(self, encoding: EncodedObservations, actor_output: Tensor) -> Tensor:
        """Return the executed actions [B, K, A] for outputs [B, n] of the actor."""

    def _execute(
        self, obs: Observation, frozen: FrozenOutputs, outputs: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        actor_output = self._actor.shape.bound * outputs.flatten(1)
        return self._to_actions(self._from_actor_output(frozen.model, actor_output))


class ResidualLeRobotPolicy(ResidualPolicy, SteeredLeRobotPolicy):
    """Residual policy (arXiv 2407.16677, 2412.13630): the actor corrects the greedy chunk of the network."""

    def _run_frozen_model(self, obs: Observation) -> FrozenOutputs:
        with torch.no_grad():
            encoding = self._encode(obs)
            features = torch.cat([encoding.pooled, self._compute_greedy_actions(obs, encoding).flatten(1)], 1)
        return FrozenOutputs(features, self._compute_value(encoding), encoding)
