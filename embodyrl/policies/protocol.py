"""Interface and registry of policies. Policies do not depend on environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

from embodyrl import parts
from embodyrl.config.shared import SamplingSettings
from embodyrl.policies.settings import ModelSettings
from embodyrl.registry import Registry, has
from embodyrl.types import (
    ActionKind,
    ByteArray,
    DoubleArray,
    EnvSpec,
    FloatArray,
    ImitationLoss,
    IntArray,
    Observation,
    PolicyCosts,
    PolicyOutput,
    PolicyScores,
    PolicySpec,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """Arguments that a run passes to `PolicyFactory.build`."""

    env: EnvSpec
    value_dim: int = 0
    """V: number of values per chunk, 0 (no value head), 1 or K."""
    temperature: float = 1.0
    device: str
    seed: int
    trainable: bool = True
    """True for fp32 master weights with autocast to `precision`; False for all weights in the compute precision."""
    gradient_checkpointing: bool = False
    """True if the backward pass recomputes activations."""
    fresh_heads: bool = False
    """True if heads and projectors that the checkpoint lacks are initialized randomly; False: a missing part is an
    error."""
    action_log_std: tuple[float, ...] = ()
    """Log standard deviation of each dimension of the demonstrations' actions, relative to half the action range; empty
    without demonstrations."""
    backend: str = "hf"
    """Backend of text generation: hf (the policy's module), vllm, or a server."""
    url: str | None = None
    """Address of the server that generates the text."""
    critic: str | None = None
    """Folder of a separate critic model, for language models; None: no separate critic."""
    served_model: str | None = None
    """Name of a model on the server; None: the first model that the server lists."""
    top: int = 0
    """Number of most probable tokens that `PolicyOutput.top` contains for each position of a reply."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `vllm.LLM`, which override the defaults of `VllmEngine`."""
    engine_memory_fraction: float = 0.4
    """Fraction of the GPU memory for vLLM's weights and cache."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """Sampling settings for replies. Log-probabilities refer to the whole vocabulary at `temperature`."""


class Policy(Protocol):
    """Interface of a policy on one device, whose module is used for both acting and training."""

    spec: PolicySpec
    module: nn.Module
    """All parameters, including the value head (`value_head`)."""

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return an action chunk for each observation, without gradients.

        `noise` [B, L] contains one uniform number in [0, 1) per token (inverse-CDF sampling); None means greedy.
        `temperature` replaces the temperature of the request in evaluations. The result of a row depends only on the
        row, its index and the batch shape.
        """
        ...

    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V] without gradients."""
        ...

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities, entropies and values of tokens [B, L], with gradients."""
        ...

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationLoss:
        """Return the SFT loss of actions [B, K, A], in the units of `act`."""
        ...

    def save(self, folder: Path) -> None:
        """Write the weights and all files that loading needs, in the published layout (safetensors, JSON)."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Replace the weights with those of a folder written by `save`, or a published folder in the same layout.

        Raises:
            CheckpointError: missing or unexpected keys, wrong shapes, truncated files; the message names file and key.
        """
        ...


@runtime_checkable
class ResizesImages(Policy, Protocol):
    """Interface of a policy whose resized images are whole numbers (`InputSpec.resized`)."""

    def resize(self, images: ByteArray) -> ByteArray:
        """Resize camera images [B, C, H, W, 3] to [B, C, S, S, 3], which all methods accept with the same results."""
        ...


@runtime_checkable
class TextPolicy(Policy, Protocol):
    """Interface of a language-model policy, whose actions are replies."""

    def encode_replies(self, replies: Sequence[str]) -> IntArray:
        """Return tokens [B, longest] of replies with their end tokens, padded with -1."""
        ...

    def prompt_lengths(self, obs: Observation) -> IntArray:
        """Return the number of tokens [B] of each conversation."""
        ...

    def build_served_reference(self, url: str, model: str | None) -> Any:
        """Return a reference policy whose log-probabilities a server computes; only `score` and `module` are available.

        Raises:
            EmbodyError: there is no server, or its tokens differ.
        """
        ...


@runtime_checkable
class LearnsStatistics(Policy, Protocol):
    """Interface of a policy whose weights contain statistics of its training observations."""

    def update_statistics(self, obs: Observation) -> None:
        """Update the statistics with a training batch; later inference uses them."""
        ...


@runtime_checkable
class HasEngine(Policy, Protocol):
    """Interface of a policy with a separate inference engine in this process."""

    def free_engine_memory(self) -> None:
        """Free GPU memory of the engine until the next inference, if `enable_sleep_mode` of vLLM is set."""
        ...


