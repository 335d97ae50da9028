"""Actor-critic policy: `act` and `score` share one code path, so that their log-probabilities agree.

The raw samples of a head, `choice` [B, K, A], are category ids (int64) or real numbers. Real numbers are scaled so that
-1 and 1 are the bounds of a bounded action dimension.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.config.paths import resolve_asset
from embodyrl.policies.actor_critic.settings import ActorCriticSettings
from embodyrl.policies.actor_critic.shape import CHANNELS, IMAGE_FEATURES, WEIGHTS_FILE, NetShape
from embodyrl.policies.actor_critic.tanh import Tanh
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.tensors import compute_categorical_scores, sample_inverse_cdf, standard_normal, to_device
from embodyrl.policies.weights import fill_weights
from embodyrl.types import FloatArray, ImitationLoss, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec

LogStd = float | tuple[float, ...]
"""Log standard deviation of all dimensions, or of each dimension."""
_MASKED_LOGIT = -1e9
"""Logit of padded categories: their probability is exactly 0, and their term 0 * -1e9 of the entropy is finite."""


class CategoricalHead(nn.Module):
    """One categorical distribution per action dimension; temperature divides the logits."""

    _category_index: Tensor
    _padding: Tensor

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        max_categories = max(sizes)
        self._uniform_shape = (len(sizes), max_categories) if min(sizes) == max_categories else None
        """(number of dimensions, categories per dimension) if all dimensions have the same number of categories, else
        None."""
        offsets = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
        column = torch.arange(max_categories)
        padding = column[None] >= torch.tensor(sizes)[:, None]
        self.register_buffer("_category_index", (offsets[:, None] + column).masked_fill(padding, 0), persistent=False)
        self.register_buffer("_padding", padding, persistent=False)

    def choose(self, outputs: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
        """Sample category ids [B, K, A] from outputs [B, K, O] and uniform noise; without noise, choose greedily."""
        logits = self._compute_logits(outputs, temperature)
        if noise is None:
            return logits.argmax(-1)
        sample = sample_inverse_cdf(logits, noise)
        # A rounded sum may be below 1, and the last entries of short dimensions are padding.
        return sample if self._uniform_shape else sample.minimum((~self._padding).sum(-1) - 1)

    def score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities and entropies [B, K, A] of category ids [B, K, A]."""
        return compute_categorical_scores(self._compute_logits(outputs, temperature), choice)

    def to_tokens(self, choice: Tensor) -> IntArray:
        """Flatten category ids [B, K, A] to tokens [B, L], L = K A."""
        return choice.flatten(1).cpu().numpy()

    def to_choice(self, tokens: IntArray) -> np.ndarray:
        """Return the tokens [B, L] unchanged, because they are category ids."""
        return tokens

    def to_actions(self, choice: np.ndarray) -> FloatArray:
        """Convert category ids to actions, both [B, K, A]."""
        return choice.astype(np.float32)

    def from_actions(self, actions: FloatArray) -> np.ndarray:
        """Convert actions to category ids, both [B, K, A]."""
        return np.rint(actions).astype(np.int64)

    def _compute_logits(self, outputs: Tensor, temperature: float) -> Tensor:
        """Return logits [B, K, A, C]; C: largest number of categories of a dimension."""
        outputs = outputs if temperature == 1.0 else outputs / temperature
        if self._uniform_shape:  # no padding needed
            return outputs.view(*outputs.shape[:-1], *self._uniform_shape)
        return outputs[..., self._category_index].masked_fill(self._padding, _MASKED_LOGIT)


