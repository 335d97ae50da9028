"""User-defined rewards for any simulator: a function of an env step, or a reward model in a folder."""

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from embodyrl.config.paths import resolve_asset
from embodyrl.config.settings import Path as SettingsPath
from embodyrl.config.settings import Settings
from embodyrl.envs.learned_reward import load_reward
from embodyrl.envs.reward_step import RewardStep
from embodyrl.errors import CheckpointError, ConfigError, UnknownNameError
from embodyrl.registry import REWARDS, takes
from embodyrl.types import EnvSpec

RewardMode = StrEnum("RewardMode", ["replace", "add"])
SIMULATOR, ERRORS = "simulator", "errors"
"""Names of additional reward components: the simulator's reward, and the number of failed reward calls."""


class StepRewardSettings(Settings):
    """Config keys for the reward of an env step."""

    keys_by_condition = {"path": "mode"}

    path: SettingsPath | None = None
    """package.module:function that maps a RewardStep to a number or a dict of numbers, or the folder of a reward model
    trained by `embodyrl sft objective.name=success`; default: the simulator's own reward."""
    mode: RewardMode = RewardMode.replace
    """replace: use only the reward of reward.path; add: add it to the simulator's reward."""
    weights: dict[str, float] = {}
    """Weight of each reward component by name, 1 by default; with reward.mode=add, `simulator` is also a component."""

    def problems(self) -> Iterator[str]:
        """Yield an error if weights are set without a reward function."""
        if self.weights and self.path is None:
            yield "reward.weights needs reward.path, which is not set. Set reward.path, or remove the weights."


def success(step: RewardStep) -> float:
    """Return 1 if the goal is reached after the step, else 0.

    With reward.mode=add, this reward is a bonus of reward.weights.success.
    """
    return float(step.success)


StepFunction = Callable[[RewardStep], float | Mapping[str, float]]
"""Function that returns the reward of a step, or a mapping of reward components, which are weighted and summed. The
attribute `components` of the function contains the names of the components."""


def _find_function(name: str) -> StepFunction:
    """Return the reward model in a folder, or the reward function of a name or of `package.module:attr`.

    Raises:
        UnknownNameError: `name` selects no function of a RewardStep.
    """
    folder = resolve_asset(name)
    if folder.is_dir() and (model := load_reward(folder)) is not None:
        return model
    function = REWARDS.get(name)
    if isinstance(function, type) or not takes(1)(function):
        raise UnknownNameError(f"reward '{name}' is {function!r:.80}, expected a function of a RewardStep.")
    return function


class StepReward:
    """Reward function or reward model of `reward.path`, with the weights of its components."""

    def __init__(self, cfg: StepRewardSettings) -> None:
        """Look up the reward function or reward model in `reward.path`.

        Raises:
            UnknownNameError: the path names no function.
        """
        assert cfg.path is not None
        self._function = _find_function(cfg.path)
        self._names = tuple(getattr(self._function, "components", (cfg.path.rpartition(":")[2],)))
        self._adds_simulator_reward = cfg.mode is RewardMode.add
        self.components = (*self._names, *([SIMULATOR] if self._adds_simulator_reward else []), ERRORS)
        self.weights = (*(cfg.weights.get(component, 1.0) for component in self.components[:-1]), 0.0)

    def add_to_spec(self, spec: EnvSpec) -> EnvSpec:
        """Add the reward components to an environment's spec.

        Raises:
            ConfigError: the reward model was trained with other cameras, or with another order of cameras.
        """
        cameras, names = getattr(self._function, "cameras", 0), getattr(self._function, "camera_names", ())
        if names and spec.cameras.names[: len(names)] != names:
            raise ConfigError(
                f"reward.path: the model was trained with the cameras {', '.join(names)}; env '{spec.name}' renders "
                f"{', '.join(spec.cameras.names) or 'none'}. List the model's cameras first, in this order."
            )
        reward = replace(spec.reward, components=self.components, weights=self.weights, cameras=cameras)
        return replace(spec, reward=reward)

    def compute_components(self, step: RewardStep, simulator_reward: float) -> tuple[list[float], str | None]:
        """Call the function; return the reward components, and the error message if the call failed.

        `simulator_reward` is the reward of the simulator.

        Raises:
            CheckpointError: the observations do not fit the reward model.
        """
        problem = None
        try:
            value = self._function(step)
            # The parts are columns of metrics and records, which are allocated before the first step.
            if isinstance(value, Mapping) and {*value} != {*self._names}:
                raise ValueError(
                    f"the function returned components {', '.join(value)}, expected {', '.join(self._names)}"
                )
            parts = [float(value[name]) for name in self._names] if isinstance(value, Mapping) else [float(value)]
            if len(parts) != len(self._names) or not all(map(math.isfinite, parts)):
                raise ValueError(f"the function returned {value!r:.80}, expected {len(self._names)} finite number(s)")
        except CheckpointError:  # the model fails at every step
            raise
        except Exception as error:  # errors of a user's function are counted and reported
            parts, problem = (
                [0.0] * len(self._names),
                f"{type(error).__name__}: {error}"[:300] + _format_location(error),
            )
        simulator_parts = [simulator_reward] if self._adds_simulator_reward else []
        return [*parts, *simulator_parts, float(problem is not None)], problem

    def compute_total(self, parts: list[float]) -> float:
        """Return the weighted sum of the components."""
        return sum(weight * part for weight, part in zip(self.weights, parts, strict=True))


def _format_location(error: Exception) -> str:
    """Return the file and line of an error in the user's function; empty if the returned value is invalid."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    function_frames = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(function_frames[-1].filename).name}, line {function_frames[-1].lineno})" if function_frames else ""


def reward_problems(cfg: StepRewardSettings) -> list[str]:
    """Return errors in `reward.path` and `reward.weights`, one line each, without calling the function."""
    if cfg.path is None:
        return []
    try:
        components = StepReward(cfg).components[:-1]
    except UnknownNameError as error:
        return [f"reward.path: {error}"]
    if unknown := [name for name in cfg.weights if name not in components]:
        return [f"reward.weights: unknown reward component {', '.join(unknown)}. Known: {', '.join(components)}."]
    return []
