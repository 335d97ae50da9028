"""Assignment of video frames to steps, and decoding of video columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.data import layout
from embodyrl.data.frames import decode_mp4, read_frame_times
from embodyrl.data.layout import Card
from embodyrl.data.rows import Rows
from embodyrl.data.tables import find_file, get_video_path
from embodyrl.errors import EmbodyError
from embodyrl.types import ByteArray, IntArray

_CLOCK_TOLERANCE = 0.05
"""Maximum relative difference between the clocks of a video and of the table of episodes."""
_MAX_DEVIATION = 0.4
"""Maximum distance between a step and its frame, in steps."""
_Episodes = Sequence[dict[str, Any]]
_Times = npt.NDArray[np.float64]


class VideoReader:
    """Frames of a data set with MP4 files."""

    def __init__(self, root: Path, card: Card, rows: Rows, episodes: _Episodes) -> None:
        """Store the arguments; `episodes` are all rows of meta/episodes, because episodes share files."""
        self._root, self._card, self._rows, self._episodes = root, card, rows, episodes
        self._exact = layout.is_embodyrl_dataset(root)
        self._times: dict[str, _Times] = {}
        self._unused: dict[str, dict[str, tuple[int, int]]] = {}

    @property
    def warnings(self) -> list[str]:
        """Warnings about frames that belong to no episode, one line for each camera."""
        return [
            f"{self._root / file} has {count} frames, but its episodes use {num_used}"
            + (f" (and {len(rest)} more files)" if rest else "")
            + ". Episodes may contain frames of discarded recordings: check from_timestamp in meta/episodes."
            for files in self._unused.values()
            for (file, (count, num_used)), *rest in [[*files.items()]]
        ]

    def check(self, column: str) -> None:
        """Compare the numbers of frames and steps in all files of a camera (see `warnings`)."""
        for file, parts in self._group_by_file(column).items():
            self._match_in_order(file, column, parts)

    def read(self, column: str, episodes: _Episodes, images: ByteArray) -> None:
        """Decode a camera's frames of the given episodes into `images` [N, H, W, 3].

        If a file has as many frames as its episodes have steps, frames and steps correspond in order. Otherwise, the
        frame of a step is the frame at its time.

        Raises:
            EmbodyError: a file is unreadable, or a step has no frame.
        """
        rows_by_episode = _number_steps(episodes)
        for file, parts in self._group_by_file(column).items():
            selected = [episode for episode in parts if episode["episode_index"] in rows_by_episode]
            if not selected:
                continue
            numbers = self._match_in_order(file, column, parts)
            if numbers is None:
                numbers = self._match_by_time(file, column, selected)
            target_rows = np.concatenate([rows_by_episode[part["episode_index"]] for part in selected])
            frame_numbers = np.concatenate([numbers[part["episode_index"]] for part in selected])
            order = np.argsort(frame_numbers, kind="stable")
            decode_mp4(self._root / file, frame_numbers[order], [images[row] for row in target_rows[order]])

    def _group_by_file(self, column: str) -> dict[str, list[dict[str, Any]]]:
        """Return the episodes in each video file of a camera, in the order of their frames."""
        files: dict[str, list[dict[str, Any]]] = {}
        for episode in self._episodes:
            _get_segment(episode, column)
            files.setdefault(get_video_path(episode, column), []).append(episode)
        return {file: sorted(parts, key=lambda e: _get_segment(e, column)[0]) for file, parts in files.items()}

    def _get_frame_times(self, file: str) -> _Times:
        if file not in self._times:
            self._times[file] = read_frame_times(find_file(self._root, file), self._card.env.cameras.size)
        return self._times[file]

    def _match_in_order(self, file: str, column: str, parts: _Episodes) -> dict[int, IntArray] | None:
        """Return the frames of each episode if frames and steps correspond in order, else None.

        Raises:
            EmbodyError: the file was written by embodyrl, and has another number of frames.
        """
        count, num_steps = len(self._get_frame_times(file)), sum(episode["length"] for episode in parts)
        spans = [_get_segment(episode, column) for episode in parts]
        tolerance = 1 / self._card.fps
        is_contiguous = spans[0][0] <= tolerance and all(
            abs(second[0] - first[1]) <= tolerance + _CLOCK_TOLERANCE * (first[1] - first[0])
            for first, second in itertools.pairwise(spans)
        )
        if count == num_steps and is_contiguous:
            return _number_steps(parts)
        if self._exact and count != num_steps:
            raise EmbodyError(
                f"{self._root / file} contains {count} frames, but the data set declares {num_steps}. Collect the "
                "data set again."
            )
        rate = _get_rate(self._get_frame_times(file)) or self._card.fps
        num_used = round(sum(end - begin for begin, end in spans) * rate)
        if count > num_used:
            self._unused.setdefault(column, {})[file] = count, num_used
        return None

    def _match_by_time(self, file: str, column: str, episodes: _Episodes) -> dict[int, IntArray]:
        """Return the frames at the times of the steps of each episode.

        Raises:
            EmbodyError: a step has no frame, or shares its frame with another episode.
        """
        path, frames, fps = self._root / file, self._get_frame_times(file), self._card.fps
        if (rate := _get_rate(frames)) and rate < 0.9 * fps:
            raise EmbodyError(
                f"{path} has {rate:.4g} frames per second, but the data set has {fps:g}: several steps would show the "
                "same frame. Encode the video with the frame rate of meta/info.json."
            )
        numbers_by_episode: dict[int, IntArray] = {}
        owner = np.full(len(frames), -1)
        for episode in episodes:
            times, index = _get_step_times(self._rows, episode, column, fps), int(episode["episode_index"])
            if (times > frames[-1] + _MAX_DEVIATION / fps).any():
                raise EmbodyError(
                    f"{path} contains {len(frames)} frames, but the data set declares "
                    f"{round(times.max() * (rate or fps)) + 1}. Download the data set again."
                )
            numbers = np.abs(frames[:, None] - times).argmin(0) if len(frames) < 3 else _find_nearest(frames, times)
            deviation = np.abs(frames[numbers] - times) * fps
            if (deviation > _MAX_DEVIATION).any():
                step = int(np.flatnonzero(deviation > _MAX_DEVIATION)[0])
                raise EmbodyError(
                    f"{path} has {len(frames)} frames, which is not the number of steps, and step {step} of episode "
                    f"{index} at {times[step]:.3f} s is {deviation[step]:.2f} steps from the nearest frame. Encode "
                    "the video with one frame per step."
                )
            previous_owner = owner[numbers]
            if len(shared := np.flatnonzero((previous_owner >= 0) & (previous_owner != index))):
                one, two = sorted((int(previous_owner[shared[0]]), index))
                raise EmbodyError(
                    f"{path}: episodes {one} and {two} both refer to frame {numbers[shared[0]]}. Correct "
                    f"videos/{column}/from_timestamp in meta/episodes, or download the data set again."
                )
            owner[numbers] = index
            numbers_by_episode[index] = numbers
        return numbers_by_episode


def _number_steps(episodes: _Episodes) -> dict[int, IntArray]:
    """Number the steps of all episodes from 0; return the numbers of each episode by its index."""
    stops = np.cumsum([episode["length"] for episode in episodes])
    return {e["episode_index"]: np.arange(stop - e["length"], stop) for e, stop in zip(episodes, stops, strict=True)}


def _get_rate(frames: _Times) -> float:
    """Return the frame rate of a video in Hz; 0 if the video has a single frame."""
    return (len(frames) - 1) / frames[-1] if len(frames) > 1 else 0.0


def _find_nearest(frames: _Times, times: _Times) -> IntArray:
    next_frames = np.searchsorted(frames, times).clip(1, len(frames) - 1)
    return next_frames - (times - frames[next_frames - 1] <= frames[next_frames] - times)


def _get_segment(episode: dict[str, Any], column: str) -> tuple[float, float]:
    """Return the first and last time of an episode in its video file, in seconds.

    Raises:
        EmbodyError: meta/episodes has no such columns, or a time is not finite.
    """
    names = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    values: list[Any] = [episode.get(f"videos/{column}/{name}") for name in names]
    if None in values:
        raise EmbodyError(
            f"meta/episodes: episode {episode['episode_index']} has no videos/{column}/{', '.join(names)}. Download "
            "the data set again, or select other cameras with data.cameras."
        )
    begin, end = float(values[2]), float(values[3])
    if not math.isfinite(end - begin):
        raise EmbodyError(
            f"meta/episodes: episode {episode['episode_index']} has the times {begin} to {end} in videos/{column}. "
            "Download the data set again, or select other cameras with data.cameras."
        )
    return begin, end


def _get_step_times(rows: Rows, episode: dict[str, Any], column: str, fps: float) -> _Times:
    """Return the time [T] of each step of an episode in its video file, in seconds.

    Raises:
        EmbodyError: a timestamp is outside the episode's part of the video.
    """
    begin, end = _get_segment(episode, column)
    part = slice(episode["dataset_from_index"], episode["dataset_to_index"])
    times = begin + rows.indices["timestamp"][part].astype(np.float64)
    outside = np.flatnonzero((times < begin - 0.5 / fps) | (times > end - 0.5 / fps))
    if len(outside):
        raise EmbodyError(
            f"Episode {episode['episode_index']}, step {outside[0]}: the time {times[outside[0]]:.3f} s of '{column}' "
            f"is outside the episode's segment {begin:.3f}..{end:.3f} s of the video. Download the data set again."
        )
    return times
