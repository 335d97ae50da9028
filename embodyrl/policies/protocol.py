"""The policy seam: one protocol, one factory, one registry. A policy never knows an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from embodyrl.config.shared import SamplingSettings
from embodyrl.policies.settings import ModelSettings
from embodyrl.registry import Registry, has
from embodyrl.types import (
    ActionKind,
    EnvSpec,
    FloatArray,
    ImitationScores,
    IntArray,
    Observation,
    PolicyOutput,
    PolicyScores,
    PolicySpec,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """What the run asks of a policy when it is built."""

    env: EnvSpec
    value_dim: int = 0
    """V: 0 (no value head), 1 or K."""
    temperature: float = 1.0
    device: str
    seed: int
    trainable: bool = True
    """fp32 master weights with autocast to `precision`; false: weights are cast once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fresh_heads: bool = False
    """Heads and projectors that the checkpoint lacks start at random instead of being an error."""
    backend: str = "hf"
    """Who writes replies: hf (the policy's module), vllm, or a server."""
    url: str | None = None
    """Of that server."""
    served_model: str | None = None
    """Its name for the model; None: its first."""
    top: int = 0
    """How many of the most probable tokens `PolicyOutput.top` names."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine that the run sets."""
    engine_share: float = 0.4
    """Of the GPU's memory, which vLLM takes for its weights and its cache."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """How replies in words are drawn; log-probabilities are those of all tokens at `temperature`."""


class Policy(Protocol):
    """A policy on one device. The same module acts and is trained."""

    spec: PolicySpec
    module: nn.Module
    """All parameters, the value head (`value_head`) included."""

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Choose a chunk for each observation, without gradients.

        `noise` [B, L] holds one uniform number in [0, 1) per token (inverse-CDF sampling); None means greedy.
        `temperature` replaces the request's (evaluation).
        A row's result depends only on that row, its index and the batch shape.
        """
        ...

    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V] without gradients."""
        ...

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities, entropies and values of given tokens [B, L], with gradients."""
        ...

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationScores:
        """Return the supervised loss of actions [B, K, A], in the units `act` returns."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and everything needed to load them again in the public layout (safetensors, JSON)."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Replace the weights by those of a folder written by `save` or published in the same layout.

        Raises:
            CheckpointError: missing or surplus keys, wrong shapes, truncated files; names file and key.
        """
        ...


@runtime_checkable
class TextPolicy(Policy, Protocol):
    """A policy whose actions are words."""

    def encode_replies(self, replies: Sequence[str]) -> IntArray:
        """Tokens [B, longest] of replies and of their ends, -1 where there is none."""
        ...

    def prompt_lengths(self, obs: Observation) -> IntArray:
        """Tokens [B] of each conversation as it stands."""
        ...

    def served_by(self, url: str, model: str | None) -> Any:
        """A reference with `score` and `module` only: what a server's model says of the same conversations and tokens.

        Raises:
            EmbodyError: nobody answers there, or its tokens are others.
        """
        ...


@runtime_checkable
class TokenPolicy(Policy, Protocol):
    """A policy whose actions are tokens that any action can be written in."""

    def encode_actions(self, actions: FloatArray) -> IntArray:
        """Tokens [B, L] of actions [B, K, A] in the environment's units."""
        ...


@runtime_checkable
class LearnsStatistics(Policy, Protocol):
    """A policy whose weights hold statistics of what it has seen in training."""

    def take_statistics(self, obs: Observation) -> None:
        """Take a batch that was just trained on into the statistics; what acts from now on uses them."""
        ...


@runtime_checkable
class HasEngine(Policy, Protocol):
    """A policy that another engine acts for, in this process."""

    def rest(self) -> None:
        """Give up the memory that only acting needs, until it acts again; where the run asks for that."""
        ...


