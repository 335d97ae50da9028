"""The actor beside a frozen model, its critics, and what all policies with one have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embodyrl.errors import ConfigError
from embodyrl.policies.actor_critic.critics import Critics
from embodyrl.policies.actor_critic.heads import SquashedHead
from embodyrl.policies.steering.settings import WIDTHS, SteeringShape
from embodyrl.policies.tensors import on_device
from embodyrl.policies.vla.sampling import START, Chosen, normals, seeds_of, spread
from embodyrl.types import FloatArray, ImitationScores, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec


class SteeringActor(nn.Module):
    """A squashed Gaussian over rows of chosen numbers, from features of the frozen model.

    At first its mean is near 0 (`gain` 0: exactly), where greedy acting is that of the model alone. The log-probability
    of a chunk is that of what was chosen; what is chosen for the whole chunk stands at its first action. Kept are the
    seed, and the Gaussian's sample before it is squashed to -1..1.
    """

    def __init__(self, shape: SteeringShape, gain: float) -> None:
        super().__init__()
        first, second = WIDTHS
        last = nn.Linear(second, 2 * shape.width)
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

    def greedy(self, features: Tensor) -> Tensor:
        """The Gaussian's mean [B, rows, n]."""
        return self.head.spread(self(features))[0]

    def sample(self, features: Tensor, seeds: IntArray, temperature: float) -> Chosen:
        """Choose [B, rows, n] by the seeds [B], with its tokens and its log-probability [B, K, 1]."""
        outputs = self(features)
        mean, log_std = self.head.spread(outputs)
        choice = mean + log_std.exp() * temperature * normals(seeds, START, mean.shape[1:], features.device)
        tokens = self.shape.layout.pack(seeds[:, None], choice.flatten(1).cpu().numpy())
        return Chosen(state=choice, tokens=tokens, logprob=self._score(outputs, choice, temperature)[0])

    def score(self, features: Tensor, tokens: IntArray, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [B, K, 1] each, of what was kept."""
        return self._score(self(features), self.kept(tokens, features.device), temperature)

    def kept(self, tokens: IntArray, device: torch.device) -> Tensor:
        """The sample [B, rows, n] that tokens hold."""
        return on_device(self.shape.layout.unpack(tokens)[1], device).unflatten(1, (self.shape.rows, -1))

    def _score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        pair = self.head.score(outputs, choice, temperature)
        rest = (0, 0, 0, self.shape.actions - self.shape.rows)
        logprob, entropy = (nn.functional.pad(part.sum(2, keepdim=True), rest) for part in pair)
        return logprob, entropy


def proposal(features: Tensor, shape: SteeringShape) -> Tensor:
    """Proposed actions [B, K, A], the last numbers of features [B, F]."""
    return features[:, -shape.actions * shape.numbers :].unflatten(1, (-1, shape.numbers))


def executed(features: Tensor, corrections: Tensor, shape: SteeringShape) -> Tensor:
    """Chunks [B, K, A] of features [B, F] and corrections [B, A or K A] in shares of their bound."""
    return proposal(features, shape) + shape.bound * corrections.unflatten(1, (-1, shape.numbers))


class CriticsOfExecuted(Critics):
    """Critics that see features, the proposal among them, and what is executed (arXiv 2412.13630)."""

    def __init__(self, count: int, shape: SteeringShape, generator: torch.Generator, *, layer_norm: bool) -> None:
        widths = (shape.features + shape.actions * shape.numbers, *WIDTHS)
        super().__init__(count, widths, generator, layer_norm=layer_norm)
        self._shape = shape

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """[count, B] of features [B, F] and corrections [B, A or K A] in shares of their bound."""
        return super().forward(features, executed(features, actions, self._shape).flatten(1))


class Seen(NamedTuple):
    """What a frozen model makes of B observations."""

    features: Tensor
    """[B, F] that the actor reads, without gradients."""
    value: Tensor
    """[B, V], with gradients."""
    model: Any
    """What `Steered._execute` needs of it."""


class Steered(ABC):
    """A policy with a frozen model and an actor beside it, which acts and learns; implements `SoftActor`."""

    spec: PolicySpec
    encoder: Sequence[nn.Parameter] = ()
    frozen = True
    _device: torch.device
    _temperature: float

    @property
    @abstractmethod
    def _actor(self) -> SteeringActor: ...

    @abstractmethod
    def _see(self, obs: Observation) -> Seen: ...

    @abstractmethod
    def _execute(
        self, obs: Observation, seen: Seen, choice: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        """Actions [B, K, A] of choices [B, rows, n] that are not yet squashed; without seeds greedily."""

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Choose a chunk for each observation (see `Policy.act`); greedy: the Gaussian's mean, with zero tokens."""
        seen, scale = self._see(obs), temperature or self._temperature
        seeds = None if noise is None else seeds_of(noise)
        if seeds is None:
            chosen = Chosen.greedily(self._actor.greedy(seen.features))
        else:
            chosen = self._actor.sample(seen.features, seeds, scale)
        tokens, logprob = chosen.kept(self.spec)
        actions = self._execute(obs, seen, chosen.state, seeds, scale)
        return PolicyOutput(actions=actions, tokens=tokens, logprob=logprob, value=seen.value.cpu().numpy())

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Log-probabilities, entropies and values of what was chosen [B, L], with gradients of the actor alone."""
        seen = self._see(obs)
        logprob, entropy = self._actor.score(seen.features, tokens, self._temperature)
        return PolicyScores(logprob=spread(logprob, self.spec), entropy=spread(entropy, self.spec), value=seen.value)

    def features(self, obs: Observation) -> Tensor:
        """What actor and critics see [B, F]; without gradients."""
        return self._see(obs).features

    @abstractmethod
    def _normalised(self, actions: FloatArray, obs: Observation) -> Tensor:
        """Actions [B, K, A] in the units of the proposal."""

    @property
    def width(self) -> int:
        """L: numbers that are chosen for a chunk."""
        return self._actor.shape.width

    def draw(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Draw noise or corrections [B, L], in shares of their bound (see `SoftActor.draw`)."""
        return self._actor.head.draw(self._actor(features))

    def chosen(self, tokens: IntArray) -> Tensor:
        """The noise, or the correction of each action, of tokens, in shares of its bound (see `SoftActor.chosen`)."""
        rows, shape = self._actor.kept(tokens, self._device).tanh(), self._actor.shape
        # As demonstrations have them, whose actions are no row that is repeated.
        return (rows.expand(-1, shape.actions, -1) if shape.proposes else rows).flatten(1)

    def normalise(self, actions: FloatArray, obs: Observation | None) -> Tensor:
        """Corrections that lead to given actions [B, K, A], also beyond the bound (see `SoftActor.normalise`).

        Raises:
            ConfigError: nobody knows what noise leads to them.
        """
        if not self._actor.shape.proposes:
            raise ConfigError(f"{self.spec.steers} chooses noise, and demonstrations hold actions. Fix: none of them.")
        assert obs is not None, "what is proposed depends on it"
        shape = self._actor.shape
        return ((self._normalised(actions, obs) - proposal(self.features(obs), shape)) / shape.bound).flatten(1)

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Networks as large as the actor (see `SoftActor.build_critics`)."""
        shape, generator = self._actor.shape, torch.Generator().manual_seed(seed)
        if shape.proposes:
            critics = CriticsOfExecuted(count, shape, generator, layer_norm=layer_norm)
        else:
            critics = Critics(count, (shape.features + shape.width, *WIDTHS), generator, layer_norm=layer_norm)
        return critics.to(self._device)

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationScores:
        """Nothing that could follow a demonstration is trained.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self.spec.steers} trains only the actor, with a frozen base model. Fix: leave model.likelihood out."
        )
