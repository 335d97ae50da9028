"""Residual policy: an actor corrects the greedy chunk of a frozen OpenVLA-OFT (arXiv 2412.13630, 2407.16677)."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from embodyrl.errors import ConfigError
from embodyrl.policies.openvla_oft.config import OftConfig, OftOptions, normalize, unnormalize
from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.steering.actor import FrozenOutputs, SteeredPolicy, SteeringActor
from embodyrl.policies.tensors import to_device
from embodyrl.types import FloatArray, IntArray, Observation, PolicySpec


class ResidualOftPolicy(SteeredPolicy, OpenVlaOftPolicy):
    """Residual policy with a frozen OpenVLA-OFT, and corrections up to `residual_scale` in normalized units.

    The model is built in the same way as for evaluation, so that its actions stay bit-identical while the actor is
    trained.
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
    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V]."""
        return self._run_frozen_model(obs).value.cpu().numpy()

    def encode_actions(self, actions: FloatArray) -> IntArray:
        """Raise an error, because the correction of an action depends on the observation.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self._key} has no action tokens. Fix: remove model.likelihood.")

    def _normalize_actions(self, actions: FloatArray, obs: Observation) -> Tensor:
        return to_device(normalize(actions, self._bounds).astype(np.float32), self._device)

    def _run_frozen_model(self, obs: Observation) -> FrozenOutputs:
        """Run the model; the features are the mean hidden state of the action predictions and the greedy actions."""
        with torch.no_grad():
            hidden, actions = self._head.propose(self._build_inputs(obs))
            proposed = actions.double().cpu().numpy()
            greedy_actions = to_device(proposed.astype(np.float32), self._device).flatten(1)
            features = torch.cat([hidden.float().mean(1), greedy_actions], 1)
        return FrozenOutputs(features, self._model.value(hidden), proposed)

    def _execute(
        self, obs: Observation, frozen: FrozenOutputs, outputs: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        # In float64, a correction of 0 preserves every bit of the proposed actions.
        correction = self._actor.shape.bound * outputs.double().cpu().numpy()
        return unnormalize(frozen.model + correction, self._bounds)
