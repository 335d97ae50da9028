"""Properties of a Gymnasium environment that are measured in its first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from embodyrl.envs.gym.episode_info import describe_success_source, has_success_key, read_success
from embodyrl.envs.gym.settings import GymSettings

_MAX_STEPS, _MAX_STEPS_WITH_KEY, PROBED_S = 256, 2048, 2.0
"""Maximum steps and seconds of the probed episode, in which `info` is searched for a success key; more steps for
`env.success_key`, which may appear only at the end of an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Properties of an environment, measured on one instance."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    max_episode_steps: int
    """Time limit of the environment itself, env steps; 0: unknown."""
    kwargs: dict[str, Any]
    """Constructor arguments: `env.kwargs`, and the render mode if the constructor accepts a render mode."""
    reports_success: bool
    """True if the `info` of a step of the probed episode has a success key."""
    success: str
    """Source of success (see `RewardSpec.success`)."""
    dense: bool
    """True if a step of the probed episode without success has a positive reward, and `info` has a success key."""
    has_expert: bool
    """True if the environment or a wrapper has a method `expert_action`."""
    is_vector: bool
    """True for a `gymnasium.vector.VectorEnv`, which contains all environments; `observation_space` and `action_space`
    are those of one environment."""
    renders: bool
    """True if the environment supports the render mode `rgb_array`."""
    warnings: tuple[str, ...] = ()
    """Warnings about probable mistakes in the environment, found in the first steps."""
    instruction: str | None = None
    """Instruction of the first episode; None: no instruction."""
    has_goals: bool = False
    """True if the environment can compute rewards for relabeled goals."""


def get_max_probe_steps(cfg: GymSettings) -> int:
    """Return the maximum number of steps in which `info` is searched for a success key."""
    return _MAX_STEPS if cfg.success_key is None else _MAX_STEPS_WITH_KEY


def measure_success(infos: Sequence[Any], keys: Sequence[str], rewards: Sequence[Any]) -> dict[str, Any]:
    """Return the `Probe` fields about success from the infos and rewards of consecutive steps."""
    has_success = any(has_success_key(info, keys) for info in infos)
    steps = zip(infos, rewards, strict=True)
    dense = has_success and any(
        np.any((np.asarray(reward) > 0) & ~_get_success_mask(info, keys)) for info, reward in steps
    )
    return {"reports_success": has_success, "success": describe_success_source(infos, keys), "dense": bool(dense)}


def _get_success_mask(info: Any, keys: Sequence[str]) -> Any:
    return np.asarray(read_success(info, keys)).astype(np.bool_)
