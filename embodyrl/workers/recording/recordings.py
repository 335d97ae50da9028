"""Videos of the running episodes of an env worker."""

from collections.abc import Set
from pathlib import Path

from embodyrl.channels.messages import Recording, ResetRequest
from embodyrl.envs.protocol import Env
from embodyrl.envs.video import VideoSettings
from embodyrl.errors import EmbodyError
from embodyrl.workers.recording.video import VideoRecorder


class Mp4Recordings:
    """Records episodes of an env worker as MP4 files, with one `VideoRecorder` per slot."""

    def __init__(self, env: Env, video: VideoSettings) -> None:
        self._env, self._video = env, video
        self._recorders: dict[int, tuple[VideoRecorder, str]] = {}
        """Recorder of each slot, and the episode outcomes for which the video is kept (`ResetRequest.keep_video`)."""

    @property
    def slots(self) -> Set[int]:
        """Slots whose current episode is recorded."""
        return self._recorders.keys()

    def begin(self, request: ResetRequest) -> Recording | None:
        """Record the episode that has just begun."""
        assert request.video_stem is not None
        try:
            recorder = VideoRecorder(
                Path(request.video_stem),
                fps=self._video.fps,
                instruction=self._env.instruction(request.slot),
                info=self._video.info_on_video,
                horizon=request.start.max_episode_steps,
                reports_success=self._env.spec.reward.reports_success,
            )
        except (EmbodyError, OSError) as error:
            return Recording(slot=request.slot, path=None, problem=str(error))
        self._recorders[request.slot] = recorder, request.keep_video
        return None

    def add(self, slot: int, success: bool) -> Recording | None:
        """Append the current frame of a slot, if its episode is recorded."""
        if slot not in self._recorders:
            return None
        try:
            self._recorders[slot][0].add(self._env.render(slot), success)
        except (EmbodyError, OSError) as error:
            self.discard(slot)
            return Recording(slot=slot, path=None, problem=str(error))
        return None

    def end(self, slot: int) -> Recording:
        """Complete the recording of an ended episode."""
        recorder, keep = self._recorders.pop(slot)
        if keep == "failures" and recorder.success:
            recorder.discard()
            return Recording(slot=slot, path=None)
        try:
            path = recorder.finish()
        except (EmbodyError, OSError) as error:
            return Recording(slot=slot, path=None, problem=str(error))
        return Recording(slot=slot, path=str(path))

    def discard(self, slot: int) -> None:
        """Stop and delete the recording of a slot, if there is one."""
        if slot in self._recorders:
            self._recorders.pop(slot)[0].discard()
