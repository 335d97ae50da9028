"""Config keys for robot presets."""

from collections.abc import Iterator
from typing import Annotated

from embodyrl.config.settings import ChangesStateIds
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.robots.presets import PIXEL_PRESETS, PRESETS, Preset
from embodyrl.registry import closest


class RobotSettings(GymSettings):
    """Config keys for robot presets: the keys of a Gymnasium environment, with defaults from the preset."""

    robot: Annotated[str, ChangesStateIds]
    """Name of a preset such as pusht or fetch_reach; `embodyrl list envs` lists all names."""
    pixels: bool = False
    """If true, observe camera images and the robot's own state; false: the state of the robot and the objects."""
    python: str | None = None
    """Python interpreter with robosuite 1.5, for the presets of robosuite; null: this interpreter. The environment runs
    in a separate process of this interpreter."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return self.robot

    @property
    def preset(self) -> Preset:
        """Preset that `robot` selects."""
        return (PIXEL_PRESETS if self.pixels else PRESETS)[self.robot]

    def problems(self) -> Iterator[str]:
        """Yield errors for an unknown preset, missing images, and keys that the preset does not support."""
        yield from super().problems()
        if self.robot not in PRESETS:
            yield f"env.robot={self.robot} is not a preset.{closest(self.robot, PRESETS)} Known: {', '.join(PRESETS)}."
        elif self.pixels and self.robot not in PIXEL_PRESETS:
            yield (
                f"env.pixels=true: {self.robot} has no images. Presets with images: {', '.join(PIXEL_PRESETS)}; "
                "env=gym with a wrapper in env.wrappers adds images to other environments."
            )
        elif self.python is not None and not self.preset.process:
            yield f"env.python={self.python}: {self.robot} always runs in this interpreter. Remove env.python."
        if "python" in self.kwargs:
            yield "env.kwargs.python: set env.python instead. In a saved config, env.python needs trust=true."
        if self.id is not None:
            yield "env.id is set by env.robot. Remove env.id, or use env=gym."

    @property
    def gym(self) -> GymSettings:
        """Settings of the preset's Gymnasium environment: values of the preset, overridden by the config."""
        preset = self.preset
        values = {name: getattr(self, name) for name in GymSettings.model_fields}
        values |= {
            "id": preset.id,
            "kwargs": {**preset.kwargs, **self.kwargs, **({"python": self.python} if preset.process else {})},
            "wrappers": [*preset.wrappers, *self.wrappers],
            "instruction": preset.instruction
            if self.instruction_key is None and not self.instruction
            else self.instruction,
        }
        return GymSettings.model_construct(**values)
