"""Config keys for `model=lerobot`."""

from embodyrl.config.settings import Path, Seconds
from embodyrl.policies.settings import ModelSettings


class LeRobotProcessSettings(ModelSettings):
    """Config keys for a policy that runs in an installed LeRobot, which sets the precision."""

    path: Path | None = None
    """Folder written by `save_pretrained`: config.json, weights, and the files of both processors."""
    python: str | None = None
    """Python executable of an environment with LeRobot, which runs the policy and its packages; default: this
    interpreter."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names, else the first cameras."""
    load_timeout_s: Seconds = 600.0
    """Maximum time in seconds for loading the policy."""
    answer_timeout_s: Seconds = 120.0
    """Maximum time in seconds for a reply."""
