"""Choice of the video frame of each step, and decoding of video columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.data import layout
from embodyrl.data.frames import decode_mp4, frame_times
from embodyrl.data.layout import Card
from embodyrl.data.rows import Rows
from embodyrl.data.tables import video_file
from embodyrl.errors import EmbodyError
from embodyrl.types import ByteArray, IntArray

_CLOCK = 0.05
"""Maximum relative difference between the clocks of a video and of the table of episodes."""
_OFF = 0.4
"""Maximum distance between a step and its frame, in steps."""
_Episodes = Sequence[dict[str, Any]]
_Times = npt.NDArray[np.float64]


class VideoReader:
    """Frames of a data set with MP4 files."""

    def __init__(self, root: Path, card: Card, rows: Rows, episodes: _Episodes) -> None:
        """Store the arguments; `episodes` are all rows of meta/episodes, because episodes share files."""
        self._root, self._card, self._rows, self._episodes = root, card, rows, episodes
        self._exact = layout.is_ours(root)
        self._times: dict[str, _Times] = {}
        self._unused: dict[str, dict[str, tuple[int, int]]] = {}

    @property
    def warnings(self) -> list[str]:
        """Warnings about frames that belong to no episode, one line for each camera."""
        return [
            f"{self._root / file} has {count} frames, but its episodes use {used}"
            + (f" (and {len(more)} more files)" if more else "")
            + ". If takes were discarded, episodes may show their frames: check from_timestamp in meta/episodes."
            for files in self._unused.values()
            for (file, (count, used)), *more in [[*files.items()]]
        ]

    def check(self, column: str) -> None:
        """Compare the numbers of frames and steps in all files of a camera (see `warnings`)."""
        for file, parts in self._files(column).items():
            self._in_order(file, column, parts)

    def read(self, column: str, episodes: _Episodes, images: ByteArray) -> None:
        """Decode the frames of a camera in some episodes into `images` [N, H, W, 3].

        If a file has as many frames as its episodes have steps, frames and steps correspond in order. Otherwise, the
        frame of a step is the frame at its time.

        Raises:
            EmbodyError: a file is unreadable, or a step has no frame.
        """
        starts = np.cumsum([0, *(episode["length"] for episode in episodes)])
        place = {episode["episode_index"]: slice(*starts[n : n + 2]) for n, episode in enumerate(episodes)}
        for file, parts in self._files(column).items():
            wanted = [episode for episode in parts if episode["episode_index"] in place]
            if not wanted:
                continue
            numbers = self._in_order(file, column, parts)
            if numbers is None:
                numbers = self._by_time(file, column, wanted)
            where = np.concatenate([np.r_[place[e["episode_index"]]] for e in wanted])
            chosen = np.concatenate([numbers[e["episode_index"]] for e in wanted])
            order = np.argsort(chosen, kind="stable")
            decode_mp4(self._root / file, chosen[order], [images[row] for row in where[order]])

    def _files(self, column: str) -> dict[str, list[dict[str, Any]]]:
        """Return the episodes in each video file of a camera, in the order of their frames."""
        found: dict[str, list[dict[str, Any]]] = {}
        for episode in self._episodes:
            _segment(episode, column)
            found.setdefault(video_file(episode, column), []).append(episode)
        return {file: sorted(parts, key=lambda e: _segment(e, column)[0]) for file, parts in found.items()}

    def _listed(self, file: str) -> _Times:
        if file not in self._times:
            self._times[file] = frame_times(self._root / file, self._card.env.cameras.size)
        return self._times[file]

    def _in_order(self, file: str, column: str, parts: _Episodes) -> dict[int, IntArray] | None:
        """Return the frames of each episode if frames and steps correspond in order, else None.

        Raises:
            EmbodyError: the file was written by embodyrl, and has another number of frames.
        """
        count, starts = len(self._listed(file)), np.cumsum([0, *(episode["length"] for episode in parts)])
        spans = [_segment(episode, column) for episode in parts]
        slack = 1 / self._card.fps
        joined = spans[0][0] <= slack and all(
            abs(other[0] - one[1]) <= slack + _CLOCK * (one[1] - one[0]) for one, other in itertools.pairwise(spans)
        )
        if count == starts[-1] and joined:
            return {e["episode_index"]: np.arange(*starts[n : n + 2]) for n, e in enumerate(parts)}
        if self._exact and count != starts[-1]:
            raise EmbodyError(
                f"{self._root / file} contains {count} frames, but the data set declares {starts[-1]}. Collect the "
                "data set again."
            )
        rate = _rate(self._listed(file)) or self._card.fps
        used = round(sum(end - begin for begin, end in spans) * rate)
        if count > used:
            self._unused.setdefault(column, {})[file] = count, used
        return None

    def _by_time(self, file: str, column: str, episodes: _Episodes) -> dict[int, IntArray]:
        """Return the frames at the times of the steps of each episode.

        Raises:
            EmbodyError: a step has no frame, or shares its frame with another episode.
        """
        path, frames, fps = self._root / file, self._listed(file), self._card.fps
        if (rate := _rate(frames)) and rate < 0.9 * fps:
            raise EmbodyError(
                f"{path} has {rate:.4g} frames per second, but the data set has {fps:g}: several steps would show the "
                "same frame. Encode the video with the frame rate of meta/info.json."
            )
        found: dict[int, IntArray] = {}
        owner = np.full(len(frames), -1)
        for episode in episodes:
            times, index = _step_times(self._rows, episode, column, fps), int(episode["episode_index"])
            if (times > frames[-1] + _OFF / fps).any():
                raise EmbodyError(
                    f"{path} contains {len(frames)} frames, but the data set declares "
                    f"{round(times.max() * (rate or fps)) + 1}. Download the data set again."
                )
            numbers = np.abs(frames[:, None] - times).argmin(0) if len(frames) < 3 else _nearest(frames, times)
            off = np.abs(frames[numbers] - times) * fps
            if (off > _OFF).any():
                step = int(np.flatnonzero(off > _OFF)[0])
                raise EmbodyError(
                    f"{path} has {len(frames)} frames, which is not the number of steps, and step {step} of episode "
                    f"{index} at {times[step]:.3f} s is {off[step]:.2f} steps from the nearest frame. Encode the video "
                    "with one frame per step."
                )
            other = owner[numbers]
            if len(twice := np.flatnonzero((other >= 0) & (other != index))):
                one, two = sorted((int(other[twice[0]]), index))
                raise EmbodyError(
                    f"{path}: episodes {one} and {two} both refer to frame {numbers[twice[0]]}. Correct "
                    f"videos/{column}/from_timestamp in meta/episodes, or download the data set again."
                )
            owner[numbers] = index
            found[index] = numbers
        return found


def _rate(frames: _Times) -> float:
    """Return the frame rate of a video in Hz; 0 if the video has a single frame."""
    return (len(frames) - 1) / frames[-1] if len(frames) > 1 else 0.0


def _nearest(frames: _Times, times: _Times) -> IntArray:
    after = np.searchsorted(frames, times).clip(1, len(frames) - 1)
    return after - (times - frames[after - 1] <= frames[after] - times)


def _segment(episode: dict[str, Any], column: str) -> tuple[float, float]:
    """Return the first and last time of an episode in its video file, in seconds.

    Raises:
        EmbodyError: meta/episodes has no such columns.
    """
    names = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    values: list[Any] = [episode.get(f"videos/{column}/{name}") for name in names]
    if None in values:
        raise EmbodyError(
            f"meta/episodes: episode {episode['episode_index']} has no videos/{column}/{', '.join(names)}. Download "
            "the data set again, or select other cameras with data.cameras."
        )
    return float(values[2]), float(values[3])


def _step_times(rows: Rows, episode: dict[str, Any], column: str, fps: float) -> _Times:
    """Return the time [T] of each step of an episode in its video file, in seconds.

    Raises:
        EmbodyError: a timestamp is outside the episode's part of the video.
    """
    begin, end = _segment(episode, column)
    part = slice(episode["dataset_from_index"], episode["dataset_to_index"])
    times = begin + rows.counters["timestamp"][part].astype(np.float64)
    outside = np.flatnonzero((times < begin - 0.5 / fps) | (times > end - 0.5 / fps))
    if len(outside):
        raise EmbodyError(
            f"Episode {episode['episode_index']}, step {outside[0]}: the time {times[outside[0]]:.3f} s of '{column}' "
            f"is outside the episode's segment {begin:.3f}..{end:.3f} s of the video. Download the data set again."
        )
    return times