class GaussianHead(nn.Module):
    """Diagonal Gaussian over actions; its standard deviation [A] does not depend on the observation.

    Same interface as `CategoricalHead`. Temperature multiplies the standard deviation. Samples are unbounded: the
    environment clips the action. A token is the bit pattern of a float32 sample, so that log-probabilities are those
    of the exact samples.

    With a correlation r the noise of a chunk is autoregressive, e_k = r e_(k-1) + sqrt(1 - r^2) n_k (Korenkevych et
    al., arXiv 1903.11524, order 1): it has the same deviation as n, but its sum over K actions does not average out.
    An action's log-probability is conditioned on the previous action; the chunk's log-probability is the sum.
    """

    def __init__(
        self, low: tuple[float | None, ...], high: tuple[float | None, ...], log_std: LogStd, correlation: float = 0.0
    ) -> None:
        super().__init__()
        self._correlation, self._innovation_scale = correlation, math.sqrt(1.0 - correlation**2)
        self.log_std = nn.Parameter(torch.zeros(len(low)) + torch.as_tensor(log_std))
        self._center, self._half_range = np.asarray([*map(_get_center_and_half_range, low, high)], np.float32).T

    def get_mean_and_log_std(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [B, K, A], which is `outputs`, and the log standard deviation [A]."""
        return outputs, self.log_std

    def choose(self, outputs: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
        """Sample raw actions [B, K, A] by applying the inverse CDF to uniform noise; without noise, return the mean."""
        mean, log_std = self.get_mean_and_log_std(outputs)
        if noise is None:
            return mean
        deviation = log_std.exp() if temperature == 1.0 else log_std.exp() * temperature
        return mean + deviation * self._correlate_noise(standard_normal(noise))

    def score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log density and the entropy of raw samples, all [B, K, A]."""
        mean, log_std = self.get_mean_and_log_std(outputs)
        log_std = log_std if temperature == 1.0 else log_std + math.log(temperature)
        distance = (choice - mean) / log_std.exp()
        if self._correlation:
            innovation = (distance[:, 1:] - self._correlation * distance[:, :-1]) / self._innovation_scale
            distance = torch.cat([distance[:, :1], innovation], 1)
            log_std = log_std + math.log(self._innovation_scale) * (torch.arange(mean.shape[1]) > 0).to(mean)[:, None]
        logprob = torch.addcmul(-log_std - _HALF_LOG_TWO_PI, distance, distance, value=-0.5)
        return logprob, (log_std + (0.5 + _HALF_LOG_TWO_PI)).expand_as(logprob)

    def _correlate_noise(self, noise: Tensor) -> Tensor:
        """Convert normal noise [B, K, A] to AR(1) noise, which correlates consecutive actions of a chunk."""
        if not self._correlation:
            return noise
        steps = [noise[:, 0]]
        for innovation in noise[:, 1:].unbind(1):
            steps.append(self._correlation * steps[-1] + self._innovation_scale * innovation)
        return torch.stack(steps, 1)

    def to_tokens(self, choice: Tensor) -> IntArray:
        """Convert raw samples [B, K, A] to tokens [B, L], the bit patterns of float32."""
        return choice.flatten(1).cpu().numpy().astype(np.float32, copy=False).view(np.int32).astype(np.int64)

    def to_choice(self, tokens: IntArray) -> np.ndarray:
        """Convert tokens [B, L] back to raw samples [B, L] without rounding."""
        return tokens.astype(np.int32).view(np.float32)

    def to_actions(self, choice: np.ndarray) -> FloatArray:
        """Scale raw samples to actions, both [B, K, A]; -1 and 1 map to the action bounds."""
        return self._center + self._half_range * choice

    def from_actions(self, actions: FloatArray) -> np.ndarray:
        """Convert actions to raw samples, both [B, K, A]; the inverse of `to_actions`."""
        return ((actions - self._center) / self._half_range).astype(np.float32)


_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def _get_center_and_half_range(low: float | None, high: float | None) -> tuple[float, float]:
    """Return the center and half the width of the action range; the width is 2 if a bound is missing."""
    if low is None and high is None:
        return 0.0, 1.0
    if low is None or high is None:  # a range around 0 could be out of bounds
        return (low + 1.0 if low is not None else float(high or 0.0) - 1.0), 1.0
    # Equal bounds: 1.0 avoids a division by 0.
    return (low + high) / 2, (high - low) / 2 or 1.0


VALUE_HEAD = "value_head"

_Initialize = Callable[[nn.Linear | nn.Conv2d, float], nn.Module]
"""Function that initializes the weights of a layer with a given gain."""


class ActorCritic(nn.Module):
    """Policy and value networks with shared convolutions."""

    def __init__(
        self, shape: NetShape, seed: int, log_std: LogStd = 0.0, correlation: float = 0.0, orthogonal: bool = True
    ) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        init = partial(_initialize_layer, generator=generator, orthogonal=orthogonal)
        self.encoder = _build_convolutions(shape, init) if shape.num_images else None
        # Nearly uniform probabilities at first; orthogonal weights as in arXiv 2005.12729.
        widths = (shape.features, *shape.hidden)
        self.policy = _build_mlp((*widths, shape.num_actions * shape.outputs), shape.activation, init, gain=0.01)
        self.head = self.build_head(shape, log_std, correlation)
        self.states = RunningMoments(shape.state_dim) if shape.normalized else None
        self.value_head = (
            _build_mlp((*widths, shape.value_dim), shape.activation, init, gain=1.0) if shape.value_dim else None
        )

    def build_head(self, shape: NetShape, log_std: LogStd, correlation: float) -> CategoricalHead | GaussianHead:
        """Build the action distribution; the initial `log_std` and `correlation` apply to continuous actions."""
        if shape.sizes:
            return CategoricalHead(shape.sizes)
        return GaussianHead(shape.low, shape.high, log_std, correlation)

    def features(self, images: Tensor | None, state: Tensor) -> Tensor:
        """Return features [B, F] of states [B, S] and of images [B, C, H, W, 3 or 1] (uint8), or of states only."""
        if self.states is not None:
            state = self.states(state)
        if self.encoder is None:
            return state
        assert images is not None
        pixels = images.permute(0, 1, 4, 2, 3).flatten(1, 2).float().div_(255.0)
        # On a CPU, convolutions take half as long with channels-last memory.
        return torch.cat([self.encoder(pixels.contiguous(memory_format=torch.channels_last)), state], dim=1)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the outputs [B, K, O] of the policy network, which are the inputs of the action head."""
        return self.policy(features).view(-1, self.shape.num_actions, self.shape.outputs)

    def value(self, features: Tensor) -> Tensor:
        """Return value estimates [B, V]."""
        return features[:, :0] if self.value_head is None else self.value_head(features)


class RunningMoments(nn.Module):
    """Running mean and variance of vectors [S], stored in buffers that are saved with the weights."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Standardize x [B, S], and clip the result to +-10."""
        return ((x - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10.0, 10.0)

    def update(self, x: Tensor) -> None:
        """Update the statistics with vectors [B, S] (parallel algorithm of Chan, Golub and LeVeque, 1979)."""
        # In float32 the mean of millions of states would stop changing.
        x = x.double()
        old_count, new_count = self.count.double(), float(len(x))
        total = old_count + new_count
        delta = x.mean(0) - self.mean.double()
        sum_of_squares = (
            self.var.double() * old_count
            + x.var(0, unbiased=False) * new_count
            + delta.square() * (old_count * new_count / total)
        )
        self.mean.copy_(self.mean.double() + delta * (new_count / total))
        self.var.copy_(sum_of_squares / total)
        self.count.copy_(total)


class ActorCriticPolicy:
    """Policy with actor and critic networks; implements `Policy` and `LearnsStatistics`."""

    network = ActorCritic
    """Class of the policy and value networks; subclasses may set another class."""

    def __init__(self, spec: PolicySpec, shape: NetShape, request: PolicyRequest, cfg: ActorCriticSettings) -> None:
        self.spec = spec
        self._shape = shape
        self._chunk = spec.num_action_chunks, spec.action_dim
        self._device = torch.device(request.device)
        self._temperature = request.temperature
        log_std = request.action_log_std or 0.0 if cfg.log_std_init is None else cfg.log_std_init
        self._net = self.network(shape, request.seed, log_std, cfg.noise_correlation, cfg.ortho_init)
        if cfg.path is not None:
            self.load_weights(resolve_asset(cfg.path))
        self._net.to(self._device).requires_grad_(request.trainable)
        self.module: nn.Module = self._net

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Sample a chunk for each observation (see `Policy.act`).

        Tokens are category ids, or bit patterns of the Gaussian's float32 samples (see `GaussianHead`).
        """
        features = self.features(obs)
        outputs, value = self._net.outputs(features), self._net.value(features)
        scale = temperature or self._temperature
        uniform = None
        if noise is not None:
            uniform = to_device(noise, self._device).view(-1, *self._chunk)
        choice = self._net.head.choose(outputs, uniform, scale)
        logprob, _ = self._net.head.score(outputs, choice, scale)
        return PolicyOutput(
            actions=self._net.head.to_actions(choice.cpu().numpy()),
            tokens=self._net.head.to_tokens(choice),
            logprob=logprob.flatten(1).cpu().numpy(),
            value=value.cpu().numpy(),
        )

    @torch.no_grad()
    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V] (see `Policy.values`)."""
        return self._net.value(self.features(obs)).cpu().numpy()

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities, entropies and values of tokens [B, L] from `act` (see `Policy.score`)."""
        features = self.features(obs)
        outputs, value = self._net.outputs(features), self._net.value(features)
        choice = to_device(self._net.head.to_choice(tokens), self._device).view(-1, *self._chunk)
        logprob, entropy = self._net.head.score(outputs, choice, self._temperature)
        return PolicyScores(logprob=logprob.flatten(1), entropy=entropy.flatten(1), value=value)

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationLoss:
        """Return the negative log-likelihood and the accuracy or error of actions [B, K, A] (see `Policy.imitate`)."""
        outputs = self._net.outputs(self.features(obs))
        choice = to_device(self._net.head.from_actions(actions), self._device)
        logprob, _ = self._net.head.score(outputs, choice, 1.0)
        greedy = self._net.head.choose(outputs.detach(), None, 1.0)
        correct = (greedy == choice).float().flatten(1).mean(1)
        error = None
        if greedy.is_floating_point():
            distance = np.abs(self._net.head.to_actions(greedy.cpu().numpy()) - actions).reshape(len(actions), -1)
            error = to_device(distance.mean(1, dtype=np.float32), self._device)
        return ImitationLoss(loss=-logprob.flatten(1).mean(1), accuracy=correct, error=error)

    @torch.no_grad()
    def update_statistics(self, obs: Observation) -> None:
        """Update the observation statistics with the states of a batch (see `LearnsStatistics`)."""
        if self._net.states is not None and len(obs):
            self._net.states.update(to_device(np.ascontiguousarray(obs.state), self._device))

    def save(self, folder: Path) -> None:
        """Write `model.safetensors` and `config.json`."""
        save_file({k: v.detach().cpu().contiguous() for k, v in self._net.state_dict().items()}, folder / WEIGHTS_FILE)
        self._shape.save(folder)

    def load_weights(self, folder: Path) -> None:
        """Replace the weights in place (see `Policy.load_weights`).

        A value head is loaded only if the file and the model have one, so GRPO can start from weights of PPO.
        """
        self._shape.check(folder)
        fix = "Use the environment and model settings of its training."
        fill_weights(self._net.state_dict(), folder / WEIGHTS_FILE, optional=(f"{VALUE_HEAD}.",), fix=fix)

    def features(self, obs: Observation) -> Tensor:
        """Return features [B, F] of observations, the inputs of the policy and value networks, with gradients."""
        shape, state = self._shape, to_device(np.ascontiguousarray(obs.state), self._device)
        if not shape.num_images:
            return self._net.features(None, state)
        # Slicing avoids a copy of unused images and channels.
        images = obs.images[:, : shape.num_images, ..., : 1 if shape.grey else 3]
        return self._net.features(to_device(images, self._device), state)


def _build_mlp(widths: tuple[int, ...], activation: str, init: _Initialize, *, gain: float) -> nn.Sequential:
    pairs = list(pairwise(widths))
    gains = [2.0**0.5] * (len(pairs) - 1) + [gain]
    layers: list[nn.Module] = []
    for (a, b), layer_gain in zip(pairs, gains, strict=True):
        layers += [init(nn.Linear(a, b), layer_gain), Tanh() if activation == "tanh" else nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _build_convolutions(shape: NetShape, init: _Initialize) -> nn.Sequential:
    """Build the layers that map images with P channels in total [B, P, H, W] to features [B, IMAGE_FEATURES]."""
    channels = (shape.input_channels, *CHANNELS)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1)
        layers += [init(conv, 2.0**0.5), nn.ReLU()]
    dense = init(nn.Linear(shape.conv_features, IMAGE_FEATURES), 2.0**0.5)
    return nn.Sequential(*layers, _Flatten(), dense, nn.ReLU())


class _Flatten(nn.Flatten):
    """Flatten layer whose gradient has the memory format of the convolutions."""

    def forward(self, input: Tensor) -> Tensor:
        """Flatten [B, P, H, W] to [B, P * H * W]."""
        if input.requires_grad:
            input.register_hook(partial(Tensor.contiguous, memory_format=torch.channels_last))
        return input.flatten(1)


def _initialize_layer(
    layer: nn.Linear | nn.Conv2d, gain: float, *, generator: torch.Generator, orthogonal: bool
) -> nn.Module:
    assert layer.bias is not None
    if orthogonal:
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        nn.init.zeros_(layer.bias)
        return layer
    # Torch's default initialization, but with the policy's generator.
    bound = layer.weight[0].numel() ** -0.5
    for tensor in (layer.weight, layer.bias):
        nn.init.uniform_(tensor, -bound, bound, generator=generator)
    return layer
