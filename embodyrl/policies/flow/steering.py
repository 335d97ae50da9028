"""What is learned around a frozen flow: the noise that it starts from, or a correction of what it proposes.

The first is DSRL (Wagenmaker et al., arXiv 2506.15799), the second a residual policy (ResiP, arXiv 2407.16677; Policy
Decorator, arXiv 2412.13630).
"""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn

from embodyrl.policies.flow.likelihood import STEP, Chosen, Velocity, flow_sde, follow_ode, normals, times
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.settings import ChunkRecord, ChunkShape, FlowSettings, Likelihood
from embodyrl.policies.steering.actor import Steered, SteeringActor, executed
from embodyrl.policies.tensors import on_device
from embodyrl.types import FloatArray, IntArray, Observation


class Steering(ABC):
    """Chunks of a frozen flow that an actor has a say in; implements `ChunkLikelihood`."""

    def __init__(self, cfg: FlowSettings, shape: ChunkShape, actor: SteeringActor) -> None:
        self._cfg, self._shape, self._actor = cfg, shape, actor
        self.record = ChunkRecord.of(cfg, shape)

    @abstractmethod
    def features(self, velocity: Velocity, count: int, device: torch.device) -> Tensor:
        """What the actor sees [B, F], a function of the observation; without gradients."""

    @abstractmethod
    def _chunk(
        self, velocity: Velocity, features: Tensor, choice: Tensor, seeds: IntArray | None, temperature: float
    ) -> Tensor:
        """Chunks [B, H, D] of choices [B, rows, n]; without seeds greedily."""

    def greedy(self, velocity: Velocity, count: int, device: torch.device) -> Tensor:
        """Chunks [B, H, D] at the Gaussian's mean."""
        features = self.features(velocity, count, device)
        return self._chunk(velocity, features, self._actor.greedy(features), None, 0.0)

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> Chosen:
        """Choose by the seeds (see `ChunkLikelihood`)."""
        features = self.features(velocity, len(seeds), device)
        choice, tokens, logprob = self._actor.sample(features, seeds, temperature)
        return Chosen(state=self._chunk(velocity, features, choice, seeds, temperature), tokens=tokens, logprob=logprob)

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Score what was kept (see `ChunkLikelihood`)."""
        return self._actor.score(self.features(velocity, len(tokens), device), tokens, temperature)


class SteeredStart(Steering):
    """What is chosen, stretched to `noise_bound`, is the noise that the flow starts from."""

    def features(self, velocity: Velocity, count: int, device: torch.device) -> Tensor:
        """The expert's mean hidden row [B, width] in the middle of the noise."""
        middle = torch.zeros(count, self._shape.horizon, self._shape.width, device=device)
        with torch.no_grad():
            return velocity(middle, torch.ones(count, device=device))[1].mean(1)

    def _chunk(
        self, velocity: Velocity, features: Tensor, choice: Tensor, seeds: IntArray | None, temperature: float
    ) -> Tensor:
        """By the frozen flow's ODE, or with `steered_noise` and seeds its SDE."""
        # Noise of all rows, or of one that stands for all.
        rows = (self._cfg.noise_bound * choice.tanh()).unflatten(2, (-1, self._shape.width))[:, 0]
        x = rows.expand(-1, self._shape.horizon, -1)
        if seeds is None or not self._cfg.steered_noise:
            return follow_ode(velocity, x, self._cfg.num_steps)
        level = x.new_tensor(self._cfg.steered_noise)
        for k in range(self._cfg.num_steps):
            t, end = times(torch.full((len(x),), k, device=x.device), self._cfg.num_steps)
            step = flow_sde(x, velocity(x, t.flatten())[0], t, end, level)
            x = step.mean + step.std * temperature * normals(seeds, STEP + k, x.shape[1:], x.device)
        return x


class Correction(Steering):
    """What is chosen, times `residual_scale`, is added to the executed part of the chunk that the flow proposes.

    The proposal is the flow's greedy chunk, from `start` [B, H, D], and part of the features.
    """

    def __init__(self, cfg: FlowSettings, shape: ChunkShape, actor: SteeringActor, start: Tensor) -> None:
        super().__init__(cfg, shape, actor)
        self._start = start

    def features(self, velocity: Velocity, count: int, device: torch.device) -> Tensor:
        """The expert's mean hidden row in the flow's first step, and the proposal's executed numbers, [B, F]."""
        hidden: list[Tensor] = []

        def watched(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            v, rows = velocity(x, t)
            hidden.append(rows)
            return v, rows

        with torch.no_grad():
            chunk = follow_ode(watched, self._start, self._cfg.num_steps)
        proposed = chunk[:, : self._shape.executed, : self._shape.action_dim]
        return torch.cat([hidden[0].mean(1), proposed.flatten(1)], 1)

    def _chunk(
        self, velocity: Velocity, features: Tensor, choice: Tensor, seeds: IntArray | None, temperature: float
    ) -> Tensor:
        shape, rows = self._shape, executed(features, choice.tanh().flatten(1), self._actor.shape)
        # Nobody looks at the rest.
        return nn.functional.pad(rows, (0, shape.width - shape.action_dim, 0, shape.horizon - shape.executed))


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
