"""Config keys for ManiSkill tasks, and embodyrl's additions: instructions, initial states and scripted experts."""

import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from embodyrl.config.settings import ChangesStateIds
from embodyrl.envs.settings import CameraSettings, EnvSettings, RenderProfile, RewardSettings

ObsMode = StrEnum("ObsMode", ["rgb", "state"])
SimBackend = StrEnum("SimBackend", ["cpu", "gpu"])


class ManiSkillSettings(EnvSettings, RewardSettings, CameraSettings):
    """Config keys for ManiSkill tasks."""

    keys_by_condition = {"obs_mode=rgb": "init_params"}

    id: Annotated[str | None, ChangesStateIds] = None
    """ManiSkill task id, for example PushCube-v1."""
    kwargs: Annotated[dict[str, Any], ChangesStateIds] = {}
    """Keyword arguments of the task's constructor."""
    obs_mode: ObsMode = ObsMode.rgb
    """rgb: camera images and proprioception; state: all state observations of the task, no images."""
    sim_backend: Annotated[SimBackend, ChangesStateIds] = SimBackend.cpu
    """cpu: one simulator per environment, exactly reproducible; gpu: one batch for all environments of a worker."""
    control_mode: str | None = None
    """Control mode of the robot; default: the control mode of the task."""
    reward_mode: Literal["normalized_dense", "dense", "sparse", "none"] | None = None
    """Reward of the task: normalized_dense, dense, sparse, or none (1 on success, else 0); default: the task's
    own."""
    render_profile: RenderProfile = RenderProfile.full
    """full: pixel-identical to the benchmark; lean: simplified meshes for software rendering, same physics."""


_TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))

BRIDGE_EPISODES: dict[str, int] = _TASKS["bridge_episodes"]
"""Number of initial states of each Bridge task, which has numbered object placements instead of seeds."""

TASK_IDS = {
    f"ManiSkill-{name}": ("maniskill_bridge" if name in BRIDGE_EPISODES else "maniskill", f"env.id={name}")
    for name in _TASKS["instructions"]
}
"""Environment preset and config override of each task that has an instruction in `tasks.toml`, by Gymnasium id."""

HAND_CAMERA = "hand_camera"

EE_DELTA_POSE = "pd_ee_delta_pose"
"""Control mode with 7-D actions: hand translation (1 is 0.1 m), hand rotation (1 is 0.1 rad), gripper (1 opens, -1
closes)."""

EXPERT_TASKS = ("PickCube-v1", "PullCube-v1", "PushCube-v1", "StackCube-v1")
"""Tasks with a scripted expert, whose actions are those of control mode `EE_DELTA_POSE`."""


def get_instruction(env_id: str) -> str:
    """Return the language instruction of a task, derived from the id if `tasks.toml` has no entry."""
    name = env_id.split("-v")[0]
    return _TASKS["instructions"].get(env_id) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-_]", " ", name).lower()
