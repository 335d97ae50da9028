"""Config keys of `convert`."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Constraint, Positive, Settings, valid_if
from embodyrl.data.settings import FrameFormat, GripperIndex, OpenAndClosed


class Target(StrEnum):
    """Column names of the converted data set; columns of cameras are named `observation.images.<name>`."""

    action = "action"
    state = "observation.state"
    reward = "next.reward"
    success = "next.success"
    task = "task"


CAMERA = "observation.images."
"""Prefix of the column name of a camera in the converted data set."""


def _is_target(name: str) -> bool:
    return name in list(Target) or (name.startswith(CAMERA) and name.removeprefix(CAMERA).isidentifier())


class ConversionSettings(Settings):
    """Settings that describe the source and the format of the result."""

    keys: Annotated[
        dict[str, str],
        valid_if(lambda v: all(_is_target(name) for name in v.values())),
        Constraint(f"names of {', '.join(Target)} or {CAMERA}<camera>, by column of the source"),
    ] = {}
    """Target column name of each source column to convert, for example {image: observation.images.front, actions:
    action}; columns with the same target are concatenated. Default: the columns of LIBERO."""
    gripper: OpenAndClosed | None = None
    """Action values that open and close the gripper, for example [1,0]. Default: [-1,1] for the columns of LIBERO."""
    gripper_index: GripperIndex = -1
    """Index of the gripper in the action vector."""
    image_rotation_deg: Literal[0, 180] | None = None
    """Rotation in degrees that turns the stored frames upright. Default: 180 for LIBERO's HDF5 files, otherwise 0."""
    fps: Positive | None = None
    """Number of steps per second. Default: the control frequency of the source, or 20."""
    split: str = "train"
    """Split to convert: of RLDS, or the episodes of a mask (mask/<split>) in robomimic's HDF5 files."""
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """Instruction of every episode, for sources without instructions.
    Default: the instruction of the source; for LIBERO's HDF5 files without attributes, the file name."""
    skip_nonfinite: bool = False
    """If true, skip episodes with NaN or infinite numbers; if false, report an error."""
    images: FrameFormat = FrameFormat.png
    """Format of the images. png: lossless, inside the parquet files; mp4: lossy, but much smaller."""


class ConvertSettings(Settings):
    """Settings of `embodyrl convert`."""

    data: ConversionSettings = ConversionSettings()
