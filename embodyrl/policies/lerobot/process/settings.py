"""Config keys for `model=lerobot`."""

from embodyrl.config.settings import Path, Seconds
from embodyrl.policies.settings import ModelSettings


class LeRobotProcessSettings(ModelSettings):
    """Config keys for a policy that runs in a separate process with LeRobot, which sets the precision."""

    path: Path | None = None
    """Folder written by `save_pretrained`: config.json, weights, and the files of both processors."""
    python: str | None = None
    """Python executable that runs the policy, from a virtual environment with LeRobot and the policy's packages;
    default: this interpreter."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the cameras
    with the checkpoint's names, or the first cameras if the names differ."""
    load_timeout_s: Seconds = 600.0
    """Maximum time in seconds for loading the policy."""
    answer_timeout_s: Seconds = 120.0
    """Maximum time in seconds for a reply."""
