"""Config of a LeRobot policy of any type, and the check of its processors. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

from embodyrl.errors import CheckpointError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.lerobot.config import ACTION, FeatureConfig
from embodyrl.policies.vla.folder import CONFIG_FILE
from embodyrl.policies.vla.processors import POSTPROCESSOR, PREPROCESSOR

_PROCESSORS = (f"{PREPROCESSOR}.json", f"{POSTPROCESSOR}.json")


class Checkpoint(FeatureConfig):
    """Keys of config.json that are common to LeRobot policies of all types."""

    type: str
    n_action_steps: PositiveInt = 1

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the state features: first the robot's state, then the environment's state."""
        features = [
            (f.type == "ENV", name, f.shape[0]) for name, f in self.input_features.items() if f.type != "VISUAL"
        ]
        return tuple((name, size) for _, name, size in sorted(features))

    @property
    def state_dim(self) -> int:
        """Total size of all state features of one step."""
        return sum(size for _, size in self.states)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json of a LeRobot folder.

    Raises:
        CheckpointError: the file is missing or malformed, or a processor refers to Python code.
    """
    file = folder / CONFIG_FILE
    with reject_malformed(file, "Set model.path to the folder that save_pretrained of a LeRobot policy wrote."):
        checkpoint = Checkpoint.model_validate(read_json(file))
    if ACTION not in checkpoint.output_features:
        raise CheckpointError(f"{file}: output_features has no '{ACTION}'. Set model.path to a trained policy.")
    for name in _PROCESSORS:
        _check_steps(folder / name)
    return checkpoint


def _check_steps(file: Path) -> None:
    """Check that all steps of a processor are registered.

    For an unregistered step, LeRobot imports and calls any class that the file names.

    Raises:
        CheckpointError: a step refers to Python code, or the file is malformed.
    """
    if not file.is_file():
        return
    with reject_malformed(file, "Download the LeRobot policy again."):
        steps = read_json(file)["steps"]
        named = [step["class"] if "registry_name" not in step else None for step in steps]
    if imported := [name for name in named if name is not None]:
        raise CheckpointError(
            f"{file} imports and calls {imported[0]}, which could run any code. Register the step with LeRobot "
            "(ProcessorStepRegistry), and save the policy again."
        )
