"""Policies with a frozen flow and an actor that chooses the initial noise or corrects the actions.

An actor that chooses the noise is DSRL (Wagenmaker et al., arXiv 2506.15799). An actor that corrects the actions is a
residual policy (ResiP, arXiv 2407.16677; Policy Decorator, arXiv 2412.13630).
"""

from abc import abstractmethod

import torch
from torch import Tensor

from embodyrl.policies.flow.likelihood import flow_sde, get_step_times, integrate_ode
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.settings import FlowSettings
from embodyrl.policies.steering.actor import FrozenOutputs, ResidualPolicy, SteeredPolicy
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.chains import Velocity
from embodyrl.policies.vla.sampling import STEP, sample_normals
from embodyrl.types import FloatArray, IntArray, Observation


class SteeredFlowPolicy(SteeredPolicy, FlowPolicy):
    """Policy with a frozen flow and a trained actor; implements `SoftActor`."""

    @abstractmethod
    def _features(self, obs: Observation, velocity: Velocity) -> Tensor:
        """Return the inputs of the actor [B, F], computed from the observation without gradients."""

    def _run_frozen_model(self, obs: Observation) -> FrozenOutputs:
        prefix, velocity = self._encode_for_inference(obs)
        with torch.no_grad():
            features = self._features(obs, velocity)
        return FrozenOutputs(features, self._compute_value(prefix, len(obs)), velocity)

    def _normalize_actions(self, actions: FloatArray, obs: Observation) -> Tensor:
        rows = self._scale.from_actions(actions, obs)[:, :, : self._shape.action_dim]
        return to_device(rows, self._device)


class NoiseSteeredFlowPolicy(SteeredFlowPolicy):
    """DSRL: the actor's output, scaled to `noise_bound`, is the initial noise of the flow."""

    def _features(self, obs: Observation, velocity: Velocity) -> Tensor:
        """Return the expert's mean hidden state [B, width] for zero noise."""
        zero_noise = torch.zeros(len(obs), *self._size, device=self._device)
        return velocity(zero_noise, torch.ones(len(obs), device=self._device))[1].mean(1)

    def _execute(
        self, obs: Observation, frozen: FrozenOutputs, outputs: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        """Integrate the ODE of the frozen flow or, with `steered_noise` and seeds, its SDE."""
        # Noise for all rows, or for one row that is repeated.
        rows = (self._cfg.noise_bound * outputs).unflatten(2, (-1, self._shape.width))[:, 0]
        x, steps, velocity = rows.expand(-1, self._shape.horizon, -1), self._cfg.num_steps, frozen.model
        if seeds is None or not self._cfg.steered_noise:
            x = integrate_ode(velocity, x, steps)
        else:
            level = x.new_full((), self._cfg.steered_noise)
            for k in range(steps):
                t, end = get_step_times(torch.full((len(x),), k, device=x.device), steps)
                step = flow_sde(x, velocity(x, t.flatten())[0], t, end, level)
                x = step.mean + step.std * temperature * sample_normals(seeds, STEP + k, x.shape[1:], x.device)
        return self._to_actions(x[:, : self._shape.executed], obs)


class ResidualFlowPolicy(ResidualPolicy, SteeredFlowPolicy):
    """Residual policy: adds the actor's output times `residual_scale` to the executed actions of the greedy chunk."""

    def _features(self, obs: Observation, velocity: Velocity) -> Tensor:
        """Return features [B, F]: the mean hidden state of the first denoising step, and the proposed actions."""
        hidden: list[Tensor] = []

        def record_hidden(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            v, rows = velocity(x, t)
            hidden.append(rows)
            return v, rows

        proposed = self._compute_greedy_chunk(obs, record_hidden)[:, : self._shape.executed, : self._shape.action_dim]
        return torch.cat([hidden[0].mean(1), proposed.flatten(1)], 1)


def select_policy_class(cfg: FlowSettings) -> type[FlowPolicy]:
    """Return the policy class for the settings."""
    if cfg.is_residual:
        return ResidualFlowPolicy
    return NoiseSteeredFlowPolicy if cfg.is_steered else FlowPolicy
