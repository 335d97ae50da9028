"""A flow policy whose flow is frozen: soft actor-critic chooses where it starts, or corrects where it ends."""

from pathlib import Path

import torch
from torch import Tensor

from embodyrl.policies.flow.likelihood import Velocity
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.settings import FlowSettings, Likelihood
from embodyrl.policies.flow.steering import Correction, SteeredStart, Steering
from embodyrl.policies.steering.actor import Steered, SteeringActor
from embodyrl.policies.tensors import on_device
from embodyrl.types import FloatArray, Observation


class SteeredFlowPolicy(Steered, FlowPolicy):
    """A frozen flow, and an actor that has a say in its chunks; implements `SoftActor`."""

    @property
    def _actor(self) -> SteeringActor:
        actor = self._module.steering_actor
        assert actor is not None
        return actor

    def _likelihood_of(self, obs: Observation) -> Steering:
        if self._cfg.likelihood is Likelihood.dsrl:
            return SteeredStart(self._cfg, self._shape, self._actor)
        return Correction(self._cfg, self._shape, self._actor, self._greedy_start(obs))

    def _greedy(self, obs: Observation, velocity: Velocity) -> Tensor:
        return self._likelihood_of(obs).greedy(velocity, len(obs), self._device)

    def features(self, obs: Observation) -> Tensor:
        """What actor and critics see [B, F]; without gradients."""
        with torch.no_grad():
            return self._likelihood_of(obs).features(self._velocity_of(obs), len(obs), self._device)

    def save(self, folder: Path) -> None:
        """Write the weights (see `Policy.save`), and what the actor chooses."""
        super().save(folder)
        self._actor.shape.save(folder)

    def _normalised(self, actions: FloatArray, obs: Observation) -> Tensor:
        rows = self._scale.from_actions(actions, obs)[:, :, : self._shape.action_dim]
        return on_device(rows, self._device)


def policy_class(cfg: FlowSettings) -> type[FlowPolicy]:
    """The policy that the settings ask for."""
    return SteeredFlowPolicy if cfg.steers else FlowPolicy
