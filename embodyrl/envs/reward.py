"""A reward of the user's own, for every simulator, outside of its code: a function of what an env step brought, or
weights that were learned from episodes: how likely a small network holds success to be, in numpy.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from embodyrl.config.paths import resolve_asset
from embodyrl.config.settings import Path as SettingsPath
from embodyrl.config.settings import Settings, plain
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.registry import Registry, takes
from embodyrl.types import EnvSpec, FloatArray, ObservationOut

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


class LearnedReward:
    """The value head that `embodyrl sft objective.name=success` trained: by how much the probability of success exceeds
    its highest one of the episode so far. The return is the highest probability: an episode earns nothing by staying
    close to success without reaching it.
    """

    components = ("learned",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shape: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        self.cameras = int(self._shape.get("num_images", 0))
        """It looks at the first so many."""
        self.camera_names = tuple(self._shape.get("cameras", ()))
        self._weights: dict[str, np.ndarray] = {}
        self._best: dict[int, float] = {}

    def __call__(self, step: "RewardStep") -> float:
        """See `LearnedReward`; CheckpointError: the weights are of other observations."""
        found = self.probability(step.observation)
        best = 0.0 if step.step == 1 else self._best.get(step.slot, 0.0)
        self._best[step.slot] = max(best, found)
        return max(0.0, found - best)

    def probability(self, seen: ObservationOut) -> float:
        """That the goal holds in what is seen, as the network learned it."""
        if not self._weights:
            self._load(seen)
        x, shape = seen.state.astype(np.float64), self._shape
        if shape["normalized"]:
            w = self._weights
            x = ((x - w["states.mean"]) / np.sqrt(w["states.var"] + 1e-8)).clip(-10, 10)
        if shape["num_images"]:
            x = np.concatenate([self._encode(seen.images[: shape["num_images"]]), x])
        act = np.tanh if shape["activation"] == "tanh" else _relu
        last = 2 * len(shape["hidden"])
        for layer in range(0, last + 1, 2):
            x = self._dense(f"value_head.{layer}", x)
            x = x if layer == last else act(x)
        return float(1.0 / (1.0 + np.exp(-x[0])))

    def _encode(self, images: np.ndarray) -> np.ndarray:
        """[F] of images [C, H, W, 3]."""
        x = images.transpose(0, 3, 1, 2).reshape(-1, *images.shape[1:3]).astype(np.float32) / 255.0
        layers = [
            n.removesuffix(".weight") for n in self._weights if n.startswith("encoder.") and n.endswith(".weight")
        ]
        *convolutions, dense = sorted(layers, key=lambda name: int(name.split(".")[1]))
        for name in convolutions:
            windows = sliding_window_view(np.pad(x, ((0, 0), (1, 1), (1, 1))), (3, 3), (1, 2))[:, ::2, ::2]
            kernel, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
            x = _relu(np.einsum("chwij,ocij->ohw", windows, kernel, optimize=True) + bias[:, None, None])
        return _relu(self._dense(dense, x.reshape(-1)))

    def _dense(self, name: str, x: np.ndarray) -> np.ndarray:
        return self._weights[f"{name}.weight"] @ x + self._weights[f"{name}.bias"]

    def _load(self, seen: ObservationOut) -> None:
        from safetensors.numpy import load_file

        weights, shape = load_file(self._folder / WEIGHTS_FILE), self._shape
        images = (shape["num_images"], *shape["image_size"]) if shape["num_images"] else None
        mine = (min(len(seen.images), shape["num_images"]), *seen.images.shape[1:3]) if images else None
        if (shape["state_dim"], images) != (len(seen.state), mine) or "value_head.0.weight" not in weights:
            raise CheckpointError(
                f"reward.path={self._folder}: learned from a state of {shape['state_dim']} and images {images}, here "
                f"are {len(seen.state)} and {mine}; or it has no value head. Train it with `embodyrl sft "
                "objective.name=success` on episodes of this environment with these cameras."
            )
        self._weights = weights


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def is_learned(folder: Path) -> bool:
    """Whether a folder holds such weights."""
    return (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file()


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


def find_reward(path: str) -> StepFunction:
    """The function at package.module:function, or the weights in a folder.

    Raises:
        UnknownNameError: neither is there.
    """
    folder = resolve_asset(path)
    return LearnedReward(folder) if is_learned(folder) else STEP_REWARDS.get(path)


class StepReward:
    """`reward.path`, looked up but not called."""

    def __init__(self, cfg: StepRewardSettings) -> None:
        """Look the function up.

        Raises:
            UnknownNameError: there is none at that path.
        """
        assert cfg.path is not None
        self._function = find_reward(cfg.path)
        self._names = tuple(getattr(self._function, "components", (cfg.path.rpartition(":")[2],)))
        self._adds = cfg.mode is RewardMode.add
        self.components = (*self._names, *([SIMULATOR] if self._adds else []), ERRORS)
        self.weights = (*(cfg.weights.get(name, 1.0) for name in self.components[:-1]), 0.0)

    def declare(self, spec: EnvSpec) -> EnvSpec:
        """Add the parts to what an environment declares.

        Raises:
            ConfigError: a learned reward saw other cameras, or in another order, whose pictures may have the same size.
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
    if not is_learned(resolve_asset(cfg.path)) and (found := STEP_REWARDS.problems([cfg.path], "reward.path")):
        return found
    known = StepReward(cfg).components[:-1]
    wrong = [name for name in cfg.weights if name not in known]
    return [f"reward.weights: {', '.join(wrong)}: no part of the reward. It has: {', '.join(known)}."] if wrong else []
