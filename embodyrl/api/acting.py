"""Trained policy as a Python object that maps observations to actions, for custom loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.api.environment import SingleEnv, build_env_of_plan
from embodyrl.commands.run_folder import resolve_initial_weights
from embodyrl.config.compose import format_override
from embodyrl.config.paths import resolve_run
from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.saved import find_run_config
from embodyrl.plan.schema import Config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.specs import convert_gripper
from embodyrl.types import FloatArray, Observation, PolicyOutput


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """Policy loaded into this process, with the spec of its environment."""

    policy: Policy
    """Policy with `module`, `score` (log-probabilities with gradients), `values` and `save`."""
    run_plan: RunPlan

    def __repr__(self) -> str:
        spec = self.policy.spec
        return f"LoadedPolicy({spec.name}, chunks of {spec.num_action_chunks} x {spec.action_dim}, {self.env_name})"

    @property
    def env_name(self) -> str:
        """Name of the run's environment."""
        return self.run_plan.env.name

    def make_env(self) -> SingleEnv:
        """Build the environment of the run, with the cameras and image sizes of the policy."""
        return build_env_of_plan(self.run_plan)

    def act(
        self, obs: dict[str, Any], *, instruction: str | None = None, noise: FloatArray | None = None
    ) -> FloatArray:
        """Return the next chunk of actions.

        Args:
            obs: observation of `make_env` (`images` [C, H, W, 3], `state` [S], `instruction`), or a batch with one more
                leading axis, as returned by a vector environment. Entries that the policy does not read may be missing.
                The instruction may be missing if the environment has one task.
            instruction: replaces `obs["instruction"]`.
            noise: [B, L] uniform in [0, 1), one number per token, to sample as in training
                (`algorithm.sampling_params`); None: greedy.

        Returns:
            [K, A] actions to execute in order, in the environment's units; for a batch [B, K, A].

        Raises:
            ConfigError: the observation does not match the spec of the environment.
        """
        batched = _is_batch(obs)
        output = self.decide(self.observe([obs] if not batched else _split_batch(obs), instruction), noise=noise)
        return output.actions if batched else output.actions[0]

    def observe(self, observations: Sequence[dict[str, Any]], instruction: str | None = None) -> Observation:
        """Combine observations of several environments into a batch for the policy."""
        env, spec = self.run_plan.env, self.policy.spec
        shape = (len(env.cameras.names), *env.cameras.size, 3)
        images = [
            self._get_entry(observation, "images", shape, spec.inputs.num_images > 0)[: shape[0]]
            for observation in observations
        ]
        state = [
            self._get_entry(observation, "state", (env.state_dim,), spec.inputs.state) for observation in observations
        ]
        instructions = tuple(instruction or self._get_instruction(observation) for observation in observations)
        return Observation(
            images=np.stack(images).astype(np.uint8, copy=False),
            state=np.stack(state).astype(np.float32, copy=False),
            instructions=instructions,
        )

    def _get_entry(self, observation: dict[str, Any], name: str, shape: tuple[int, ...], is_used: bool) -> np.ndarray:
        """Return the entry `name` of an observation; zeros for an entry that the policy does not use."""
        if name not in observation and not (is_used and np.prod(shape)):
            return np.zeros(shape, np.uint8)
        array = np.asarray(observation[name]) if name in observation else None
        kinds = "u" if name == "images" else "biuf"
        has_shape = array is not None and array.ndim == len(shape) and array[: shape[0]].shape == shape
        if array is None or not has_shape or array.dtype.kind not in kinds:
            received = (
                f"only {', '.join(observation) or 'an empty observation'}"
                if array is None
                else f"{name} {array.shape} {array.dtype}"
            )
            raise ConfigError(
                f"{self!r} received {received}, expected {name} {shape}{' uint8' * (name == 'images')}. Fix: env = "
                "policy.make_env(), which has the cameras and sizes of the policy; or convert your observations "
                "to this form."
            )
        return array

    def _get_instruction(self, observation: dict[str, Any]) -> str:
        env = self.run_plan.env
        texts = env.instructions or env.tasks
        if "instruction" in observation or len(texts) == 1:
            return str(observation.get("instruction", *texts[:1]))
        raise ConfigError(
            f"{self!r} needs an instruction, because its environment has several tasks. Fix: act(obs, "
            f"instruction={texts[-1]!r})."
        )

    def decide(self, obs: Observation, *, noise: FloatArray | None = None) -> PolicyOutput:
        """Return actions [B, K, A] for the environment, with tokens and log-probabilities [B, L].

        No gradients are computed.
        """
        output = self.policy.act(obs, noise=noise)
        # A copy, because the gripper is rewritten in place and a policy may keep its returned array.
        actions = np.array(output.actions)
        convert_gripper(actions, self.policy.spec.gripper, self.run_plan.env.action.gripper)
        return replace(output, actions=actions)