@runtime_checkable
class SoftActor(Policy, Protocol):
    """A policy whose drawn actions carry gradients, with critics to match: what soft actor-critic trains."""

    encoder: Sequence[nn.Parameter]
    """Weights below `features` that the critics train; empty: none."""
    width: int
    """L: numbers that are drawn for a chunk."""
    frozen: bool
    """`features` of an observation never change, so they are kept in its place."""

    def features(self, obs: Observation) -> torch.Tensor:
        """What actor and critics see [B, F], with gradients."""
        ...

    def draw(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw chunks [B, L], within -1..1, and their log-probability [B], with gradients."""
        ...

    def chosen(self, tokens: IntArray) -> torch.Tensor:
        """Chunks [B, L], within -1..1, of tokens that `act` returned; all corrections of one that is repeated."""
        ...

    def normalise(self, actions: FloatArray, obs: Observation | None) -> torch.Tensor:
        """Chunks like those of `chosen`, of actions [B, K, A] in the units that `act` returns.

        `obs` is what they answered, for a `frozen` policy, whose corrections of far actions lie beyond -1..1.
        """
        ...

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Networks of features [B, F] and chunks [B, L]; each says a value: [count, B]."""
        ...


class PolicyFactory(Protocol):
    """What the registry holds."""

    settings: type[ModelSettings]
    """Its keys below `model`; the methods get an instance."""

    def validate(self, cfg: Any) -> list[str]:
        """Return config problems, one line each with the fix; imports nothing heavy (no torch)."""
        ...

    def spec(self, cfg: Any, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Describe the policy without building it (no torch)."""
        ...

    def run_problems(self, cfg: Any, spec: PolicySpec) -> list[str]:
        """Return keys of a whole config that the described policy cannot follow, one line each. May be left out."""
        ...

    def build(self, cfg: Any, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`."""
        ...


@runtime_checkable
class ComparesWeights(Protocol):
    """A `PolicyFactory` that tells by the small files of a folder whether its weights are those of a config's model."""

    def compare(self, cfg: Any, env: EnvSpec, folder: Path) -> None:
        """Compare them; imports nothing heavy (no torch).

        Raises:
            CheckpointError: what differs.
        """
        ...


_changes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def weights_changed(module: nn.Module) -> None:
    """Say that the weights of a policy's module are new; to be called by whoever changes them."""
    _changes[module] = weights_version(module) + 1


def weights_version(module: nn.Module) -> int:
    """How often they changed; fused optimizers and FSDP leave the parameters' own counters as they are."""
    return _changes.get(module, 0)


POLICIES: Registry[PolicyFactory] = Registry(
    "model",
    group="embodyrl.policies",
    wants="a factory with settings, validate, spec and build (`embodyrl new policy` writes one)",
    fits=has("settings", "validate", "spec", "build"),
)


def fitting_models(env: EnvSpec) -> str:
    """Small models that an environment can be tried with, for messages about one that does not fit."""
    if env.action_kind == ActionKind.text:
        return "model=vision_lm_tiny" if env.cameras else "model=causal_lm_tiny"
    return "model=cnn" if env.cameras else "model=mlp"


def seen_problems(who: str, env: EnvSpec) -> list[str]:
    """What a policy that reads camera images and gives box actions misses in an environment, one line each."""
    if not env.cameras or env.action_kind != ActionKind.box:
        has = f"{len(env.cameras)} cameras and {env.action_kind} actions"
        return [
            f"{who} reads camera images and gives box actions, env '{env.name}' has {has}; choose another model, for "
            f"example {fitting_models(env)}."
        ]
    if env.image_rotation_deg not in (0, 180):
        return [f"env '{env.name}' declares image_rotation_deg={env.image_rotation_deg}; only 0 and 180 work."]
    return []


def export_policy(cfg: ModelSettings, env: EnvSpec, folder: Path, out: Path) -> None:
    """Write a folder of `Policy.save` as a checkpoint that needs no other: adapters merged, in the compute precision.

    Args:
        cfg: the model of the run.
        env: its environment.
        folder: what was saved; its value head is left out.
        out: new folder.

    Raises:
        CheckpointError: the folder, or the base weights that its adapters need, do not fit.
    """
    request = PolicyRequest(env=env, device="cpu", seed=0, trainable=False)
    # A policy without adapters of its own merges those of a folder into its weights.
    policy = POLICIES.get(cfg.model_type).build(cfg.whole(), request)
    policy.load_weights(folder)
    out.mkdir(parents=True)
    policy.save(out)
