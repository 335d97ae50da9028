from pathlib import Path

import pytest
from run_files import write_run, write_video

from embodyrl.errors import ConfigError
from embodyrl.monitor.history import read_history, read_rows


def test_a_run_is_read_back(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "runs" / "a"))
    assert [row["step"] for row in history.rows] == [0, 1, 2, 3]
    assert history.series("actor/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [e.step for e in history.evaluations] == [0, 3]
    assert [e.episode for e in history.evaluations[0].episodes] == list(range(6))
    assert history.config["runner"]["max_steps"] == 3


def test_a_recording_is_found_after_its_folders_moved(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "runs" / "a"))
    video = write_video(tmp_path / "videos" / "a" / "x.mp4")
    assert history.find_video("/somewhere/else/videos/a/x.mp4") == video
    assert history.find_video("videos/a/y.mp4") is None


def test_a_cut_line_is_left_out_and_no_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": ')
    assert read_rows(tmp_path / "x.jsonl") == [{"a": 1}]
    assert read_rows(tmp_path / "y.jsonl") == []
    with pytest.raises(ConfigError, match="it is no run"):
        read_history(tmp_path)
