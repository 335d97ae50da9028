"""Shared keys of LeRobot's config.json: reading and writing. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from embodyrl.errors import CheckpointError
from embodyrl.files import read_json
from embodyrl.policies.files import LEROBOT_FIELDS, check_keys
from embodyrl.policies.vla.folder import CONFIG_FILE, RANDOM_INIT_KEY
from embodyrl.types import EnvSpec

STATE, ENVIRONMENT, ACTION = "observation.state", "observation.environment_state", "action"
IMAGES = "observation.images."
_FALSE_KEYS = ("use_amp", "use_peft", "push_to_hub")
_NULL_KEYS = ("pretrained_path", "pretrained_backbone_weights")


class Normalization(StrEnum):
    """Kinds of normalization, by LeRobot's names."""

    MEAN_STD = "MEAN_STD"
    MIN_MAX = "MIN_MAX"
    QUANTILES = "QUANTILES"
    QUANTILE10 = "QUANTILE10"
    IDENTITY = "IDENTITY"


class Feature(BaseModel):
    """Type and shape of an input or output feature."""

    model_config = ConfigDict(frozen=True)

    type: Literal["VISUAL", "STATE", "ENV", "ACTION", "REWARD", "LANGUAGE"]
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class FeatureConfig(BaseModel):
    """Keys of config.json that all LeRobot policies share: inputs, outputs and observed steps."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    n_obs_steps: PositiveInt = 1
    input_features: dict[str, Feature] = Field(default_factory=dict)
    output_features: dict[str, Feature] = Field(default_factory=dict)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the image features, in order."""
        return tuple(name for name, feature in self.input_features.items() if feature.type == "VISUAL")

    @property
    def action_dim(self) -> int:
        """A, the action dimension."""
        return self.output_features[ACTION].shape[0]


