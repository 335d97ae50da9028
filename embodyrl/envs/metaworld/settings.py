"""Config keys for MetaWorld. Tasks, instructions and difficulty groups equal those of LeRobot's evaluation."""

import tomllib
from pathlib import Path
from typing import Annotated

from embodyrl.config.settings import ChangesStateIds
from embodyrl.envs.settings import CameraSettings, EnvSettings, RenderProfile, RewardSettings

_GROUPS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
TASKS = {name: text for group in _GROUPS.values() for name, text in group.items()}
"""Instruction of each of the 50 tasks, by task name."""
_HELD_OUT = ("bin-picking-v3", "box-close-v3", "hand-insert-v3", "door-lock-v3", "door-unlock-v3")
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "MT50": tuple(sorted(TASKS)),
    "MT10": (
        *("reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-open-v3", "drawer-close-v3"),
        *("button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "window-close-v3"),
    ),
    "ML45": (*(name for name in sorted(TASKS) if name not in _HELD_OUT), *_HELD_OUT),
    **{name: tuple(group) for name, group in _GROUPS.items()},
}
"""Task names of each benchmark and difficulty group; the last five tasks of ML45 are its test tasks."""
TASK_IDS = {f"MetaWorld-{name}": ("metaworld", f"env.id={name}") for name in TASKS}
"""Environment preset and config override that select a single task, by the task's Gymnasium id."""
HIDDEN_GOALS = ("ML45",)
"""Benchmarks in which the observation does not contain the goal."""


STATE, PROPRIOCEPTION = 39, 4
"""Dimension of MetaWorld's state observation, and dimension of its proprioceptive part."""


class MetaWorldSettings(EnvSettings, RewardSettings, CameraSettings):
    """Config keys for MetaWorld."""

    keys_by_condition = {"pixels": "init_params.camera_names"}

    id: Annotated[str, ChangesStateIds] = "MT50"
    """Task (reach-v3), benchmark (MT10, MT50, ML45), or difficulty group of MT50: easy, medium, hard, very_hard."""
    pixels: bool = True
    """Observations. true: camera images, hand position and gripper; false: the 39-dimensional state and a one-hot task
    id."""
    render_profile: RenderProfile = RenderProfile.lean
    """full: pixel-identical to the package; lean: without multisampling and shadows, same physics."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return f"metaworld {self.id}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks that `id` selects."""
        return BENCHMARKS.get(self.id, (self.id,))
