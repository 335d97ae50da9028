"""Keys of MetaWorld."""

from embodyrl.envs.metaworld.tasks import BENCHMARKS
from embodyrl.envs.settings import CameraSettings, EnvSettings, RenderProfile, RewardSettings

STATE, PROPRIOCEPTION = 39, 4
"""Numbers that a task observes, and those of them that are the arm's own."""


class MetaWorldSettings(EnvSettings, RewardSettings, CameraSettings):
    """MetaWorld."""

    id: str = "MT50"
    """A task (reach-v3), a benchmark (MT10, MT50, ML45), or a group of MT50: easy, medium, hard, very_hard."""
    pixels: bool = True
    """Camera images, and hand and gripper as the state; false: all 39 numbers, and which of several tasks it is."""
    render_profile: RenderProfile = RenderProfile.lean
    """full: pixel-identical to the package; lean: without multisampling and shadows, same physics."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tasks that `id` names."""
        return BENCHMARKS.get(self.id, (self.id,))
