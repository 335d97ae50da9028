"""Failed recordings: training continues with one warning, evaluation stops if configured."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from toy_runs import toy_config, train_toy

from embodyrl.commands.evaluate import evaluate
from embodyrl.errors import EmbodyError
from embodyrl.workers.recording.video import VideoError, VideoRecorder

FRAME = np.zeros((64, 64, 3), np.uint8)


def encoders() -> list[int]:
    """Return the ffmpeg child processes of this process."""
    me, found = os.getpid(), []
    for entry in Path("/proc").iterdir():
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
        except (OSError, ValueError):
            continue
        if "ffmpeg" in name and int(rest.split()[1]) == me and rest.split()[0] != "Z":
            found.append(int(entry.name))
    return found


def record_until_it_fails(recorder: VideoRecorder) -> None:
    for step in range(2, 500):
        recorder.add(np.random.default_rng(step).integers(0, 255, (64, 64, 3), dtype=np.uint8), False)
    recorder.finish()


def test_killed_video_encoder_is_an_error_without_files(tmp_path):
    recorder = VideoRecorder(tmp_path / "film", 20, "go", False)
    recorder.add(FRAME, False)
    (encoder,) = encoders()
    os.kill(encoder, signal.SIGKILL)
    with pytest.raises(VideoError, match=r"was not written.*video=none"):
        record_until_it_fails(recorder)
    assert list(tmp_path.iterdir()) == []


def test_repeated_episode_replaces_its_older_videos(tmp_path):
    kept = ["film_ep011_fail_5steps.mp4", "notes.txt"]
    for name in ("film_ep01.partial.mp4", "film_ep01_fail_7steps.mp4", *kept):
        (tmp_path / name).touch()
    recorder = VideoRecorder(tmp_path / "film_ep01", 20, "go", False)
    assert {p.name for p in tmp_path.iterdir()} == set(kept)
    recorder.add(FRAME, True)
    assert recorder.finish().name == "film_ep01_success_1steps.mp4"
    assert {p.name for p in tmp_path.iterdir()} == {"film_ep01_success_1steps.mp4", *kept}


def test_deleted_video_folder_is_an_error(tmp_path):
    recorder = VideoRecorder(tmp_path / "videos" / "episode", 20, "go", False)
    recorder.add(FRAME, False)
    # Renamed first: the encoder may create its file while rmtree lists the folder.
    shutil.rmtree((tmp_path / "videos").rename(tmp_path / "deleted"))
    with pytest.raises(VideoError, match="was not written"):
        record_until_it_fails(recorder)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_encoder(monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nonexistent/ffmpeg")


def test_training_continues_without_an_encoder(tmp_path, no_encoder):
    words = ("video=all", "runner.val_check_interval=1", "eval.episodes=2", "runner.max_steps=1")
    run = train_toy(tmp_path, *words)
    assert (run / "checkpoints" / "step_000001").is_dir()
    assert not list((tmp_path / "videos").rglob("*.mp4"))


def test_on_video_error_stop_ends_the_evaluation(tmp_path, no_encoder):
    words = ("video=all", "eval.episodes=2", "faults.on_video_error=stop")
    with pytest.raises(EmbodyError, match=r"faults\.on_video_error=warn.*was not written"):
        evaluate(toy_config(tmp_path, *words, command="eval"))
