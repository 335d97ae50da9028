"""Loggers in background threads, with real blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from embodyrl.errors import ConfigError
from embodyrl.monitor.background import BackgroundMonitor
from embodyrl.monitor.group import MonitorGroup, build_monitor
from embodyrl.monitor.jsonl import JsonlMonitor
from embodyrl.monitor.protocol import Monitor, RunInfo


class Stuck(Monitor):
    """Logger that blocks in one kind of call until a gate opens."""

    def __init__(self, where: str, gate: threading.Event) -> None:
        self.where, self.gate = where, gate
        self.seen: list[tuple[str, int]] = []
        self.entered = threading.Event()

    def _call(self, name: str, step: int = 0) -> None:
        if name == self.where:
            self.entered.set()
            self.gate.wait()
        self.seen.append((name, step))

    def open(self, run_dir: Path, info: RunInfo) -> None:
        self._call("open")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", step)

    def video(self, step: int, path: Path) -> None:
        self._call("video", step)

    def text(self, line: str) -> None:
        self._call("text")

    def close(self) -> None:
        self._call("close")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def run_of(tmp_path: Path, stuck: Stuck, **limits: float) -> MonitorGroup:
    fanout = MonitorGroup({"jsonl": JsonlMonitor(), "hosted": BackgroundMonitor(stuck, **limits)})
    fanout.open(tmp_path, RunInfo(run_id="r"))
    return fanout


def test_slow_logger_does_not_block_training(tmp_path: Path, gate: threading.Event):
    stuck = Stuck("log", gate)
    fanout = run_of(tmp_path, stuck)
    for step in range(5):
        fanout.log(step, {"train/return": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert stuck.entered.wait(60)
    assert stuck.seen == [("open", 0)]
    gate.set()
    fanout.close()
    assert stuck.seen == [("open", 0), *(("log", step) for step in range(5)), ("close", 0)]
    assert [*fanout.monitors] == ["jsonl", "hosted"]


def test_a_logger_that_hangs_is_dropped_with_one_warning(tmp_path: Path, gate: threading.Event, caplog):
    stuck = Stuck("log", gate)
    fanout = run_of(tmp_path, stuck, call_timeout_s=0.0)
    fanout.log(0, {})
    assert stuck.entered.wait(60)
    for step in range(1, 4):
        fanout.log(step, {})
    assert [*fanout.monitors] == ["jsonl"]
    fanout.close()
    said = [r.getMessage() for r in caplog.records]
    assert [
        line
        for line in said
        if "'hosted' failed and was dropped" in line and "a call to the logger has not finished" in line
    ] == said
    assert len(said) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_closing_a_logger_times_out(tmp_path: Path, gate: threading.Event, caplog):
    fanout = run_of(tmp_path, Stuck("close", gate), close_timeout_s=0.1)
    fanout.log(0, {})
    fanout.close()
    assert [r.getMessage() for r in caplog.records if "'hosted'" in r.getMessage()] != []
    assert "queued data is lost" in caplog.text


def test_logger_that_hangs_on_open_ends_the_run(tmp_path: Path, gate: threading.Event):
    with pytest.raises(
        ConfigError, match=r"'hosted' cannot start .* a call to the logger has not finished within 0\.1 s"
    ):
        run_of(tmp_path, Stuck("open", gate), call_timeout_s=0.1)


def test_only_file_and_console_loggers_are_synchronous():
    monitors = build_monitor(["console", "jsonl", "tensorboard"]).monitors
    assert [name for name, m in monitors.items() if isinstance(m, BackgroundMonitor)] == ["tensorboard"]
