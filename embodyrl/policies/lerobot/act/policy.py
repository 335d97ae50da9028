"""ACT policy: greedy chunks are decoded from a zero latent, sampling adds noise, and SFT trains a conditional VAE."""

from dataclasses import replace

import torch
from torch import Tensor

from embodyrl.policies.lerobot.act.config import ActConfig
from embodyrl.policies.lerobot.act.network import Act
from embodyrl.policies.lerobot.act.settings import ActSettings
from embodyrl.policies.lerobot.policy import (
    EncodedObservations,
    LeRobotPolicy,
    NoiseSteeredLeRobotPolicy,
    ResidualLeRobotPolicy,
)
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.chains import Transition
from embodyrl.policies.vla.records import ChunkRecord
from embodyrl.policies.vla.sampling import START, SampledChunks, sample_normals
from embodyrl.types import BoolArray, FloatArray, ImitationLoss, IntArray, Observation, PolicyOutput


class ActPolicy(LeRobotPolicy):
    """Policy with an ACT network; implements `Policy`."""

    prefix = "model."
    _cfg: ActSettings
    _config: ActConfig
    _network: Act

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return a chunk for each observation (see `Policy.act`).

        With temporal ensembling, each action is a whole chunk.
        """
        if not self._cfg.temporal_ensemble:
            return super().act(obs, noise=noise, temperature=temperature)
        out = super().act(obs, noise=None)
        return replace(out, actions=out.actions.reshape(len(obs), 1, -1))

    def _select_executed(self, chunk: Tensor) -> Tensor:
        """Return the executed actions of chunks [B, H, A]; with temporal ensembling, all H actions."""
        return chunk if self._cfg.temporal_ensemble else super()._select_executed(chunk)

    @property
    def _record(self) -> ChunkRecord:
        return ChunkRecord.chain(self._shape, 0)

    def _encode(self, obs: Observation) -> EncodedObservations:
        """Encode observations with a latent of zeros."""
        tokens = self._network.embed(self._build_inputs(obs))
        encoded = self._network.encode(tokens, self._build_zero_latent(len(obs)))
        return EncodedObservations(encoded.mean(0), (tokens, encoded))

    def _build_zero_latent(self, count: int) -> Tensor:
        return torch.zeros(count, self._config.latent_dim, device=self._device)

    def _compute_greedy_actions(self, obs: Observation, encoding: EncodedObservations) -> Tensor:
        """Return the executed actions of the chunk decoded from a zero latent."""
        return self._select_executed(self._network.decode(*encoding.model))

    def _get_action_distribution(self, encoding: EncodedObservations, temperature: float) -> Transition:
        mean = self._select_executed(self._network.decode(*encoding.model))
        return Transition(mean=mean, std=torch.full_like(mean, self._cfg.action_std * temperature))

    def _sample(self, encoding: EncodedObservations, seeds: IntArray, temperature: float) -> SampledChunks:
        """Sample executed actions from a Gaussian around the decoded chunk."""
        distribution = self._get_action_distribution(encoding, temperature)
        rows = distribution.mean + distribution.std * sample_normals(
            seeds, START, distribution.mean.shape[1:], self._device
        )
        tokens = self._record.layout.pack(seeds[:, None], rows.flatten(1).cpu().numpy())
        return SampledChunks(state=rows, tokens=tokens, logprob=distribution.log_prob(rows))

    def _score(self, encoding: EncodedObservations, tokens: IntArray) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of sampled actions, both [B, K, A]."""
        distribution = self._get_action_distribution(encoding, self._temperature)
        rows = to_device(self._record.layout.unpack(tokens)[1], self._device).view_as(distribution.mean)
        return distribution.log_prob(rows), distribution.entropy()

    def imitate_padded(self, obs: Observation, actions: FloatArray, padding: BoolArray) -> ImitationLoss:
        """Return the SFT loss of actions [B, H, A]: mean absolute error, plus `kl_weight` times the KL of the latent.

        Actions marked in `padding` [B, H] are ignored.

        Without gradients, the latent is zero (as in `act`), the KL is omitted, and `error` is the mean absolute error
        of the executed actions in the environment's units.
        """
        target, padded = self._from_actions(actions), to_device(padding, self._device)
        if not (torch.is_grad_enabled() and self._config.use_vae):
            encoding = self._encode(obs)
            chunk = self._network.decode(*encoding.model)
            distance = ((chunk - target).abs() * ~padded[..., None]).flatten(1).mean(1)
            predicted = to_device(self._to_actions(self._select_executed(chunk.detach())), self._device)
            expert_actions = to_device(actions[:, : self._shape.executed], self._device)
            error = (predicted - expert_actions).abs().flatten(1).mean(1)
            return ImitationLoss(loss=distance, accuracy=torch.zeros_like(error), error=error)
        loss = self.loss(obs, target, padded)
        return ImitationLoss(loss=loss, accuracy=torch.zeros_like(loss))

    def loss(self, obs: Observation, target: Tensor, padding: Tensor) -> Tensor:
        """Return the training loss [B] of normalized chunks [B, H, A]; actions marked in `padding` [B, H] are ignored.

        The sum of absolute errors is divided by H A, including padding (LeRobot 0.4).
        """
        network, inputs = self._network, self._build_inputs(obs)
        tokens, latent = network.embed(inputs), self._build_zero_latent(len(obs))
        divergence = target.new_zeros(len(obs))
        if self._config.use_vae:
            posterior = network.posterior(inputs, target, padding)
            latent = posterior.mean + (posterior.log_variance / 2).exp() * torch.randn_like(posterior.mean)
            divergence = posterior.divergence()
        chunk = network.decode(tokens, network.encode(tokens, latent))
        distance = (chunk - target).abs() * ~padding[..., None]
        return distance.flatten(1).mean(1) + self._config.kl_weight * divergence


class SteeredActPolicy(NoiseSteeredLeRobotPolicy, ActPolicy):
    """DSRL policy: an actor chooses the latent of a frozen ACT."""

    def _from_actor_output(self, encoding: EncodedObservations, actor_output: Tensor) -> Tensor:
        tokens, _ = encoding.model
        with torch.no_grad():
            encoded = self._network.encode(tokens, actor_output)
            return self._select_executed(self._network.decode(tokens, encoded))


class ResidualActPolicy(ResidualLeRobotPolicy, ActPolicy):
    """Residual policy: an actor corrects the chunk of a frozen ACT."""
