"""A trained policy as a Python object: observations in, actions out, for custom loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.api.environment import SingleEnv, env_of
from embodyrl.commands.run_folder import first_weights
from embodyrl.config.compose import format_override
from embodyrl.config.paths import resolve_run
from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.saved import run_config
from embodyrl.plan.schema import Config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.specs import convert_gripper
from embodyrl.types import FloatArray, Observation, PolicyOutput


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy in this process, with the spec of its training environment."""

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
        return env_of(self.run_plan)

    def act(
        self, obs: dict[str, Any], *, instruction: str | None = None, noise: FloatArray | None = None
    ) -> FloatArray:
        """Return the next chunk of actions.

        Args:
            obs: observation of `make_env` (`images` [C, H, W, 3], `state` [S], `instruction`), or a batch of them, with
                one more leading axis (a vector environment's). Parts that the policy does not read may be missing, and
                the instruction if the environment has one task.
            instruction: replaces `obs["instruction"]`.
            noise: [B, L] uniform in [0, 1), one number per token, to sample as in training
                (`algorithm.sampling_params`); None: greedy.

        Returns:
            [K, A] actions to execute in order, in the environment's units; for a batch [B, K, A].

        Raises:
            ConfigError: the observation does not match the spec of the environment.
        """
        batched = _is_batch(obs)
        out = self.decide(self.observe([obs] if not batched else _rows(obs), instruction), noise=noise)
        return out.actions if batched else out.actions[0]

    def observe(self, seen: Sequence[dict[str, Any]], instruction: str | None = None) -> Observation:
        """Combine observations of several environments into a batch for the policy."""
        env, reads = self.run_plan.env, self.policy.spec
        shape = (len(env.cameras.names), *env.cameras.size, 3)
        images = [self._part(one, "images", shape, reads.inputs.num_images > 0)[: shape[0]] for one in seen]
        state = [self._part(one, "state", (env.state_dim,), reads.inputs.state) for one in seen]
        words = tuple(instruction or self._instruction(one) for one in seen)
        return Observation(
            images=np.stack(images).astype(np.uint8, copy=False),
            state=np.stack(state).astype(np.float32, copy=False),
            instructions=words,
        )

    def _part(self, one: dict[str, Any], name: str, shape: tuple[int, ...], read: bool) -> np.ndarray:
        """Return the entry `name` of an observation; zeros for an entry that the policy does not use."""
        if name not in one and not (read and np.prod(shape)):
            return np.zeros(shape, np.uint8)
        found = np.asarray(one[name]) if name in one else None
        kinds = "u" if name == "images" else "biuf"
        if found is None or found[: shape[0]].shape != shape or found.dtype.kind not in kinds:
            given = f"only {', '.join(one)}" if found is None else f"{name} {found.shape} {found.dtype}"
            raise ConfigError(
                f"{self!r} received {given}, expected {name} {shape}{' uint8' * (name == 'images')}. Fix: env = "
                "policy.make_env(), which has the cameras and sizes of the policy; or convert your observations "
                "to this form."
            )
        return found

    def _instruction(self, one: dict[str, Any]) -> str:
        env = self.run_plan.env
        texts = env.instructions or env.tasks
        if "instruction" in one or len(texts) == 1:
            return str(one.get("instruction", *texts[:1]))
        raise ConfigError(
            f"{self!r} needs an instruction, because it has several tasks. Fix: act(obs, instruction={texts[-1]!r})."
        )

    def decide(self, obs: Observation, *, noise: FloatArray | None = None) -> PolicyOutput:
        """Return actions [B, K, A] for the environment, with tokens and log-probabilities [B, L].

        No gradients are computed.
        """
        out = self.policy.act(obs, noise=noise)
        # A copy, because the gripper is rewritten in place and a policy may keep its returned array.
        actions = np.array(out.actions)
        convert_gripper(actions, self.policy.spec.gripper, self.run_plan.env.action.gripper)
        return replace(out, actions=actions)


def load_policy(
    run_or_folder: str | Path, *words: str, trainable: bool = False, device: str | None = None
) -> LoadedPolicy:
    """Load the policy of a run, checkpoint or model folder into this process.

    Args:
        run_or_folder: a run, its name in ./runs, one of its checkpoints, or a model in its published layout: a folder,
            or `owner/name[@revision]` of the hub.
        words: overrides as for `embodyrl eval`; a folder that is not a run needs `env=` and `model=`.
        trainable: keep trainable weights in fp32.
        device: "cpu", "cuda", ...; None: a GPU if available.

    Raises:
        ConfigError: the policy does not fit its environment.
        CheckpointError: the path contains no usable weights.
    """
    place, base = str(run_or_folder), run_config(resolve_run(str(run_or_folder)))
    named = format_override("ckpt", place)
    cfg = load_config("eval", [named, *words], base=base)
    # Compose without model.path first: the model determines whether this key exists.
    if base is None and cfg.model.weights is None and "path" in type(cfg.model).model_fields:  # it describes itself
        cfg = load_config("eval", [named, format_override("model.path", place), *words])
    return policy_of(cfg, trainable=trainable, device=device)


def policy_of(cfg: Config, *, trainable: bool = False, device: str | None = None) -> LoadedPolicy:
    """Load the policy of a config into this process (see `load_policy`)."""
    check_components(cfg)
    run_plan = build_run_plan(cfg, training=False)
    weights = first_weights(cfg, run_plan.env)
    from embodyrl.policies.tensors import best_device

    drawn = cfg.algorithm.sampling_params
    request = PolicyRequest(
        env=run_plan.env,
        device=device or best_device(),
        seed=cfg.seed,
        trainable=trainable,
        temperature=drawn.temperature,
        sampling=drawn,
    )
    policy = POLICIES.get(cfg.model.model_type).build(cfg.model, request)
    if weights is not None:
        policy.load_weights(weights)
    return LoadedPolicy(policy, run_plan)


def _is_batch(obs: dict[str, Any]) -> bool:
    if "instruction" in obs:
        return isinstance(obs["instruction"], Sequence) and not isinstance(obs["instruction"], str)
    return np.ndim(obs.get("images", ())) == 5 or np.ndim(obs.get("state", ())) == 2


def _rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    count = len(next(iter(batch.values())))
    return [{name: values[row] for name, values in batch.items()} for row in range(count)]
