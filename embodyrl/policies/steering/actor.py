"""Actor for a frozen model, its critics, and the base class of policies with such an actor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embodyrl.errors import ConfigError
from embodyrl.policies.soft_actor.critics import Critics
from embodyrl.policies.soft_actor.head import SquashedHead
from embodyrl.policies.steering.settings import WIDTHS, SteeringShape
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.sampling import START, SampledChunks, build_scores, get_seeds, sample_normals
from embodyrl.types import FloatArray, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec

VALUE_WIDTHS = (256, 128)
"""Widths of the hidden layers of a value head."""


class SteeringActor(nn.Module):
    """Actor for a frozen model, which maps features [B, F] to a squashed Gaussian over outputs [B, rows, n].

    Its initial mean is near 0 (exactly 0 with `gain` 0), where greedy actions equal those of the frozen model. The
    log-probability of a chunk is that of the actor's sample; if one row applies to the whole chunk, the log-probability
    is stored at the first action. Tokens contain the seed, and the Gaussian's sample before it is squashed to -1..1.
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
        """Map features [B, F] to the head's inputs [B, rows, 2n]: means and log standard deviations."""
        return self.layers(features).unflatten(1, (self.shape.rows, -1))

    def compute_greedy(self, features: Tensor) -> Tensor:
        """Return the mean of the Gaussian, [B, rows, n]."""
        return self.head.get_mean_and_log_std(self(features))[0]

    def sample(self, features: Tensor, seeds: IntArray, temperature: float) -> SampledChunks:
        """Sample one output [rows, n] per seed [B]; return outputs, tokens and log-probabilities [B, K, 1]."""
        outputs = self(features)
        mean, log_std = self.head.get_mean_and_log_std(outputs)
        choice = mean + log_std.exp() * temperature * sample_normals(seeds, START, mean.shape[1:], features.device)
        tokens = self.shape.layout.pack(seeds[:, None], choice.flatten(1).cpu().numpy())
        return SampledChunks(state=choice, tokens=tokens, logprob=self._score(outputs, choice, temperature)[0])

    def score(self, features: Tensor, tokens: IntArray, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of recorded samples, [B, K, 1] each."""
        return self._score(self(features), self.unpack_samples(tokens, features.device), temperature)

    def unpack_samples(self, tokens: IntArray, device: torch.device) -> Tensor:
        """Unpack the samples [B, rows, n] from tokens."""
        return to_device(self.shape.layout.unpack(tokens)[1], device).unflatten(1, (self.shape.rows, -1))

    def _score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        pair = self.head.score(outputs, choice, temperature)
        padding = (0, 0, 0, self.shape.actions - self.shape.rows)
        logprob, entropy = (nn.functional.pad(part.sum(2, keepdim=True), padding) for part in pair)
        return logprob, entropy


class ModuleWithHeads(nn.Module):
    """Module that contains a network and the heads that RL adds."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.value_head: nn.Module | None = None
        self.noise_actor: SteeringActor | None = None
        self.residual_actor: SteeringActor | None = None

    def add_value_head(self, features: int, value_dim: int) -> None:
        """Add a value head that maps features [B, F] to values [B, V], unless V is 0."""
        if value_dim:
            layers: list[nn.Module] = []
            for inputs, outputs in pairwise((features, *VALUE_WIDTHS)):
                layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            self.value_head = nn.Sequential(*layers, nn.Linear(VALUE_WIDTHS[-1], value_dim))

    def add_actor(self, shape: SteeringShape | None) -> None:
        """Add a trainable actor for the frozen network, unless the shape is None."""
        if shape is not None and shape.proposes:
            self.residual_actor = SteeringActor(shape, gain=0.0)
        elif shape is not None:
            self.noise_actor = SteeringActor(shape, gain=0.01)

    @property
    def steering_actor(self) -> SteeringActor | None:
        """Trained actor for the frozen network, if any."""
        return self.noise_actor or self.residual_actor


def get_proposed_actions(features: Tensor, shape: SteeringShape) -> Tensor:
    """Return the proposed actions [B, K, A], which are the last columns of features [B, F]."""
    return features[:, -shape.actions * shape.numbers :].unflatten(1, (-1, shape.numbers))


def apply_corrections(features: Tensor, corrections: Tensor, shape: SteeringShape) -> Tensor:
    """Return executed chunks [B, K, A] for features [B, F] and corrections [B, A or K A] relative to their bound."""
    return get_proposed_actions(features, shape) + shape.bound * corrections.unflatten(1, (-1, shape.numbers))


class ResidualCritics(Critics):
    """Critics whose input is the executed actions: proposed actions plus corrections (arXiv 2412.13630)."""

    def __init__(self, count: int, shape: SteeringShape, generator: torch.Generator, *, layer_norm: bool) -> None:
        widths = (shape.features + shape.actions * shape.numbers, *WIDTHS)
        super().__init__(count, widths, generator, layer_norm=layer_norm)
        self._shape = shape

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Return Q values [count, B] for features [B, F] and corrections [B, A or K A] as fractions of their bound."""
        return super().forward(features, apply_corrections(features, actions, self._shape).flatten(1))


class FrozenOutputs(NamedTuple):
    """Outputs of a frozen model for B observations."""

    features: Tensor
    """[B, F] inputs of the actor, without gradients."""
    value: Tensor
    """[B, V] values, with gradients."""
    model: Any
    """Encoded observations, passed to `SteeredPolicy._execute`."""


class SteeredPolicy(ABC):
    """Base class of policies with a frozen model and a trained actor; implements `SoftActor`."""

    spec: PolicySpec
    module: nn.Module
    encoder: Sequence[nn.Parameter] = ()
    frozen = True
    _device: torch.device
    _temperature: float
    _module: ModuleWithHeads

    @property
    def _actor(self) -> SteeringActor:
        actor = self._module.steering_actor
        assert actor is not None
        return actor

    @abstractmethod
    def _run_frozen_model(self, obs: Observation) -> FrozenOutputs: ...

    @abstractmethod
    def _execute(
        self, obs: Observation, frozen: FrozenOutputs, outputs: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        """Convert the actor's outputs [B, rows, n] in -1..1 to actions [B, K, A]; `seeds` None: without noise."""

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return a chunk for each observation (see `Policy.act`).

        Greedy chunks use the Gaussian's mean and have zero tokens.
        """
        frozen, scale = self._run_frozen_model(obs), temperature or self._temperature
        seeds = None if noise is None else get_seeds(noise)
        if seeds is None:
            sampled = SampledChunks.from_greedy(self._actor.compute_greedy(frozen.features))
        else:
            sampled = self._actor.sample(frozen.features, seeds, scale)
        actions = self._execute(obs, frozen, sampled.state.tanh(), seeds, scale)
        return sampled.to_output(actions, frozen.value, self.spec)

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities, entropies and values of actor samples [B, L], with gradients of the actor only."""
        frozen = self._run_frozen_model(obs)
        scores = self._actor.score(frozen.features, tokens, self._temperature)
        return build_scores(scores, frozen.value, self.spec)

    def save(self, folder: Path) -> None:
        """Write the weights (see `Policy.save`) and the shape of the actor."""
        super().save(folder)  # type: ignore[misc]  (method of the policy without an actor)
        self._actor.shape.save(folder)

    def features(self, obs: Observation) -> Tensor:
        """Return the inputs of actor and critics [B, F], without gradients."""
        return self._run_frozen_model(obs).features

    @abstractmethod
    def _normalize_actions(self, actions: FloatArray, obs: Observation) -> Tensor:
        """Return actions [B, K, A] in the frozen model's normalized units."""

    @property
    def _key(self) -> str:
        """Return the config key and value that freeze the model, for error messages."""
        assert self.spec.steering is not None
        return self.spec.steering.key

    @property
    def width(self) -> int:
        """L: number of actor outputs per chunk."""
        return self._actor.shape.width

    def sample(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Sample noise or corrections [B, L], divided by their bound (see `SoftActor.sample`)."""
        return self._actor.head.sample(self._actor(features))

    def tokens_to_chunks(self, tokens: IntArray) -> Tensor:
        """Return the noise or corrections in tokens, as fractions of the bound (see `SoftActor.tokens_to_chunks`)."""
        rows, shape = self._actor.unpack_samples(tokens, self._device).tanh(), self._actor.shape
        # Corrections are repeated for each action, because demonstrations have a separate correction for each action.
        return (rows.expand(-1, shape.actions, -1) if shape.proposes else rows).flatten(1)

    def normalize(self, actions: FloatArray, obs: Observation | None) -> Tensor:
        """Return the corrections that produce actions [B, K, A], as fractions of the bound (see `SoftActor.normalize`).

        Fractions beyond -1..1 are possible.

        Raises:
            ConfigError: the noise for given actions is unknown.
        """
        if not self._actor.shape.proposes:
            raise ConfigError(f"The actor of {self._key} outputs noise, not actions. Remove algorithm.demonstrations.")
        assert obs is not None, "the proposal depends on the observation"
        shape = self._actor.shape
        proposed = get_proposed_actions(self.features(obs), shape)
        return ((self._normalize_actions(actions, obs) - proposed) / shape.bound).flatten(1)

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Build critics with the sizes of the actor (see `SoftActor.build_critics`)."""
        shape, generator = self._actor.shape, torch.Generator().manual_seed(seed)
        if shape.proposes:
            critics = ResidualCritics(count, shape, generator, layer_norm=layer_norm)
        else:
            critics = Critics(count, (shape.features + shape.width, *WIDTHS), generator, layer_norm=layer_norm)
        return critics.to(self._device)


class ResidualPolicy(SteeredPolicy):
    """Base class of residual policies, whose actor corrects the greedy chunk of the frozen model."""

    _to_actions: Callable[[Tensor, Observation], FloatArray]
    """Method of the frozen policy that converts normalized actions [B, K, A] to those of the environment."""

    def _execute(
        self, obs: Observation, frozen: FrozenOutputs, outputs: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        return self._to_actions(apply_corrections(frozen.features, outputs.flatten(1), self._actor.shape), obs)
