"""Config keys for `model=lerobot`."""

from embodyrl.config.settings import Path, Seconds
from embodyrl.policies.settings import ModelSettings


class LeRobotProcessSettings(ModelSettings):
    """Config keys for a policy of an installed LeRobot."""

    path: Path | None = None
    """Folder of `save_pretrained`: config.json, weights and the files of both processors."""
    python: str | None = None
    """Interpreter that has LeRobot; default: this interpreter. The process runs the code of that environment."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names, else the first cameras."""
    load_timeout_s: Seconds = 600.0
    """Time limit for loading the policy."""
    answer_timeout_s: Seconds = 120.0
    """Time limit of a reply."""
