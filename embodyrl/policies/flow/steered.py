"""A flow policy whose flow is frozen: soft actor-critic chooses where it starts, or corrects where it ends."""

import torch
from torch import Tensor, nn

from embodyrl.errors import ConfigError
from embodyrl.policies.actor_critic.critics import Critics
from embodyrl.policies.flow.likelihood import Velocity
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.settings import STEERING_WIDTHS, ChunkRecord, FlowSettings, Likelihood
from embodyrl.policies.flow.steering import Correction, CriticsOfExecuted, SteeredStart, Steering, SteeringActor
from embodyrl.policies.tensors import on_device
from embodyrl.types import FloatArray, ImitationScores, IntArray, Observation


class SteeredFlowPolicy(FlowPolicy):
    """A frozen flow, and an actor that has a say in its chunks; implements `SoftActor`."""

    encoder = ()
    frozen = True

    @property
    def width(self) -> int:
        """L: numbers that are chosen for a chunk."""
        shape = self._actor.shape
        return shape.rows * shape.numbers

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

    def draw(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Draw noise or corrections [B, L], in shares of their bound (see `SoftActor.draw`)."""
        return self._actor.head.draw(self._actor(features))

    def chosen(self, tokens: IntArray) -> Tensor:
        """The noise or corrections [B, L] of tokens, in shares of their bound (see `SoftActor.chosen`)."""
        return on_device(ChunkRecord.of(self._cfg, self._shape).layout.unpack(tokens)[1], self._device).tanh()

    def normalise(self, actions: FloatArray) -> Tensor:
        """Nobody knows what was chosen where given actions come from.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self.spec.steers} chooses noise or corrections, and demonstrations hold actions. Fix: none of them."
        )

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Networks as large as the actor (see `SoftActor.build_critics`)."""
        cfg, generator = self._cfg, torch.Generator().manual_seed(seed)
        features = self._actor.shape.features
        if cfg.likelihood is Likelihood.dsrl:
            widths = (features + self.width, *STEERING_WIDTHS)
            critics = Critics(count, widths, generator, layer_norm=layer_norm)
        else:
            critics = CriticsOfExecuted(
                count, self._shape, cfg.residual_scale, features, generator, layer_norm=layer_norm
            )
        return critics.to(self._device)

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationScores:
        """Nothing that could follow a demonstration is trained.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self.spec.steers} trains the actor beside the flow alone. Fix: leave model.likelihood out."
        )


def policy_class(cfg: FlowSettings) -> type[FlowPolicy]:
    """The policy that the settings ask for."""
    return SteeredFlowPolicy if cfg.steers else FlowPolicy
