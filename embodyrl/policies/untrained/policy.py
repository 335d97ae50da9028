"""Policies without weights: random actions, and the environment's scripted expert."""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from embodyrl.config.settings import Weight
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import ModelSettings
from embodyrl.types import (
    ActionKind,
    EnvSpec,
    FloatArray,
    Observation,
    PolicyOutput,
    PolicySpec,
)


class InferenceOnlyPolicy:
    """Base class of policies for inference only: no weights in this process, no log-probabilities, no values."""

    spec: PolicySpec

    def __init__(self, spec: PolicySpec, request: PolicyRequest) -> None:
        """Set up the policy.

        Raises:
            ConfigError: training was requested.
        """
        from torch import nn

        self.spec = spec
        if request.trainable:
            self.reject_training()
        self.module: nn.Module = nn.Module()

    def build_output(self, actions: FloatArray) -> PolicyOutput:
        """Return chunks [B, K, A] whose tokens and log-probabilities are 0."""
        shape = len(actions), self.spec.tokens_per_chunk
        zeros = np.zeros(shape, np.float32)
        return PolicyOutput(
            actions=actions,
            tokens=np.zeros(shape, np.int64),
            logprob=zeros,
            value=np.zeros((len(actions), 0), np.float32),
        )

    def values(self, obs: Observation) -> FloatArray:
        """Return an empty array [B, 0], because there is no value head."""
        return np.zeros((len(obs), 0), np.float32)

    def load_weights(self, folder: Path) -> None:
        """Raise an error: the policy has no weights.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"model '{self.spec.name}': {self.spec.untrainable}; remove ckpt={folder}.")

    def reject_training(self, *_: object) -> NoReturn:
        """Raise an error: the policy cannot be trained.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"model '{self.spec.name}' cannot be trained: {self.spec.untrainable}.")

    score = imitate = save = reject_training


class UntrainedPolicy(InferenceOnlyPolicy):
    """Uniform random policy over all categories, or over the numbers between the bounds (-1..1 if a bound is missing).

    Greedy actions are the center of the range, and so are placeholders for the actions of a scripted expert.
    """

    def __init__(self, spec: PolicySpec, request: PolicyRequest) -> None:
        super().__init__(spec, request)
        self._space = request.env.action

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return a chunk for each observation (see `Policy.act`)."""
        shape = len(obs), self.spec.num_action_chunks, self.spec.action_dim
        uniform = np.full(shape, 0.5, np.float32) if noise is None or self.spec.scripted else noise.reshape(shape)
        return self.build_output(self._scale_to_actions(uniform))

    def _scale_to_actions(self, uniform: FloatArray) -> FloatArray:
        """Map uniform random numbers in [0, 1) to actions [B, K, A]."""
        if self._space.sizes:
            sizes = np.asarray(self._space.sizes)
            # Rounding may make the product equal to the size.
            return np.minimum(np.floor(uniform * sizes), sizes - 1).astype(np.float32)
        low, high = (np.asarray(bound) for bound in self._space.bounds)
        bounded = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        return (low + uniform * (high - low)).astype(np.float32)


class ScriptedSettings(ModelSettings):
    """Config keys for the environment's scripted expert."""

    expert_noise: Weight = 0.0
    """Standard deviation of the noise on executed actions of the expert; recorded actions have no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedFactory:
    """Factory of `UntrainedPolicy`; implements `PolicyFactory`."""

    name: str
    scripted: bool
    settings: type[ModelSettings] = ModelSettings

    def validate(self, cfg: ModelSettings) -> list[str]:
        """Return no errors, because the config schema checks all keys."""
        return []

    def spec(self, cfg: ModelSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec with the environment's action space."""
        return PolicySpec(
            name=self.name,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=env.action.dim,
            tokens_per_chunk=cfg.num_action_chunks * env.action.dim,
            observed_steps=0,
            gripper=env.action.gripper,
            scripted=self.scripted,
            is_stochastic=not self.scripted or (isinstance(cfg, ScriptedSettings) and cfg.expert_noise > 0),
            untrainable="it has no weights",
            action_kinds=frozenset(ActionKind) - {ActionKind.text},
        )

    def build(self, cfg: ModelSettings, request: PolicyRequest) -> UntrainedPolicy:
        """Build the policy.

        Raises:
            ConfigError: training was requested.
        """
        return UntrainedPolicy(self.spec(cfg, request.env, request.value_dim), request)


RANDOM = UntrainedFactory(name="random", scripted=False)
SCRIPTED = UntrainedFactory(name="scripted", scripted=True, settings=ScriptedSettings)
