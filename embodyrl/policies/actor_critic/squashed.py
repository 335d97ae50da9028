"""Actor-critic policy with squashed Gaussian actions."""

import torch
from torch import Tensor, nn

from embodyrl.policies.actor_critic.policy import ActorCritic, ActorCriticPolicy, LogStd
from embodyrl.policies.actor_critic.settings import ActorCriticSettings
from embodyrl.policies.actor_critic.shape import NetShape
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.soft_actor.critics import Critics
from embodyrl.policies.soft_actor.head import SquashedHead
from embodyrl.policies.tensors import to_device
from embodyrl.types import FloatArray, IntArray, Observation, PolicySpec


class SquashedActorCritic(ActorCritic):
    """Actor-critic networks whose policy outputs are means and log standard deviations."""

    def build_head(self, shape: NetShape, log_std: LogStd, correlation: float) -> SquashedHead:
        """Build the action distribution, and initialize the bias of the log standard deviations with `log_std`."""
        last_layer = self.policy[-1]
        assert isinstance(last_layer, nn.Linear)
        last_layer.bias.data.view(shape.num_actions, 2, -1)[:, 1] = torch.as_tensor(log_std)
        return SquashedHead(shape.low, shape.high)


class SquashedPolicy(ActorCriticPolicy):
    """Actor-critic policy with squashed Gaussian actions; implements `SoftActor`."""

    network = SquashedActorCritic
    frozen = False

    def __init__(self, spec: PolicySpec, shape: NetShape, request: PolicyRequest, cfg: ActorCriticSettings) -> None:
        super().__init__(spec, shape, request, cfg)
        self.width = spec.tokens_per_chunk
        self.encoder = () if self._net.encoder is None else tuple(self._net.encoder.parameters())

    def sample(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled chunks [B, L] in -1..1 and their log-probabilities [B] (see `SoftActor.sample`)."""
        assert isinstance(self._net.head, SquashedHead)
        return self._net.head.sample(self._net.outputs(features))

    def tokens_to_chunks(self, tokens: IntArray) -> Tensor:
        """Convert tokens to chunks [B, L] in -1..1 (see `SoftActor.tokens_to_chunks`)."""
        return to_device(self._net.head.to_choice(tokens), self._device).tanh()

    def normalize(self, actions: FloatArray, obs: Observation | None) -> Tensor:
        """Convert environment actions [B, K, A] to chunks [B, L] in -1..1 (see `SoftActor.normalize`)."""
        assert isinstance(self._net.head, SquashedHead)
        return to_device(self._net.head.normalize(actions), self._device).flatten(1)

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Build critics with the sizes of the policy's network (see `SoftActor.build_critics`)."""
        widths = (self._shape.features + self.width, *self._shape.hidden)
        generator = torch.Generator().manual_seed(seed)
        return Critics(count, widths, generator, layer_norm=layer_norm).to(self._device)
