"""A trained policy as an object: observations in, actions out, for loops of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.commands.run_folder import first_weights
from embodyrl.config.paths import resolve_run
from embodyrl.errors import ConfigError
from embodyrl.plan.blueprint import Blueprint, draw_blueprint
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config, run_config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.program.environment import SingleEnv, env_of
from embodyrl.types import FloatArray, Observation, PolicyOutput
from embodyrl.workers.rollout_worker import convert_gripper


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy in this process, with what it was trained for."""

    policy: Policy
    """The module (`policy.module`) and its own interface: `score` for gradients, `values`, `save`."""
    blueprint: Blueprint

    def __repr__(self) -> str:
        spec = self.policy.spec
        return f"LoadedPolicy({spec.name}, chunks of {spec.num_action_chunks} x {spec.action_dim}, {self.env_name})"

    @property
    def env_name(self) -> str:
        """Environment that its run was about."""
        return self.blueprint.env.name

    def make_env(self) -> SingleEnv:
        """That environment, with the cameras and sizes that the policy knows."""
        return env_of(self.blueprint)

    def act(
        self, obs: dict[str, Any], *, instruction: str | None = None, noise: FloatArray | None = None
    ) -> FloatArray:
        """Choose the next chunk of actions.

        Args:
            obs: of `make_env` (`images` [C, H, W, 3], `state` [S], `instruction`), or a batch of such, each with one
                more axis in front (a vector environment's).
            instruction: says what to do instead of `obs["instruction"]`.
            noise: [B, L] uniform in [0, 1), one number a token, to draw as in training
                (`algorithm.sampling_params`); None: greedy.

        Returns:
            [K, A] actions to be executed one after the other, as the environment takes them; of a batch [B, K, A].
        """
        batched = isinstance(obs["instruction"], Sequence) and not isinstance(obs["instruction"], str)
        out = self.decide(self.observe([obs] if not batched else _rows(obs), instruction), noise=noise)
        return out.actions if batched else out.actions[0]

    def observe(self, seen: Sequence[dict[str, Any]], instruction: str | None = None) -> Observation:
        """Put observations of single environments together as the policy wants them."""
        env = self.blueprint.env
        shape = (len(env.cameras), *env.image_size, 3)
        images = [np.asarray(one.get("images", np.zeros(shape, np.uint8)))[: shape[0]] for one in seen]
        if images[0].shape != shape:
            raise ConfigError(
                f"{self!r} was given images {images[0].shape}, expected {shape}. Fix: env = policy.make_env(), "
                "which has the cameras and sizes that it knows."
            )
        state = [np.asarray(one.get("state", np.zeros(env.state_dim)), np.float32) for one in seen]
        words = tuple(instruction or str(one["instruction"]) for one in seen)
        return Observation(images=np.stack(images), state=np.stack(state), instructions=words)

    def decide(self, obs: Observation, *, noise: FloatArray | None = None) -> PolicyOutput:
        """Actions [B, K, A] as the environment takes them, with tokens and log-probabilities [B, L]; no gradients."""
        out = self.policy.act(obs, noise=noise)
        # A copy, because the gripper is rewritten in place and a policy may keep what it returned.
        actions = np.array(out.actions)
        convert_gripper(actions, self.policy.spec.gripper, self.blueprint.env.gripper)
        return replace(out, actions=actions)


def load_policy(
    run_or_folder: str | Path, *words: str, trainable: bool = False, device: str | None = None
) -> LoadedPolicy:
    """Load a policy into this process.

    Args:
        run_or_folder: a run, its name in ./runs, a checkpoint of it, or a model in its public layout: a folder, or
            `owner/name[@revision]` of the hub.
        words: further settings as `embodyrl eval` takes them; a folder that is no run wants `env=` and `model=`.
        trainable: keep fp32 weights that can be trained.
        device: "cpu", "cuda", ...; None: a GPU where there is one.

    Raises:
        ConfigError: it does not fit its environment.
        CheckpointError: nothing usable is there.
    """
    place, base = str(run_or_folder), run_config(resolve_run(str(run_or_folder)))
    cfg = load_config("eval", [f"ckpt={place}", *words], base=base)
    # First composed without a path: only then is it known whether this model has one.
    if base is None and cfg.model.weights is None and "path" in type(cfg.model).model_fields:  # it describes itself
        cfg = load_config("eval", [f"ckpt={place}", f"model.path={place}", *words])
    check_components(cfg)
    blueprint = draw_blueprint(cfg, training=False)
    weights = first_weights(cfg, blueprint.env)
    assert weights is not None, "ckpt is set above"
    from embodyrl.workers.training import best_device

    drawn = cfg.algorithm.sampling_params
    request = PolicyRequest(
        env=blueprint.env,
        device=device or best_device(),
        seed=cfg.seed,
        trainable=trainable,
        temperature=drawn.temperature,
        sampling=drawn,
    )
    policy = POLICIES.get(cfg.model.model_type).build(cfg.model, request)
    policy.load_weights(weights)
    return LoadedPolicy(policy, blueprint)


def _rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: values[row] for name, values in batch.items()} for row in range(len(batch["instruction"]))]
