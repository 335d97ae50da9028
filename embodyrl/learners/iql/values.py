"""Critics and value network of implicit Q-learning; their inputs are precomputed features of all frames."""

import math
from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithms.iql.estimator import IqlSettings
from embodyrl.algorithms.iql.losses import critic_loss, expectile_loss
from embodyrl.learners.adam import build_adam
from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import backward, load_parts, update_targets
from embodyrl.policies.soft_actor.critics import Critics

MINIMUM_SCALE = 1e-3
"""Lower bound of the standard deviations that normalize features and actions."""


class IqlValues:
    """Two critics Q(s, a), their target networks, and the value network V(s)."""

    def __init__(
        self, features: Tensor, actions: Tensor, settings: IqlSettings, optim: OptimSettings, seed: int
    ) -> None:
        """Build networks with random weights for N frames.

        `features` [N, F] are the features of the frames; `actions` [N, K A] are the flattened chunks that start there.
        """
        self._features, self._actions = _standardize(features), _standardize(actions)
        self._settings, self._clip = settings, optim.value_clip_grad
        hidden = (settings.critic_width, settings.critic_width)
        states, width = features.shape[1], actions.shape[1]

        def build(count: int, inputs: int, offset: int) -> Critics:
            generator = torch.Generator().manual_seed(seed + offset)
            return Critics(count, (inputs, *hidden), generator, layer_norm=False).to(features.device)

        self.critics, self.targets = (build(2, states + width, 0) for _ in range(2))
        self.targets.requires_grad_(False)
        self.value = build(1, states, 1)
        self._optimizers = {
            name: build_adam([{"params": [*net.parameters()]}], lr=optim.value_lr, weight_decay=0.0, **optim.adam)
            for name, net in (("critics", self.critics), ("value", self.value))
        }

    def update(
        self, start: Tensor, after: Tensor, reward: Tensor, discount: Tensor
    ) -> tuple[Tensor, dict[str, float]] | str:
        """Update V, then Q, then the target critics; return the advantages [B] and metrics.

        If a loss or gradient is not finite, return the name of its network ("value" or "critics") instead. This network
        and the networks after it in this order are not updated.

        Args:
            start: [B] frame indices of the observations and chunks.
            after: [B] frame indices of the next observations.
            reward: [B] sums of the rewards of the chunks.
            discount: [B] gamma, 0 after a terminal state.
        """
        features, actions = self._features[start], self._actions[start]
        with torch.no_grad():
            target = self.targets(features, actions).amin(0)
        value_loss = expectile_loss(target - self._value(features), self._settings.expectile).mean()
        if not self._run_optimizer_step("value", value_loss):
            return "value"
        with torch.no_grad():
            advantage = target - self._value(features)
            next_value = self._value(self._features[after])
        estimate = self.critics(features, actions)
        loss = critic_loss(estimate, reward, discount, next_value)
        if not self._run_optimizer_step("critics", loss):
            return "critics"
        update_targets(self.targets, self.critics, self._settings.tau)
        metrics = {"value_loss": value_loss.item(), "critic_loss": loss.item(), "value": estimate.mean().item()}
        return advantage, metrics

    def _value(self, features: Tensor) -> Tensor:
        return self.value(features, features[:, :0])[0]

    def _run_optimizer_step(self, name: str, loss: Tensor) -> bool:
        """Take one optimizer step of a network; return False, without a step, if loss or gradient is not finite."""
        finite = math.isfinite(loss.item()) and math.isfinite(backward(self._optimizers[name], loss, self._clip))
        if finite:
            self._optimizers[name].step()
        return finite

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with the normalized features."""
        return {name: part.state_dict() for name, part in self._parts().items()} | {"features": self._features}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned.

        Raises:
            ValueError, KeyError, RuntimeError: the state belongs to other networks or other data.
        """
        if state["features"].shape != self._features.shape:
            raise ValueError(
                f"the features have shape {[*state['features'].shape]} instead of {[*self._features.shape]}"
            )
        load_parts(self._parts(), state)
        self._features = state["features"].to(self._features)

    def _parts(self) -> dict[str, Any]:
        return {"q": self.critics, "q_target": self.targets, "v": self.value, **self._optimizers}


def _standardize(values: Tensor) -> Tensor:
    """Return values [N, X] with each column normalized to mean 0 and standard deviation 1."""
    values = values.float()
    return (values - values.mean(0)) / values.std(0, correction=0).clamp(min=MINIMUM_SCALE)
