"""Rewards of users, for every simulator: a function of an env step, or a reward model in a folder."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from embodyrl.config.paths import resolve_asset
from embodyrl.config.settings import Path as SettingsPath
from embodyrl.config.settings import Settings, plain
from embodyrl.errors import ConfigError
from embodyrl.registry import Registry, takes
from embodyrl.types import EnvSpec, FloatArray, ObservationOut

RewardMode = StrEnum("RewardMode", ["replace", "add"])
SIMULATOR, ERRORS = "simulator", "errors"
"""Parts of the reward beside those of the function: the simulator's own where it counts, and steps that failed."""


class StepRewardSettings(Settings):
    """What an env step earns."""

    needs = {"path": "mode"}

    path: SettingsPath | None = None
    """package.module:function of a RewardStep -> number or named numbers, or the folder of a reward model that
    `embodyrl sft objective.name=success` trained; default the simulator's own reward."""
    mode: RewardMode = RewardMode.replace
    """replace: what reward.path returns counts instead of the simulator's reward; add: beside it."""
    weights: dict[str, float] = {}
    """Weight of each part by name, 1 where none is given; with reward.mode=add, `simulator` is one of them."""

    def problems(self) -> Iterator[str]:
        """Refuse weights of nothing."""
        if self.weights and self.path is None:
            yield "reward.weights: reward.path is not set; set it to a function, or leave the weights out."


def changed_reward(cfg: Any) -> dict[str, Any]:
    """`reward` and its keys, where a config has another one than the simulator's; else nothing."""
    reward = getattr(cfg, "reward", None)
    return {"reward": plain(reward)} if isinstance(reward, StepRewardSettings) and reward.path is not None else {}


@dataclass(frozen=True, kw_only=True)
class RewardStep:
    """One executed env step, as a reward function sees it.

    >>> def careful(step: RewardStep) -> float:
    ...     return step.success - 0.01 * float(abs(step.action).sum())
    """

    slot: int
    step: int
    """Its number in the episode, from 1."""
    reset_id: int
    task_id: int
    instruction: str
    action: FloatArray
    """[A] as it was executed."""
    reward: float
    """The simulator's own reward after the action, neither relative nor scaled."""
    success: bool
    """The task's goal holds after the action."""
    terminated: bool
    truncated: bool
    look: Callable[[], ObservationOut] = field(repr=False)
    ask: Callable[[], Mapping[str, Any]] = field(repr=False)

    @cached_property
    def observation(self) -> ObservationOut:
        """Images [C, H, W, 3] uint8 and state [S] after the action; drawn when first read, so images cost only then."""
        return self.look()

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """What the simulator says beside it, by its own names; empty for simulators that say nothing."""
        return self.ask()


def success(step: RewardStep) -> float:
    """1 for a step after which the task's goal holds: with reward.mode=add, a bonus of reward.weights.success."""
    return float(step.success)


StepFunction = Callable[[RewardStep], float | Mapping[str, float]]
"""Several numbers are weighted and added; the function's attribute `components` lists their names."""

STEP_REWARDS: Registry[StepFunction] = Registry(
    "step reward",
    group="embodyrl.step_rewards",
    wants="a function of a RewardStep",
    fits=lambda found: takes(1)(found) and not isinstance(found, type),
)


REWARD_MODELS: Registry[Callable[[Path], StepFunction | None]] = Registry(
    "reward model",
    group="embodyrl.reward_models",
    wants="a function of a folder that returns a function of a RewardStep or None",
    fits=takes(1),
)


def _reward_model(path: str) -> StepFunction | None:
    """Return the reward model in a folder; None: the path is that of a function."""
    folder = resolve_asset(path)
    found = (load(folder) for load in REWARD_MODELS.every()) if folder.is_dir() else ()
    return next((model for model in found if model is not None), None)


class StepReward:
    """`reward.path`, looked up but not called."""

    def __init__(self, cfg: StepRewardSettings) -> None:
        """Look the function up.

        Raises:
            UnknownNameError: there is none at that path.
        """
        assert cfg.path is not None
        self._function = _reward_model(cfg.path) or STEP_REWARDS.get(cfg.path)
        self._names = tuple(getattr(self._function, "components", (cfg.path.rpartition(":")[2],)))
        self._adds = cfg.mode is RewardMode.add
        self.components = (*self._names, *([SIMULATOR] if self._adds else []), ERRORS)
        self.weights = (*(cfg.weights.get(name, 1.0) for name in self.components[:-1]), 0.0)

    def declare(self, spec: EnvSpec) -> EnvSpec:
        """Add the parts to what an environment declares.

        Raises:
            ConfigError: a learned reward saw other cameras, or in another order, whose images may have the same size.
        """
        cameras, names = getattr(self._function, "cameras", 0), getattr(self._function, "camera_names", ())
        if names and spec.cameras[: len(names)] != names:
            raise ConfigError(
                f"reward.path was learned from the cameras {', '.join(names)}; env '{spec.name}' shows "
                f"{', '.join(spec.cameras) or 'none'}. Name these first, in this order."
            )
        return replace(spec, components=self.components, component_weights=self.weights, rewarded_cameras=cameras)

    def parts(self, step: RewardStep, simulated: float) -> tuple[list[float], str | None]:
        """Call the function; returns the components, and why it failed. `simulated`: what is earned without it."""
        why = None
        try:
            value = self._function(step)
            # The parts are columns of metrics and records, laid out before the first step.
            if isinstance(value, Mapping) and {*value} != {*self._names}:
                raise ValueError(f"its parts are {', '.join(value)}; its `components` are {', '.join(self._names)}")
            parts = [float(value[name]) for name in self._names] if isinstance(value, Mapping) else [float(value)]
            if len(parts) != len(self._names) or not all(map(math.isfinite, parts)):
                raise ValueError(f"it returned {value!r:.80}, not {len(self._names)} finite number(s)")
        except Exception as error:  # whatever a user's function raises is counted and said
            parts, why = [0.0] * len(self._names), f"{type(error).__name__}: {error}"[:300]
        return [*parts, *([simulated] if self._adds else []), float(why is not None)], why

    def total(self, parts: list[float]) -> float:
        """The weighted sum of the parts."""
        return sum(weight * part for weight, part in zip(self.weights, parts, strict=True))


def reward_problems(cfg: StepRewardSettings) -> list[str]:
    """What is wrong with `reward.path` and its weights, one line each; the function is looked up, never called."""
    if cfg.path is None:
        return []
    if _reward_model(cfg.path) is None and (found := STEP_REWARDS.problems([cfg.path], "reward.path")):
        return found
    known = StepReward(cfg).components[:-1]
    wrong = [name for name in cfg.weights if name not in known]
    return [f"reward.weights: {', '.join(wrong)}: no part of the reward. It has: {', '.join(known)}."] if wrong else []
