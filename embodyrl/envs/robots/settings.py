"""Config keys for robot presets."""

from collections.abc import Iterator
from typing import Annotated

from embodyrl.config.settings import NumbersStates
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.robots.presets import PIXEL_PRESETS, PRESETS, Preset
from embodyrl.registry import closest


class RobotSettings(GymSettings):
    """Settings of a robot preset: the settings of its Gymnasium environment, with declared defaults."""

    robot: Annotated[str, NumbersStates]
    """Preset: pusht, fetch_reach, ... (`embodyrl list envs`)."""
    pixels: bool = False
    """Observe camera images and the robot's own state; false: the state of robot and objects."""
    python: str | None = None
    """Interpreter that has robosuite 1.5, for robosuite's tasks; null: this interpreter. Its process runs the code of
    that environment."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return self.robot

    @property
    def preset(self) -> Preset:
        """Preset named by `robot`."""
        return (PIXEL_PRESETS if self.pixels else PRESETS)[self.robot]

    def problems(self) -> Iterator[str]:
        """Yield errors for an unknown preset and for missing images."""
        yield from super().problems()
        if self.robot not in PRESETS:
            yield f"env.robot={self.robot} is not a preset.{closest(self.robot, PRESETS)} Known: {', '.join(PRESETS)}."
        elif self.pixels and self.robot not in PIXEL_PRESETS:
            yield (
                f"env.pixels=true: {self.robot} has no images. Presets with images: {', '.join(PIXEL_PRESETS)}; "
                "env=gym with a wrapper in env.wrappers adds images to others."
            )
        elif self.python is not None and not self.preset.process:
            yield f"env.python={self.python}: {self.robot} runs in this interpreter; remove env.python."
        if "python" in self.kwargs:
            yield "env.kwargs.python: use env.python, which a saved config may set only with trust=true."
        if self.id is not None:
            yield "env.id is set by env.robot; remove env.id, or use env=gym."

    @property
    def gym(self) -> GymSettings:
        """Settings of the Gymnasium environment: values of the preset, overridden by the config."""
        preset = self.preset
        own = {name: getattr(self, name) for name in GymSettings.model_fields}
        own |= {
            "id": preset.id,
            "kwargs": {**preset.kwargs, **self.kwargs, **({"python": self.python} if preset.process else {})},
            "wrappers": [*preset.wrappers, *self.wrappers],
            "instruction": preset.instruction
            if self.instruction_key is None and not self.instruction
            else self.instruction,
        }
        return GymSettings.model_construct(**own)
