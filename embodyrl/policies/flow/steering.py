"""Steering a frozen flow by the noise that it starts from (DSRL: Wagenmaker et al., arXiv 2506.15799)."""

import torch
from torch import Tensor, nn

from embodyrl.policies.actor_critic.heads import SquashedHead
from embodyrl.policies.flow.likelihood import START, STEP, Chosen, Velocity, flow_sde, follow_ode, normals, times
from embodyrl.policies.flow.settings import STEERING_WIDTHS, ChunkRecord, ChunkShape, FlowSettings
from embodyrl.policies.tensors import on_device
from embodyrl.types import IntArray


class NoiseActor(nn.Module):
    """A squashed Gaussian over the n numbers of noise that are chosen, from the expert's mean hidden row.

    At first its mean is near 0, where greedy acting begins with `greedy_start=zero`.
    """

    def __init__(self, width: int, numbers: int) -> None:
        super().__init__()
        first, second = STEERING_WIDTHS
        last = nn.Linear(second, 2 * numbers)
        nn.init.orthogonal_(last.weight, 0.01)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(width, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), last)
        self.head = SquashedHead((None,) * numbers, (None,) * numbers)
        self.numbers = numbers

    def forward(self, features: Tensor) -> Tensor:
        """Outputs [B, 1, 2n] for the head, of features [B, width]."""
        return self.layers(features)[:, None]


class SteeredStart:
    """Chunks of the ODE from chosen noise; implements `ChunkLikelihood`.

    The log-probability of a chunk is that of its noise, and stands at its first action. Kept are the seed, and the
    Gaussian's sample before it is squashed to -1..1 and stretched to `noise_bound`.
    """

    def __init__(self, cfg: FlowSettings, shape: ChunkShape, actor: NoiseActor) -> None:
        self._cfg, self._shape, self.actor = cfg, shape, actor
        self.record = ChunkRecord.of(cfg, shape)

    def features(self, velocity: Velocity, count: int, device: torch.device) -> Tensor:
        """The expert's mean hidden row [B, width] in the middle of the noise: a function of the observation."""
        middle = torch.zeros(count, self._shape.horizon, self._shape.width, device=device)
        with torch.no_grad():
            return velocity(middle, torch.ones(count, device=device))[1].mean(1)

    def greedy(self, velocity: Velocity, count: int, device: torch.device) -> Tensor:
        """The start [B, H, D] at the Gaussian's mean."""
        mean, _ = self.actor.head.spread(self.actor(self.features(velocity, count, device)))
        return self._start(mean)

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> Chosen:
        """Follow the ODE from noise that is drawn by the seeds (see `ChunkLikelihood`)."""
        outputs = self.actor(self.features(velocity, len(seeds), device))
        mean, log_std = self.actor.head.spread(outputs)
        choice = mean + log_std.exp() * temperature * normals(seeds, START, mean.shape[1:], device)
        logprob, _ = self._score(outputs, choice, temperature)
        return Chosen(
            state=self._follow(velocity, self._start(choice), seeds, temperature),
            tokens=self.record.layout.pack(seeds[:, None], choice.flatten(1).cpu().numpy()),
            logprob=logprob,
        )

    def _follow(self, velocity: Velocity, x: Tensor, seeds: IntArray, temperature: float) -> Tensor:
        """Chunks [B, H, D] of starts [B, H, D]: the frozen flow's ODE, or with `steered_noise` its SDE."""
        if not self._cfg.steered_noise:
            return follow_ode(velocity, x, self._cfg.num_steps)
        level = x.new_tensor(self._cfg.steered_noise)
        for k in range(self._cfg.num_steps):
            t, end = times(torch.full((len(x),), k, device=x.device), self._cfg.num_steps)
            step = flow_sde(x, velocity(x, t.flatten())[0], t, end, level)
            x = step.mean + step.std * temperature * normals(seeds, STEP + k, x.shape[1:], x.device)
        return x

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Score the kept noise (see `ChunkLikelihood`)."""
        outputs = self.actor(self.features(velocity, len(tokens), device))
        return self._score(outputs, self.choice(tokens, device), temperature)

    def choice(self, tokens: IntArray, device: torch.device) -> Tensor:
        """The Gaussian's sample [B, 1, n] that was kept."""
        return on_device(self.record.layout.unpack(tokens)[1], device)[:, None]

    def _start(self, choice: Tensor) -> Tensor:
        """Noise [B, H, D] of a choice [B, 1, n]: of all rows, or of one that stands for all."""
        rows = (self._cfg.noise_bound * choice.tanh()).unflatten(2, (-1, self._shape.width))[:, 0]
        return rows.expand(-1, self._shape.horizon, -1)

    def _score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """[B, K, 1] each."""
        pair = self.actor.head.score(outputs, choice, temperature)
        rest = (0, 0, 0, self._shape.executed - 1)
        logprob, entropy = (nn.functional.pad(part.sum(2, keepdim=True), rest) for part in pair)
        return logprob, entropy
