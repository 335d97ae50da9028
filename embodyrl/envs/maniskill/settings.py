"""Keys of ManiSkill tasks."""

from enum import StrEnum
from typing import Any, Literal

from embodyrl.envs.settings import CameraSettings, EnvSettings, RenderProfile, RewardSettings

ObsMode = StrEnum("ObsMode", ["rgb", "state"])
SimBackend = StrEnum("SimBackend", ["cpu", "gpu"])


class ManiSkillSettings(EnvSettings, RewardSettings, CameraSettings):
    """Any ManiSkill task."""

    id: str | None = None
    """Id of a task."""
    kwargs: dict[str, Any] = {}
    """Passed to the task's constructor."""
    obs_mode: ObsMode = ObsMode.rgb
    """rgb: camera images and proprioception; state: all that the task observes, no images."""
    sim_backend: SimBackend = SimBackend.cpu
    """cpu: a simulator per slot, exact repetition; gpu: one batch for all slots of a worker."""
    control_mode: str | None = None
    """How actions drive the robot; default: the task's own."""
    reward_mode: Literal["normalized_dense", "dense", "sparse", "none"] | None = None
    """normalized_dense, dense, sparse or none (success counts); default: the task's own."""
    render_profile: RenderProfile = RenderProfile.full
    """full: pixel-identical to the benchmark; lean: decimated visuals for software rendering, same physics."""
