"""Actor-critic policy: `act` and `score` share one code path, so that their log-probabilities agree."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.config.paths import resolve_asset
from embodyrl.policies.actor_critic.networks import CategoricalHead, GaussianHead, build_head
from embodyrl.policies.actor_critic.settings import ActorCriticSettings
from embodyrl.policies.actor_critic.shape import CHANNELS, IMAGE_FEATURES, WEIGHTS_FILE, NetShape
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.tensors import on_device
from embodyrl.policies.weights import fill_weights
from embodyrl.types import FloatArray, ImitationScores, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec

VALUE_HEAD = "value_head"

_Init = Callable[[nn.Linear | nn.Conv2d, float], nn.Module]
"""Function that initialises a layer's weights, with a gain."""


class ActorCritic(nn.Module):
    """Policy and value networks with shared convolutions."""

    def __init__(
        self, shape: NetShape, seed: int, log_std: float = 0.0, correlation: float = 0.0, orthogonal: bool = True
    ) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        init = partial(_init, generator=generator, orthogonal=orthogonal)
        self.encoder = _convolutions(shape, init) if shape.num_images else None
        # Nearly uniform probabilities at first; orthogonal weights as in arXiv 2005.12729.
        widths = (shape.features, *shape.hidden)
        self.policy = _dense((*widths, shape.num_actions * shape.outputs), shape.activation, init, gain=0.01)
        self.head = self.build_head(shape, log_std, correlation)
        self.states = RunningMoments(shape.state_dim) if shape.normalized else None
        self.value_head = (
            _dense((*widths, shape.value_dim), shape.activation, init, gain=1.0) if shape.value_dim else None
        )

    def build_head(self, shape: NetShape, log_std: float, correlation: float) -> CategoricalHead | GaussianHead:
        """Build the action distribution."""
        return build_head(shape, log_std, correlation)

    def features(self, images: Tensor | None, state: Tensor) -> Tensor:
        """Return features [B, F] of images [B, C, H, W, 3] (uint8, or one channel, or None) and states [B, S]."""
        if self.states is not None:
            state = self.states(state)
        if self.encoder is None:
            return state
        assert images is not None
        pixels = images.permute(0, 1, 4, 2, 3).flatten(1, 2).float().div_(255.0)
        # On a CPU, convolutions take half as long with channels-last memory.
        return torch.cat([self.encoder(pixels.contiguous(memory_format=torch.channels_last)), state], dim=1)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the inputs [B, K, O] of the action head."""
        return self.policy(features).view(-1, self.shape.num_actions, self.shape.outputs)

    def value(self, features: Tensor) -> Tensor:
        """Return value estimates [B, V]."""
        return features[:, :0] if self.value_head is None else self.value_head(features)


class RunningMoments(nn.Module):
    """Mean and variance of all vectors [S] so far; buffers, so that they are saved with the weights."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise x [B, S], clipped to +-10."""
        return ((x - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10.0, 10.0)

    def take(self, x: Tensor) -> None:
        """Update the statistics with vectors [B, S]; batches are merged as in Chan, Golub and LeVeque (1979)."""
        # In float32 the mean of millions of states would stop changing.
        x = x.double()
        old, new = self.count.double(), float(len(x))
        total = old + new
        delta = x.mean(0) - self.mean.double()
        spread = self.var.double() * old + x.var(0, unbiased=False) * new + delta.square() * (old * new / total)
        self.mean.copy_(self.mean.double() + delta * (new / total))
        self.var.copy_(spread / total)
        self.count.copy_(total)


class ActorCriticPolicy:
    """Implementation of `Policy` and `LearnsStatistics`."""

    network = ActorCritic
    """Class of the networks."""

    def __init__(self, spec: PolicySpec, shape: NetShape, request: PolicyRequest, cfg: ActorCriticSettings) -> None:
        self.spec = spec
        self._shape = shape
        self._chunk = spec.num_action_chunks, spec.action_dim
        self._device = torch.device(request.device)
        self._temperature = request.temperature
        self._net = self.network(shape, request.seed, cfg.log_std_init, cfg.noise_correlation, cfg.ortho_init)
        if cfg.path is not None:
            self.load_weights(resolve_asset(cfg.path))
        self._net.to(self._device).requires_grad_(request.trainable)
        self.module: nn.Module = self._net

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Sample a chunk for each observation (see `Policy.act`).

        Tokens are category ids, or bit patterns of the Gaussian's float32 samples (see `networks.GaussianHead`).
        """
        features = self.features(obs)
        outputs, value = self._net.outputs(features), self._net.value(features)
        scale = temperature or self._temperature
        uniform = None
        if noise is not None:
            uniform = on_device(noise, self._device).view(-1, *self._chunk)
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
        """Score the tokens [B, L] that `act` returned (see `Policy.score`)."""
        features = self.features(obs)
        outputs, value = self._net.outputs(features), self._net.value(features)
        choice = on_device(self._net.head.to_choice(tokens), self._device).view(-1, *self._chunk)
        logprob, entropy = self._net.head.score(outputs, choice, self._temperature)
        return PolicyScores(logprob=logprob.flatten(1), entropy=entropy.flatten(1), value=value)

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationScores:
        """Return negative log-likelihood and accuracy or error of actions [B, K, A] (see `Policy.imitate`)."""
        outputs = self._net.outputs(self.features(obs))
        choice = on_device(self._net.head.from_actions(actions), self._device)
        logprob, _ = self._net.head.score(outputs, choice, 1.0)
        greedy = self._net.head.choose(outputs.detach(), None, 1.0)
        right = (greedy == choice).float().flatten(1).mean(1)
        error = None
        if greedy.is_floating_point():
            away = np.abs(self._net.head.to_actions(greedy.cpu().numpy()) - actions).reshape(len(actions), -1)
            error = on_device(away.mean(1, dtype=np.float32), self._device)
        return ImitationScores(loss=-logprob.flatten(1).mean(1), accuracy=right, error=error)

    @torch.no_grad()
    def take_statistics(self, obs: Observation) -> None:
        """Update the observation statistics with the states of a batch (see `LearnsStatistics`)."""
        if self._net.states is not None and len(obs):
            self._net.states.take(on_device(np.ascontiguousarray(obs.state), self._device))

    def save(self, folder: Path) -> None:
        """Write `model.safetensors` and `config.json`."""
        save_file({k: v.detach().cpu().contiguous() for k, v in self._net.state_dict().items()}, folder / WEIGHTS_FILE)
        self._shape.save(folder)

    def load_weights(self, folder: Path) -> None:
        """Replace the weights in place (see `Policy.load_weights`).

        A value head that only the file or only the model has is skipped: GRPO can start from PPO's weights.
        """
        self._shape.check(folder)
        fix = "Use the environment and model settings of its training."
        fill_weights(self._net.state_dict(), folder / WEIGHTS_FILE, optional=(f"{VALUE_HEAD}.",), fix=fix)

    def features(self, obs: Observation) -> Tensor:
        """Return features [B, F] of observations, the inputs of policy and value network, with gradients."""
        shape, state = self._shape, on_device(np.ascontiguousarray(obs.state), self._device)
        if not shape.num_images:
            return self._net.features(None, state)
        # The slices do not read the unused part.
        images = obs.images[:, : shape.num_images, ..., : 1 if shape.grey else 3]
        return self._net.features(on_device(images, self._device), state)


def _dense(widths: tuple[int, ...], activation: str, init: _Init, *, gain: float) -> nn.Sequential:
    pairs = list(pairwise(widths))
    gains = [2.0**0.5] * (len(pairs) - 1) + [gain]
    layers: list[nn.Module] = []
    for (a, b), own in zip(pairs, gains, strict=True):
        layers += [init(nn.Linear(a, b), own), nn.Tanh() if activation == "tanh" else nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _convolutions(shape: NetShape, init: _Init) -> nn.Sequential:
    """Build convolutions from channels [B, P, H, W] to [B, IMAGE_FEATURES]."""
    planes = (shape.planes, *CHANNELS)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(planes):
        conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1)
        layers += [init(conv, 2.0**0.5), nn.ReLU()]
    dense = init(nn.Linear(shape.convolved, IMAGE_FEATURES), 2.0**0.5)
    return nn.Sequential(*layers, _Flat(), dense, nn.ReLU())


class _Flat(nn.Flatten):
    """Flatten layer whose gradient has the memory format of the convolutions."""

    def forward(self, input: Tensor) -> Tensor:
        """Flatten [B, P, H, W] to [B, P * H * W]."""
        if input.requires_grad:
            input.register_hook(partial(Tensor.contiguous, memory_format=torch.channels_last))
        return input.flatten(1)


def _init(layer: nn.Linear | nn.Conv2d, gain: float, *, generator: torch.Generator, orthogonal: bool) -> nn.Module:
    assert layer.bias is not None
    if orthogonal:
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        nn.init.zeros_(layer.bias)
        return layer
    # torch's default initialisation, but from the policy's seed.
    bound = layer.weight[0].numel() ** -0.5
    for tensor in (layer.weight, layer.bias):
        nn.init.uniform_(tensor, -bound, bound, generator=generator)
    return layer