def load_policy(
    run_or_folder: str | Path, *overrides: str, trainable: bool = False, device: str | None = None
) -> LoadedPolicy:
    """Load the policy of a run, checkpoint or model folder into this process.

    Args:
        run_or_folder: a run, its name in ./runs, one of its checkpoints, or a model in its published layout: a folder,
            or `owner/name[@revision]` of the Hugging Face hub.
        overrides: arguments as for `embodyrl eval`; a folder that is not a run needs `env=` and `model=`.
        trainable: keep trainable weights in fp32.
        device: "cpu", "cuda", ...; None: a GPU if available.

    Raises:
        ConfigError: the policy does not fit its environment.
        CheckpointError: the path contains no usable weights.
    """
    return build_policy_of_config(compose_policy_config(run_or_folder, overrides), trainable=trainable, device=device)


def compose_policy_config(
    run_or_folder: str | Path, overrides: Sequence[str], config_dirs: Sequence[Path] = (), *, fetch: bool = True
) -> Config:
    """Compose the evaluation config of a run, checkpoint or model folder (see `load_policy` and `load_config`)."""
    path, base = str(run_or_folder), find_run_config(resolve_run(str(run_or_folder)))
    arguments = [format_override("ckpt", path), *overrides]
    cfg = load_config("eval", arguments, config_dirs=config_dirs, base=base, fetch=fetch)
    # Compose without model.path first, because the selected model determines whether this key exists.
    if base is None and cfg.model.weights is None and "path" in type(cfg.model).model_fields:
        arguments.append(format_override("model.path", path))
        return load_config("eval", arguments, config_dirs=config_dirs, fetch=fetch)
    return cfg


def build_policy_of_config(cfg: Config, *, trainable: bool = False, device: str | None = None) -> LoadedPolicy:
    """Load the policy of a config into this process (see `load_policy`)."""
    check_components(cfg)
    run_plan = build_run_plan(cfg, training=False)
    weights = resolve_initial_weights(cfg, run_plan.env)
    from embodyrl.policies.tensors import get_best_device

    sampling = cfg.algorithm.sampling_params
    request = PolicyRequest(
        env=run_plan.env,
        device=device or get_best_device(),
        seed=cfg.seed,
        trainable=trainable,
        fresh_heads=weights is not None,
        temperature=sampling.temperature,
        sampling=sampling,
    )
    policy = POLICIES.get(cfg.model.model_type).build(cfg.model, request)
    if weights is not None:
        policy.load_weights(weights)
    return LoadedPolicy(policy, run_plan)


def _is_batch(obs: dict[str, Any]) -> bool:
    if "instruction" in obs:
        return isinstance(obs["instruction"], Sequence) and not isinstance(obs["instruction"], str)
    return np.ndim(obs.get("images", ())) == 5 or np.ndim(obs.get("state", ())) == 2


def _split_batch(batch: dict[str, Any]) -> list[dict[str, Any]]:
    counts = {name: len(values) if np.ndim(values) else 0 for name, values in batch.items()}
    count = max(counts.values())
    if min(counts.values()) < count:
        raise ConfigError(
            f"The entries of a batch have different numbers of rows: {counts}. Pass one row per environment."
        )
    return [{name: values[row] for name, values in batch.items()} for row in range(count)]
