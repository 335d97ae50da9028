"""Keys of config.json that all LeRobot policies share. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from embodyrl.errors import CheckpointError, reason_of
from embodyrl.files import read_json

CONFIG_FILE = "config.json"
_PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
PREFIX = "observation.images."


class Feature(BaseModel):
    """Type and shape of an input or output feature."""

    model_config = ConfigDict(frozen=True)

    type: Literal["VISUAL", "STATE", "ENV", "ACTION", "REWARD", "LANGUAGE"]
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class Checkpoint(BaseModel):
    """Config of a LeRobot policy: inputs, outputs and chunk sizes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str
    n_obs_steps: PositiveInt = 1
    n_action_steps: PositiveInt = 1
    input_features: dict[str, Feature] = Field(default_factory=dict)
    output_features: dict[str, Feature] = Field(default_factory=dict)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the image features, in order."""
        return tuple(name for name, feature in self.input_features.items() if feature.type == "VISUAL")

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the state features: first the robot's state, then the environment's state."""
        found = [(f.type == "ENV", name, f.shape[0]) for name, f in self.input_features.items() if f.type != "VISUAL"]
        return tuple((name, size) for _, name, size in sorted(found))

    @property
    def state_dim(self) -> int:
        """Total size of all state features of one step."""
        return sum(size for _, size in self.states)

    @property
    def action_dim(self) -> int:
        """A: action dimension."""
        return self.output_features["action"].shape[0]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json of a LeRobot folder.

    Raises:
        CheckpointError: the file is missing or malformed, or a processor refers to Python code.
    """
    file = folder / CONFIG_FILE
    try:
        found = Checkpoint.model_validate(read_json(file))
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{file} is not the config of a LeRobot policy ({reason_of(error)}). Set model.path to the folder of "
            "save_pretrained."
        ) from error
    if "action" not in found.output_features:
        raise CheckpointError(f"{file}: output_features has no 'action'. Set model.path to a trained policy.")
    for name in _PROCESSORS:
        _check_steps(folder / name)
    return found


def _check_steps(file: Path) -> None:
    """Check that all steps of a processor are registered.

    For an unregistered step, LeRobot imports and calls any class that the file names.

    Raises:
        CheckpointError: a step refers to Python code, or the file is malformed.
    """
    if not file.is_file():
        return
    try:
        steps = read_json(file)["steps"]
        named = [step["class"] if "registry_name" not in step else None for step in steps]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file} is not a processor of a LeRobot policy ({reason_of(error)}). Download the policy again."
        ) from error
    if imported := [name for name in named if name is not None]:
        raise CheckpointError(
            f"{file} imports and calls {imported[0]}, which could run any code. Register the step with LeRobot "
            "(ProcessorStepRegistry), and save the policy again."
        )
