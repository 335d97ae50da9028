import json
import logging
import math
import time
from pathlib import Path

import pytest

from embodyrl.monitor.jsonl import JsonlMonitor
from embodyrl.monitor.protocol import RunInfo


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def opened(run_dir: Path, resume_step: int | None = None) -> JsonlMonitor:
    monitor = JsonlMonitor()
    monitor.open(run_dir, RunInfo(run_id="r", resume_step=resume_step))
    return monitor


def test_row_is_flushed_before_close(tmp_path: Path):
    monitor = opened(tmp_path)
    monitor.log(0, {"train/return": 0.25, "env/restarts": 0})
    assert rows(tmp_path) == [{"step": 0, "train/return": 0.25, "env/restarts": 0}]
    monitor.close()
    monitor.close()


def test_non_finite_values_are_null_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    monitor = opened(tmp_path)
    with caplog.at_level(logging.WARNING):
        monitor.log(4, {"actor/loss": math.nan, "actor/kl": -math.inf, "ok": 1.0})
        monitor.log(5, {"actor/loss": math.nan})
    monitor.close()
    assert rows(tmp_path) == [
        {"step": 4, "actor/loss": None, "actor/kl": None, "ok": 1.0},
        {"step": 5, "actor/loss": None},
    ]
    assert [("actor/loss" in r.message, "actor/kl" in r.message) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]


def test_resume_removes_later_rows_and_a_truncated_line(tmp_path: Path):
    first = opened(tmp_path)
    for step in range(5):
        first.log(step, {"x": float(step)})
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "x"')
    second = opened(tmp_path, resume_step=3)
    second.log(3, {"x": 30.0})
    second.close()
    assert [(row["step"], row["x"]) for row in rows(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    third = opened(tmp_path, resume_step=4)
    third.log(3, {"x": 31.0})  # the newest row is replaced
    third.log(4, {"x": 4.0})
    third.close()
    assert [(row["step"], row["x"]) for row in rows(tmp_path)][2:] == [(2, 2.0), (3, 31.0), (4, 4.0)]


def test_new_run_rejects_an_existing_file(tmp_path: Path):
    opened(tmp_path).close()
    with pytest.raises(FileExistsError):
        opened(tmp_path)


def test_events_are_logged_with_their_time(tmp_path: Path):
    monitor = opened(tmp_path)
    monitor.text("env worker 0 died")
    monitor.video(3, Path("videos/a.mp4"))
    lines = (tmp_path / "logs" / "events.log").read_text().splitlines()
    assert [line[20:] for line in lines] == ["env worker 0 died"]
    assert time.strptime(lines[0][:19], "%Y-%m-%d %H:%M:%S")
