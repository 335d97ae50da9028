"""A frozen OpenVLA-OFT, with any head, whose greedy chunk a small actor corrects (arXiv 2412.13630, 2407.16677)."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from embodyrl.errors import ConfigError
from embodyrl.policies.flow.likelihood import seeds_of
from embodyrl.policies.openvla_oft.config import OftConfig, OftOptions, normalise, unnormalise
from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.steering.actor import Steered, SteeringActor
from embodyrl.policies.tensors import on_device
from embodyrl.types import FloatArray, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec


class _Seen(NamedTuple):
    """What the frozen model makes of B observations."""

    proposed: np.ndarray
    """[B, K, A] float64, normalised, as it would execute them greedily."""
    features: Tensor
    """[B, F]: the mean of the hidden rows that actions are read from, then what is proposed."""
    value: Tensor
    """[B, V], with gradients."""


class ResidualOftPolicy(Steered, OpenVlaOftPolicy):
    """The model acts greedily, and each number of a normalised action is moved by at most `residual_scale`.

    The model is built as for evaluation, so that it proposes the same to the last bit while its actor is trained.
    Implements `SoftActor`.
    """

    def __init__(self, config: OftConfig, spec: PolicySpec, options: OftOptions, request: PolicyRequest) -> None:
        super().__init__(config, spec, options, replace(request, trainable=False, gradient_checkpointing=False))
        for part in (self._actor, self._model.value_head):
            if part is not None:
                part.requires_grad_(request.trainable)

    @property
    def _actor(self) -> SteeringActor:
        actor = self._model.residual_actor
        assert actor is not None
        return actor

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Choose a chunk for each observation (see `Policy.act`); greedy: the correction's mean, with zero tokens."""
        seen, actor = self._see(obs), self._actor
        tokens = np.zeros((len(obs), self.spec.tokens_per_chunk), np.int64)
        logprob = np.zeros(tokens.shape, np.float32)
        if noise is None:
            choice = actor.greedy(seen.features)
        else:
            choice, kept, density = actor.sample(seen.features, seeds_of(noise), temperature or self._temperature)
            tokens[:, : kept.shape[1]] = kept
            logprob = self._spread(density).cpu().numpy()
        # In float64, where a correction of 0 leaves every bit of a proposal.
        correction = actor.shape.bound * choice.tanh().double().cpu().numpy()
        return PolicyOutput(
            actions=unnormalise(seen.proposed + correction, self._bounds),
            tokens=tokens,
            logprob=logprob,
            value=seen.value.cpu().numpy(),
        )

    @torch.no_grad()
    def values(self, obs: Observation) -> FloatArray:
        """Value estimates [B, V]."""
        return self._see(obs).value.cpu().numpy()

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Log-probabilities, entropies and values of kept corrections [B, L], with gradients of the actor alone."""
        seen = self._see(obs)
        logprob, entropy = self._actor.score(seen.features, tokens, self._temperature)
        return PolicyScores(logprob=self._spread(logprob), entropy=self._spread(entropy), value=seen.value)

    def features(self, obs: Observation) -> Tensor:
        """What actor and critics see [B, F]; without gradients."""
        return self._see(obs).features

    def save(self, folder: Path) -> None:
        """Write the weights (see `Policy.save`), and what the actor chooses."""
        super().save(folder)
        self._actor.shape.save(folder)

    def encode_actions(self, actions: FloatArray) -> IntArray:
        """Corrections of actions depend on what is seen.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.spec.steers} has no tokens for actions alone. Fix: leave model.likelihood out.")

    def _normalised(self, actions: FloatArray, obs: Observation) -> Tensor:
        return on_device(normalise(actions, self._bounds).astype(np.float32), self._device)

    def _see(self, obs: Observation) -> _Seen:
        with torch.no_grad():
            inputs = self._inputs(obs)
            if self._head is None:
                hidden = self._model.action_hidden(self._model.prefix(inputs), inputs)
                logits, _ = self._model.read_out(hidden, self._model.action_columns)
                ids = (logits.argmax(-1) + self._config.action_vocab_start).cpu().numpy()
                proposed = self._actions.decode(ids).reshape(len(obs), *self._chunk)
            else:
                hidden, actions = self._head.propose(inputs)
                proposed = actions.double().cpu().numpy()
            exact = on_device(proposed.astype(np.float32), self._device).flatten(1)
            features = torch.cat([hidden.float().mean(1), exact], 1)
        return _Seen(proposed, features, self._model.value(hidden))
