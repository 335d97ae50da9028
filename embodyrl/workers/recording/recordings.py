"""Videos of the running episodes of an env worker."""

from collections.abc import Set
from pathlib import Path

from embodyrl.channels.messages import Recording, ResetRequest
from embodyrl.envs.protocol import Env
from embodyrl.envs.video import VideoSettings
from embodyrl.errors import EmbodyError
from embodyrl.workers.recording.video import VideoRecorder


class Mp4Recordings:
    """Records episodes of an env worker as MP4 files, with one `VideoRecorder` per environment."""

    def __init__(self, env: Env, video: VideoSettings) -> None:
        self._env, self._video = env, video
        self._recorders: dict[int, tuple[VideoRecorder, str]] = {}
        """Recorder of each environment, and the outcomes for which the video is kept (`ResetRequest.keep_video`)."""

    @property
    def env_indices(self) -> Set[int]:
        """Environments whose current episode is recorded."""
        return self._recorders.keys()

    def begin(self, request: ResetRequest) -> Recording | None:
        """Record the episode that has just begun."""
        assert request.video_stem is not None
        try:
            recorder = VideoRecorder(
                Path(request.video_stem),
                fps=self._video.fps,
                instruction=self._env.instruction(request.env_index),
                info=self._video.info_on_video,
                horizon=request.start.max_episode_steps,
                reports_success=self._env.spec.reward.reports_success,
            )
        except (EmbodyError, OSError) as error:
            return Recording(env_index=request.env_index, path=None, problem=str(error))
        self._recorders[request.env_index] = recorder, request.keep_video
        return None

    def add(self, env_index: int, success: bool) -> Recording | None:
        """Append the current frame of an environment, if its episode is recorded."""
        if env_index not in self._recorders:
            return None
        try:
            self._recorders[env_index][0].add(self._env.render(env_index), success)
        except (EmbodyError, OSError) as error:
            self.discard(env_index)
            return Recording(env_index=env_index, path=None, problem=str(error))
        return None

    def end(self, env_index: int) -> Recording:
        """Complete the recording of a finished episode."""
        recorder, keep = self._recorders.pop(env_index)
        if keep == "failures" and recorder.success:
            recorder.discard()
            return Recording(env_index=env_index, path=None)
        try:
            path = recorder.finish()
        except (EmbodyError, OSError) as error:
            return Recording(env_index=env_index, path=None, problem=str(error))
        return Recording(env_index=env_index, path=str(path))

    def discard(self, env_index: int) -> None:
        """Stop and delete the recording of an environment, if there is one."""
        if env_index in self._recorders:
            self._recorders.pop(env_index)[0].discard()
