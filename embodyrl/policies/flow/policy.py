"""Flow policy for any velocity network, and the head that learns the noise level (`flow_noise`).

`act`, `score` and training share one code path.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.config.shared import Precision
from embodyrl.policies.flow.likelihood import ChainLikelihood, FpoLikelihood, flow_matching_error, integrate_ode
from embodyrl.policies.flow.settings import FlowSettings, GreedyStart, Likelihood, ValueFrom, get_steering_shape
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.steering.actor import ModuleWithHeads
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.chains import Velocity
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.policies.vla.sampling import (
    START,
    SampledChunks,
    build_scores,
    get_observation_seeds,
    get_seeds,
    get_varying_dimensions,
    sample_normals,
    sample_training_noise,
)
from embodyrl.types import FloatArray, ImitationLoss, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec

HIDDEN = (128, 64)


class _Layer(nn.Module):
    """Linear layer with the parameter names of RLinf's checkpoints."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.linear_1(x)


class _Layers(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers = [_Layer(a, b) for a, b in pairwise(widths)]
        nn.init.zeros_(layers[-1].linear_1.weight)
        nn.init.zeros_(layers[-1].linear_1.bias)
        self.moduleList = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map features [..., inputs] to outputs [..., outputs], with tanh between the layers."""
        *hidden, last = self.moduleList
        for layer in hidden:
            x = torch.tanh(layer(x))
        return last(x)


class NoiseHead(nn.Module):
    """Head that predicts the noise's standard deviation for each element of a chunk from the expert's hidden states.

    The log-variance is squashed by tanh into 2 ln(low)..2 ln(high) (ReinFlow, arXiv 2505.22094). Widths and names of
    the layers match piRL's published code. A new head returns the geometric mean of `low` and `high` for all inputs.
    """

    def __init__(self, width: int, action_width: int, low: float, high: float) -> None:
        super().__init__()
        self.mlp_logvar = _Layers((width, *HIDDEN, action_width))
        self._low, self._high = 2.0 * math.log(low), 2.0 * math.log(high)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return standard deviations [B, H, D] for hidden states [B, H, width]."""
        fraction = 0.5 * (torch.tanh(self.mlp_logvar(hidden)) + 1.0)
        return (0.5 * (self._low + (self._high - self._low) * fraction)).exp()


class ActionScale(Protocol):
    """Interface of the conversion between environment actions and the units of the flow."""

    varying_mask: FloatArray
    """[A] 0 for action dimensions that are constant in the data, else 1. The flow output of constant dimensions is
    arbitrary, and its log-probability would add noise to every gradient."""

    def to_actions(self, x: FloatArray, obs: Observation) -> FloatArray:
        """Convert the executed part x [B, K, D] of chunks to environment actions [B, K, A]."""
        ...

    def from_actions(self, actions: FloatArray, obs: Observation) -> FloatArray:
        """Convert environment actions [B, H, A] to chunks [B, H, D] in the units of the flow; padding is 0."""
        ...


class WeightIO(Protocol):
    """Interface of the code that reads and writes the weights of a network in a folder."""

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write all weights of a `FlowModule`."""
        ...

    def load(self, module: nn.Module, folder: Path) -> None:
        """Read the weights in place (see `Policy.load_weights`)."""
        ...


class FlowModule(ModuleWithHeads):
    """Module with all parameters of a flow policy: the network, and heads added by RL.

    The network has the `shape` of a chunk, a `prefix_width` and a `hidden_width`. `encode_prefix(obs)` encodes B
    observations once for all steps of a flow; its `pooled` [B, prefix_width] is the input of a value head, or None.
    `velocity(prefix, x, t)` of states [B, H, D] and times [B] (float32, 1 at noise) returns the velocity
    [B, H, D] (target noise - data) and the expert's hidden states [B, H, hidden_width].
    """

    def __init__(self, network: Any, cfg: FlowSettings, value_dim: int) -> None:
        super().__init__(network)
        reads_prefix = cfg.value_from is ValueFrom.prefix
        self.add_value_head(network.prefix_width if reads_prefix else network.hidden_width, value_dim)
        self.noise_head: NoiseHead | None = None
        if cfg.likelihood is Likelihood.flow_noise:
            low, high = cfg.noise_range
            self.noise_head = NoiseHead(network.hidden_width, network.shape.width, low, high)
        self.add_actor(get_steering_shape(cfg, network.shape, network.hidden_width))


class FlowPolicy:
    """Flow policy for the network of a `FlowModule`; implements `Policy`.

    Tokens have the layout of `ChunkRecord`. The log-probabilities of an action are at the start of its tokens,
    padded with 0.
    """

    def __init__(
        self,
        spec: PolicySpec,
        cfg: FlowSettings,
        module: FlowModule,
        scale: ActionScale,
        files: WeightIO,
        request: PolicyRequest,
    ) -> None:
        self.spec = spec
        self._cfg, self._scale, self._files = cfg, scale, files
        self._shape: ChunkShape = module.network.shape
        self._env, self._temperature = request.env, request.temperature
        self._device = torch.device(request.device)
        self._module = module.to(self._device).requires_grad_(request.trainable)
        if module.steering_actor is not None:
            # Features of a frozen network can be stored in the replay buffer.
            module.network.requires_grad_(False)
        self.module: nn.Module = module
        # Trained weights stay float32 with bf16 autocast; other weights are bf16.
        uses_bf16 = cfg.precision is Precision.bf16
        self._autocast = torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=uses_bf16 and request.trainable
        )
        fpo = cfg.likelihood is Likelihood.fpo
        self._likelihood = (
            FpoLikelihood(cfg, self._shape) if fpo else ChainLikelihood(cfg, self._shape, module.noise_head)
        )
        self._by_dimension = not fpo and not cfg.is_steered
        self._update_scored_dimensions()

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return a chunk for each observation (see `Policy.act`). Greedy chunks follow the ODE; their tokens are 0."""
        prefix, velocity = self._encode_for_inference(obs)
        if noise is None:
            sampled = SampledChunks.from_greedy(self._compute_greedy_chunk(obs, velocity))
        else:
            scale = temperature or self._temperature
            sampled = self._likelihood.sample(velocity, get_seeds(noise), self._device, scale)
        actions = self._to_actions(sampled.state[:, : self._shape.executed], obs)
        return sampled.to_output(actions, self._compute_value(prefix, len(obs)), self.spec, self._varying)

    @torch.no_grad()
    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V]."""
        return self._compute_value(self._encode_for_inference(obs)[0], len(obs)).cpu().numpy()

    @torch.no_grad()
    def features(self, obs: Observation) -> Tensor:
        """Return features [B, F]: the expert's mean hidden state and the velocity, both for zero initial noise."""
        zero_noise = torch.zeros(len(obs), *self._size, device=self._device)
        v, hidden = self._compute_velocity(
            self._encode_prefix(obs), zero_noise, torch.ones(len(obs), device=self._device)
        )
        return torch.cat([hidden.mean(1), v.flatten(1)], 1)

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities and entropies [B, L] of tokens from `act`, and values [B, V], with gradients."""
        prefix, velocity = self._encode_for_inference(obs)
        scores = self._likelihood.score(velocity, tokens, self._device, self._temperature)
        return build_scores(scores, self._compute_value(prefix, len(obs)), self.spec, self._varying)

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationLoss:
        """Return the flow-matching loss of actions [B, H, A]: mean squared error of the velocity of a chunk.

        Time is 0.001 + 0.999 Beta(`imitated_time`, 1); pi0 (arXiv 2410.24164) uses 1.5. Without gradients (validation)
        noise and time are the same in every call, and `accuracy` is the fraction of action elements whose greedy
        prediction is within 0.1 of the target, both in -1..1; training does not compute the accuracy.
        """
        target = to_device(self._scale.from_actions(actions, obs), self._device)
        velocity = partial(self._compute_velocity, self._encode_prefix(obs))
        # The prefix is encoded once; each further pair of noise and time needs only one pass of the small expert.
        pairs = self._cfg.imitated_pairs if torch.is_grad_enabled() else 1
        loss = torch.stack([self._compute_matching_loss(velocity, target) for _ in range(pairs)]).mean(0)
        correct = torch.zeros_like(target, dtype=torch.bool)
        if not torch.is_grad_enabled():
            correct = (self._compute_greedy_chunk(obs, velocity) - target).abs() < 0.1
            # Padding is always predicted as 0 and would count as correct.
            correct = correct[..., : self._shape.action_dim]
        return ImitationLoss(loss=loss, accuracy=correct.float().flatten(1).mean(1))

    def _compute_matching_loss(self, velocity: Velocity, target: Tensor) -> Tensor:
        """Return the flow-matching loss [B] of each chunk [B, H, D] for one random pair of noise and time."""
        noise, uniform = sample_training_noise(len(target), self._size, self._device)
        # If u is uniform, u^(1/a) has the distribution Beta(a, 1).
        beta_sample = uniform ** (1 / self._cfg.imitated_time)
        t = (0.001 + 0.999 * beta_sample).astype(np.float32)
        return flow_matching_error(velocity, target, noise, to_device(t, self._device)).flatten(1).mean(1)

    def save(self, folder: Path) -> None:
        """Write the weights and all files needed to load them."""
        self._files.save(self._module, folder)

    def load_weights(self, folder: Path) -> None:
        """Replace the weights in place (see `Policy.load_weights`); RL heads may be missing or unused."""
        self._files.load(self._module, folder)
        self._update_scored_dimensions()

    def _to_actions(self, rows: Tensor, obs: Observation) -> FloatArray:
        """Convert the executed part [B, K, D] of chunks to environment actions [B, K, A]."""
        return self._scale.to_actions(rows.cpu().numpy(), obs)

    @property
    def _size(self) -> tuple[int, int]:
        return self._shape.horizon, self._shape.width

    def _compute_greedy_chunk(self, obs: Observation, velocity: Velocity) -> Tensor:
        return integrate_ode(velocity, self._get_greedy_start(obs), self._cfg.num_steps)

    def _get_greedy_start(self, obs: Observation) -> Tensor:
        """Return the initial noise of greedy actions, [B, H, D]."""
        if self._cfg.greedy_start is GreedyStart.zero:
            return torch.zeros(len(obs), *self._size, device=self._device)
        return sample_normals(get_observation_seeds(obs), START, self._size, self._device)

    def _encode_for_inference(self, obs: Observation) -> tuple[Any, Velocity]:
        """Return the prefix and the velocity function for inference."""
        prefix = self._encode_prefix(obs)
        return prefix, partial(self._compute_velocity, prefix)

    def _encode_prefix(self, obs: Observation) -> Any:
        with self._autocast:
            return self._module.network.encode_prefix(obs)

    def _compute_velocity(self, prefix: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        with self._autocast:
            v, hidden = self._module.network.velocity(prefix, x, t)
        # In bf16, the small steps that add up to a state would be rounded away.
        return v.float(), hidden.float()

    def _compute_value(self, prefix: Any, count: int) -> Tensor:
        """Return value estimates [B, V] from detached features: the critic does not train the policy's features (piRL).

        The expert's features are computed for x = 0 at t = 1, so they depend on the observation only.
        """
        head = self._module.value_head
        if head is None:
            return torch.zeros(count, 0, device=self._device)
        if self._cfg.value_from is ValueFrom.prefix:
            return head(prefix.pooled.float().detach())
        with torch.no_grad():
            zero_noise = torch.zeros(count, *self._size, device=self._device)
            _, hidden = self._compute_velocity(prefix, zero_noise, torch.ones(count, device=self._device))
        return head(hidden.mean(1))

    def _update_scored_dimensions(self) -> None:
        """Find the action dimensions that have log-probabilities, which are the dimensions that vary in the data."""
        self._varying = None
        if self._by_dimension:
            self._varying = get_varying_dimensions(self._scale.varying_mask)
            self.spec = replace(self.spec, scored=len(self._varying))
