"""What is learned around a frozen flow: the noise that it starts from, or a correction of what it proposes.

The first is DSRL (Wagenmaker et al., arXiv 2506.15799), the second a residual policy (ResiP, arXiv 2407.16677; Policy
Decorator, arXiv 2412.13630).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from embodyrl.policies.actor_critic.critics import Critics
from embodyrl.policies.actor_critic.heads import SquashedHead
from embodyrl.policies.flow.likelihood import START, STEP, Chosen, Velocity, flow_sde, follow_ode, normals, times
from embodyrl.policies.flow.settings import STEERING_WIDTHS, ChunkRecord, ChunkShape, FlowSettings, SteeringShape
from embodyrl.policies.tensors import on_device
from embodyrl.types import IntArray


class SteeringActor(nn.Module):
    """A squashed Gaussian over rows of chosen numbers, from features of the frozen flow.

    At first its mean is near 0 (`gain` 0: exactly), where greedy acting is that of the flow alone.
    """

    def __init__(self, shape: SteeringShape, gain: float) -> None:
        super().__init__()
        first, second = STEERING_WIDTHS
        last = nn.Linear(second, 2 * shape.rows * shape.numbers)
        nn.init.orthogonal_(last.weight, gain)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(
            nn.Linear(shape.features, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), last
        )
        self.head = SquashedHead((None,) * shape.numbers, (None,) * shape.numbers)
        self.shape = shape

    def forward(self, features: Tensor) -> Tensor:
        """Outputs [B, rows, 2n] for the head, of features [B, F]."""
        return self.layers(features).unflatten(1, (self.shape.rows, -1))


class Steering(ABC):
    """Chunks of a frozen flow that an actor has a say in; implements `ChunkLikelihood`.

    The log-probability of a chunk is that of what the actor chose; what is chosen for the whole chunk stands at its
    first action. Kept are the seed, and the Gaussian's sample before it is squashed to -1..1.
    """

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
        mean, _ = self._actor.head.spread(self._actor(features))
        return self._chunk(velocity, features, mean, None, 0.0)

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> Chosen:
        """Choose by the seeds (see `ChunkLikelihood`)."""
        features = self.features(velocity, len(seeds), device)
        outputs = self._actor(features)
        mean, log_std = self._actor.head.spread(outputs)
        choice = mean + log_std.exp() * temperature * normals(seeds, START, mean.shape[1:], device)
        logprob, _ = self._score(outputs, choice, temperature)
        return Chosen(
            state=self._chunk(velocity, features, choice, seeds, temperature),
            tokens=self.record.layout.pack(seeds[:, None], choice.flatten(1).cpu().numpy()),
            logprob=logprob,
        )

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Score what was kept (see `ChunkLikelihood`)."""
        outputs = self._actor(self.features(velocity, len(tokens), device))
        choice = on_device(self.record.layout.unpack(tokens)[1], device)
        return self._score(outputs, choice.unflatten(1, (self._actor.shape.rows, -1)), temperature)

    def _score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """[B, K, 1] each."""
        pair = self._actor.head.score(outputs, choice, temperature)
        rest = (0, 0, 0, self._shape.executed - self._actor.shape.rows)
        logprob, entropy = (nn.functional.pad(part.sum(2, keepdim=True), rest) for part in pair)
        return logprob, entropy


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
        shape = self._shape
        rows = executed(features, choice.tanh().flatten(1), shape, self._cfg.residual_scale)
        # Nobody looks at the rest.
        return nn.functional.pad(rows, (0, shape.width - shape.action_dim, 0, shape.horizon - shape.executed))


def executed(features: Tensor, corrections: Tensor, shape: ChunkShape, scale: float) -> Tensor:
    """Chunks [B, K, A] of features [B, F], whose last numbers are the proposal, and corrections [B, L] in -1..1."""
    proposed = features[:, -shape.executed * shape.action_dim :].unflatten(1, (-1, shape.action_dim))
    return proposed + scale * corrections.unflatten(1, (-1, shape.action_dim))


class CriticsOfExecuted(Critics):
    """Critics that see features, the proposal among them, and what is executed (arXiv 2412.13630)."""

    def __init__(
        self,
        count: int,
        shape: ChunkShape,
        scale: float,
        features: int,
        generator: torch.Generator,
        *,
        layer_norm: bool,
    ) -> None:
        widths = (features + shape.executed * shape.action_dim, *STEERING_WIDTHS)
        super().__init__(count, widths, generator, layer_norm=layer_norm)
        self._shape, self._scale = shape, scale

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """[count, B] of features [B, F] and corrections [B, L] in -1..1."""
        return super().forward(features, executed(features, actions, self._shape, self._scale).flatten(1))