S = TypeVar("S", bound=ModelSettings)


class PolicyFactory(Protocol[S]):
    """Interface of policy factories, which are registered by name."""

    settings: type[S]
    """Settings class of the keys under `model`; methods receive an instance as `cfg`."""

    def validate(self, cfg: S) -> list[str]:
        """Return config errors with fixes, one line each, without importing torch."""
        ...

    def spec(self, cfg: S, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec without building the policy or importing torch."""
        ...

    def build(self, cfg: S, request: PolicyRequest) -> Policy:
        """Build the policy and load `cfg.path`."""
        ...

    def compare(self, cfg: S, env: EnvSpec, folder: Path) -> None:
        """Check that a config's model fits the weights in a folder, without reading the weights. Optional.

        Raises:
            CheckpointError: the model differs; the message names the first difference.
        """
        ...

    def describe_checkpoint(self, cfg: S, env: EnvSpec) -> list[tuple[str, str]]:
        """Return (label, text) pairs that describe the checkpoint's statistics, tokenizer and images. Optional."""
        ...

    def state_limits(self, cfg: S, env: EnvSpec) -> tuple[DoubleArray, DoubleArray] | None:
        """Return the lowest and the highest plausible value of each state dimension, both [S]. Optional.

        The range is about twice as wide as that of the training data, so it includes all states of the same robot.
        Return None for a policy without state input.
        """
        ...

    def costs(self, cfg: S, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Estimate parameters, memory and FLOPs without building the policy or importing torch. Optional."""
        ...


_versions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def mark_weights_changed(module: nn.Module) -> None:
    """Increase the version number of a module's weights; call this function after each change."""
    _versions[module] = get_weights_version(module) + 1


def get_weights_version(module: nn.Module) -> int:
    """Return the version number of a module's weights.

    Torch's own counters (`Tensor._version`) are not used, because fused optimizers and FSDP do not update them.
    """
    return _versions.get(module, 0)


POLICIES: Registry[PolicyFactory[Any]] = Registry(
    "model",
    group="embodyrl.policies",
    parts=parts.POLICIES,
    wants="a factory with settings, validate, spec and build (`embodyrl new policy` writes one)",
    fits=has("settings", "validate", "spec", "build"),
)


def estimate_policy_costs(cfg: ModelSettings, env: EnvSpec, value_dim: int) -> PolicyCosts:
    """Return the estimated costs of a policy; zeros if its factory has no estimate."""
    estimate = getattr(POLICIES.get(cfg.model_type), "costs", None)
    return PolicyCosts() if estimate is None else estimate(cfg, env, value_dim)


def suggest_models(env: EnvSpec) -> str:
    """Return the small models that support an environment, for error messages."""
    if env.action.kind == ActionKind.text:
        return "model=vision_lm_tiny" if env.cameras.names else "model=causal_lm_tiny"
    return "model=cnn" if env.cameras.names else "model=mlp"


def find_env_problems(model_name: str, env: EnvSpec) -> list[str]:
    """Return errors if an environment lacks what an image policy with box actions needs, one line each."""
    if not env.cameras.names or env.action.kind != ActionKind.box:
        description = f"{len(env.cameras.names)} cameras and {env.action.kind} actions"
        return [
            f"{model_name} reads camera images and outputs box actions, but env '{env.name}' has {description}; choose "
            f"another model, for example {suggest_models(env)}."
        ]
    if env.cameras.rotation_deg not in (0, 180):
        return [f"env '{env.name}' declares cameras.rotation_deg={env.cameras.rotation_deg}; only 0 and 180 work."]
    return []


def export_policy(cfg: ModelSettings, env: EnvSpec, folder: Path, out: Path) -> None:
    """Convert a saved folder to a self-contained checkpoint with merged adapters and weights in the compute precision.

    Args:
        cfg: model settings of the run.
        env: environment of the run.
        folder: folder with saved weights; the value head is not exported.
        out: new folder.

    Raises:
        CheckpointError: the weights, or the base weights of the adapters, do not match the model settings.
    """
    request = PolicyRequest(env=env, device="cpu", seed=0, trainable=False)
    # A policy that trains no adapters merges the adapters of a folder into its weights.
    policy = POLICIES.get(cfg.model_type).build(cfg.without_adapters(), request)
    policy.load_weights(folder)
    out.mkdir(parents=True)
    policy.save(out)
