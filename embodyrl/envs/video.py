"""Settings for recording videos, and removal of videos from earlier attempts."""

import glob
from pathlib import Path
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Path as SettingsPath
from embodyrl.config.settings import Settings


class VideoSettings(Settings):
    """Config keys for video recording."""

    fps: Annotated[int, Field(ge=1, le=240)] = 20
    """Frames per second of recorded videos."""
    base_dir: SettingsPath | None = None
    """Folder for videos, which are written to <base_dir>/<run id>/; default: videos/ in the run's folder."""
    info_on_video: bool = True
    """If true, each frame shows the instruction, the step number and whether the task has succeeded."""


def remove_videos(stem: Path) -> None:
    """Remove complete and partial videos from earlier attempts at an episode."""
    name = glob.escape(stem.name)
    for video in (*stem.parent.glob(f"{name}.partial.mp4"), *stem.parent.glob(f"{name}_*steps.mp4")):
        if not video.is_dir():  # not a video of this package
            video.unlink(missing_ok=True)
