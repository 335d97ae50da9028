"""Checks of the cameras and tasks that a config selects in a simulator."""

from collections.abc import Collection, Iterator

from embodyrl.envs.settings import CameraSettings, EnvSettings
from embodyrl.registry import closest


def find_camera_problems(cfg: CameraSettings, available: Collection[str] | None = None) -> Iterator[str]:
    """Yield errors about selected cameras that occur twice or are not in `available`."""
    names = cfg.init_params.camera_names
    for name in names:
        if available is not None and name not in available:
            yield (
                f"env.init_params.camera_names: '{name}' is not a camera of this environment."
                f"{closest(name, available)} Known: {', '.join(available)}."
            )
    if len(set(names)) < len(names):
        yield f"env.init_params.camera_names={list(names)} contains a camera twice. Remove the duplicate."


def find_task_problems(cfg: EnvSettings, count: int, explanation: str) -> Iterator[str]:
    """Yield an error for each split with task ids outside 0..count-1; `explanation` explains the ids in the message."""
    for split, values in cfg.splits.items():
        invalid = [task for task in values.task_ids or () if not 0 <= task < count]
        if invalid:
            yield f"env.{split}.task_ids: {invalid} must be in 0..{count - 1} ({explanation})."
