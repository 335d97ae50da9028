"""Recording of episodes: settings, and the interface of recorders."""

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from embodyrl.config.settings import Path as SettingsPath
from embodyrl.config.settings import Settings
from embodyrl.registry import Registry
from embodyrl.types import ByteArray


class VideoSettings(Settings):
    """Config keys for video recording."""

    fps: Annotated[int, Field(ge=1, le=240)] = 20
    """Frames per second of recordings."""
    base_dir: SettingsPath | None = None
    """Videos are written to <base_dir>/<run id>/; default: videos/ in the run's folder."""
    info_on_video: bool = True
    """Overlay instruction, step and success."""


def remove_videos(stem: Path) -> None:
    """Remove complete and partial videos of earlier attempts at an episode."""
    name = glob.escape(stem.name)
    for film in (*stem.parent.glob(f"{name}.partial.mp4"), *stem.parent.glob(f"{name}_*steps.mp4")):
        if not film.is_dir():  # not a video of this package
            film.unlink(missing_ok=True)


class Recorder(Protocol):
    """Writer of the video of one episode."""

    success: bool
    """True if the goal was reached in some frame."""

    def add(self, frame: ByteArray, success: bool) -> None:
        """Append the frame [H, W, 3] uint8 of the next env step; `success`: the goal is reached."""
        ...

    def finish(self) -> Path:
        """Complete the file and return its path."""
        ...

    def discard(self) -> None:
        """Stop and delete the file; idempotent."""
        ...


RECORDERS: Registry[Callable[..., Recorder]] = Registry(
    "recorder", group="embodyrl.recorders", wants="a class of Recorder", fits=callable
)
