"""A flow policy whose flow is frozen: soft actor-critic chooses where it starts."""

import torch
from torch import Tensor, nn

from embodyrl.errors import ConfigError
from embodyrl.policies.actor_critic.critics import Critics
from embodyrl.policies.flow.likelihood import Velocity
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.settings import STEERING_WIDTHS, FlowSettings, Likelihood
from embodyrl.policies.flow.steering import SteeredStart
from embodyrl.types import FloatArray, ImitationScores, IntArray, Observation


class SteeredFlowPolicy(FlowPolicy):
    """A frozen flow, and an actor that chooses its noise; implements `SoftActor`."""

    encoder = ()
    frozen = True

    @property
    def width(self) -> int:
        """L: numbers of noise that are chosen for a chunk."""
        return self._steering.actor.numbers

    @property
    def _steering(self) -> SteeredStart:
        assert isinstance(self._likelihood, SteeredStart)
        return self._likelihood

    def features(self, obs: Observation) -> Tensor:
        """What actor and critics see [B, F]; without gradients."""
        with torch.no_grad():
            return self._steering.features(self._velocity_of(obs), len(obs), self._device)

    def draw(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Draw noise [B, L], in shares of its bound, and its log-probability [B] (see `SoftActor.draw`)."""
        actor = self._steering.actor
        return actor.head.draw(actor(features))

    def chosen(self, tokens: IntArray) -> Tensor:
        """The noise [B, L] of tokens, in shares of its bound (see `SoftActor.chosen`)."""
        return self._steering.choice(tokens, self._device).tanh().flatten(1)

    def normalise(self, actions: FloatArray) -> Tensor:
        """Nobody knows the noise of given actions.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("model.likelihood=dsrl chooses noise, and demonstrations hold actions. Fix: none of them.")

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Networks as large as the actor (see `SoftActor.build_critics`)."""
        inputs = self._module.network.hidden_width + self.width
        generator = torch.Generator().manual_seed(seed)
        return Critics(count, (inputs, *STEERING_WIDTHS), generator, layer_norm=layer_norm).to(self._device)

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationScores:
        """Nothing that could follow a demonstration is trained.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("model.likelihood=dsrl trains the choice of noise alone. Fix: leave model.likelihood out.")

    def _greedy_start(self, obs: Observation, velocity: Velocity) -> Tensor:
        return self._steering.greedy(velocity, len(obs), self._device)


def policy_class(cfg: FlowSettings) -> type[FlowPolicy]:
    """The policy that the settings ask for."""
    return SteeredFlowPolicy if cfg.likelihood is Likelihood.dsrl else FlowPolicy
