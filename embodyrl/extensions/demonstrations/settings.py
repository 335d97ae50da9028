"""Keys of demonstrations."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Must, Path, only
from embodyrl.extensions.text.settings import DataSettings


class DemonstrationSettings(DataSettings):
    """Demonstrations of a robot."""

    more: list[Path] = []
    """Further folders of demonstrations of the same environment, learned from together with data.path."""
    action_key: str = "action"
    """Column of the actions; like the next five keys for data sets of other programs only."""
    state_key: str = "observation.state"
    """Column of the state."""
    cameras: dict[str, str] = {}
    """Cameras to read and the column of each, for example {front: observation.image}; default: all columns named
    observation.images.<camera>. Give them the names of the environment's cameras."""
    gripper: Annotated[list[float], only(lambda v: len(set(v)) == len(v) == 2), Must("[open,closed]")] | None = None
    """Actions that open and close the gripper, for example [1,0]. Without it, the policy does not fit environments
    that declare a gripper."""
    gripper_index: Annotated[int, Field(ge=-1000, lt=1000)] = -1
    """Place of the gripper in the action."""
    image_rotation_deg: Literal[0, 180] = 0
    """Rotation that brings the stored frames upright."""
    history: Annotated[int, Field(ge=1, le=100)] = 1
    """Observed steps of a sample, oldest first, for policies with n_obs_steps; its actions begin at the oldest."""
    skip_nonfinite: bool = False
    """Leave out episodes with NaN or infinite numbers; false: they are an error."""
    needs = {"gripper": "gripper_index"}

    image_aug: bool = True
    """Random crop, brightness, contrast, saturation and hue, as in the official fine-tuning recipe."""