class LeRobotConfig(FeatureConfig):
    """Config keys shared by ACT and Diffusion Policy; unknown keys must be off (see `check_keys`)."""

    n_action_steps: PositiveInt
    normalization_mapping: dict[str, Normalization]
    vision_backbone: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet18"

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of all images; (0, 0) without cameras."""
        height, width = self.input_features[self.cameras[0]].shape[-2:] if self.cameras else (0, 0)
        return height, width

    @property
    def state_dim(self) -> int:
        """Dimension of the robot's state; 0: no state input."""
        feature = self.input_features.get(STATE)
        return feature.shape[0] if feature else 0

    @property
    def environment_name(self) -> str:
        """Name of the environment state among the input features."""
        names = (name for name, feature in self.input_features.items() if feature.type == "ENV")
        return next(names, ENVIRONMENT)

    @property
    def environment_dim(self) -> int:
        """Dimension of the environment's state; 0: no environment state."""
        feature = self.input_features.get(self.environment_name)
        return feature.shape[0] if feature else 0

    @property
    def horizon_length(self) -> int:
        """H: number of actions per chunk."""
        raise AssertionError("Each policy config must override horizon_length")

    @property
    def first_executed(self) -> int:
        """Number of actions at the start of a chunk that belong to past steps."""
        return self.n_obs_steps - 1

    def find_problem(self) -> str | None:
        """Return a description of the first config error, or None."""
        if ACTION not in self.output_features:
            return f"output_features has no '{ACTION}'"
        if not self.cameras and not self.environment_dim:
            return "input_features has neither an image nor an environment state"
        sizes = {self.input_features[name].shape for name in self.cameras}
        if len(sizes) > 1:
            return (
                f"the images have different shapes {sorted(sizes)}, but cameras of an environment have the same shape"
            )
        if self.n_action_steps > self.horizon_length - self.first_executed:
            max_actions = self.horizon_length - self.first_executed
            return f"n_action_steps={self.n_action_steps} exceeds the {max_actions} actions of a chunk"
        return None

    def fit_to(self, env: EnvSpec, executed: int) -> Self:
        """Return the config of a new model for an environment, with its cameras, state and actions.

        LeRobot's policies need two state inputs without images, so the state is split into two.
        """
        shape = (3, *env.cameras.size)
        steps = self.n_obs_steps
        cameras = env.cameras.names[-(len(env.cameras.names) // steps or 1) :]
        earlier = tuple(f"{name}_{back}" for back in range(steps - 1, 0, -1) for name in cameras)
        if env.cameras.names != earlier + cameras:
            cameras = env.cameras.names  # the environment's observations contain one step; see `find_mismatches`
        inputs = {f"{IMAGES}{name}": Feature(type="VISUAL", shape=shape) for name in cameras}
        if env.state_dim:
            width = env.state_dim // steps
            inputs[STATE] = Feature(type="STATE", shape=(width if cameras else max(1, width - width // 2),))
            if not cameras:
                inputs[ENVIRONMENT] = Feature(type="ENV", shape=(max(1, width // 2),))
        outputs = {ACTION: Feature(type="ACTION", shape=(env.action.dim,))}
        modes = {"ENV": self.normalization_mapping.get("STATE", Normalization.IDENTITY)} | self.normalization_mapping
        changed = {"input_features": inputs, "output_features": outputs, "normalization_mapping": modes}
        return self.model_copy(update=changed | {"n_action_steps": executed})

    def find_mismatches(self, env: EnvSpec) -> list[str]:
        """Return the mismatches between checkpoint and environment, one line each with the fix."""
        problems, steps = [], self.n_obs_steps
        state, cameras = steps * (self.state_dim + self.environment_dim), steps * len(self.cameras)
        history = f" for each of {steps} steps" if steps > 1 else ""
        if state and env.state_dim != state:
            problems.append(
                f"env '{env.name}' has a state of {env.state_dim} numbers, but the checkpoint needs "
                f"{self.state_dim + self.environment_dim}{history}{_format_fix(steps, env)}"
            )
        if cameras > len(env.cameras.names):
            problems.append(
                f"env '{env.name}' has {len(env.cameras.names)} cameras, but the checkpoint needs {len(self.cameras)}"
                f"{history}{_format_fix(steps, env)}"
            )
        if self.cameras and env.cameras.size != self.image_size:
            height, width = self.image_size
            problems.append(
                f"env '{env.name}' has images of {env.cameras.size[0]}x{env.cameras.size[1]}, but the checkpoint needs "
                f"{height}x{width}. Set env.init_params.camera_heights={height} and camera_widths={width}."
            )
        if env.action.dim != self.action_dim:
            problems.append(
                f"env '{env.name}' has {env.action.dim}-D actions, but the checkpoint has {self.action_dim}-D actions. "
                "Choose another environment or checkpoint."
            )
        return problems

    def to_json(self, kind: str, raw: Mapping[str, Any]) -> bytes:
        """Return the contents of config.json for LeRobot: the values of this config, and all other keys of `raw`."""
        own_values = json.loads(self.model_dump_json())
        other_values = {key: value for key, value in raw.items() if key not in (RANDOM_INIT_KEY, "type")}
        common = {"device": "cpu"} | dict.fromkeys(_FALSE_KEYS, False)
        common |= dict.fromkeys(("repo_id", "private", "tags", "license", *_NULL_KEYS))
        head = {key: own_values[key] for key in ("n_obs_steps", "input_features", "output_features")}
        return json.dumps({"type": kind} | head | common | other_values | own_values, indent=4).encode()


def _format_fix(steps: int, env: EnvSpec) -> str:
    if steps == env.history:
        return ". Choose another environment or checkpoint."
    return f". Set env.history={steps}, or for `embodyrl sft` data.history={steps}."


C = TypeVar("C", bound=LeRobotConfig)


def read_config(folder: Path, kind: str, config: type[C]) -> C:
    """Read config.json.

    Raises:
        CheckpointError: the file is missing, malformed, contradictory or of another policy.
    """
    path = folder / CONFIG_FILE
    try:
        raw: dict[str, Any] = dict(read_json(path))
        if (policy_type := raw.get("type", kind)) != kind:
            raise CheckpointError(f"{path} has policy type '{policy_type}', not '{kind}'. Set model={policy_type}.")
        check_keys(raw, path, ignored=(*config.model_fields, *LEROBOT_FIELDS))
        parsed = config.model_validate({key: value for key, value in raw.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path}: {where}={first['input']!r} is invalid: {first['msg']}. Download the file again."
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Set model.path to the folder of a LeRobot {kind} policy."
        ) from error
    # LeRobot executes at most the actions that a chunk contains.
    available = max(1, parsed.horizon_length - parsed.first_executed)
    if available < parsed.n_action_steps <= parsed.horizon_length:
        parsed = parsed.model_copy(update={"n_action_steps": available})
    if RANDOM_INIT_KEY not in raw and (problem := parsed.find_problem()):
        raise CheckpointError(f"{path}: {problem}. Use another checkpoint.")
    return parsed
