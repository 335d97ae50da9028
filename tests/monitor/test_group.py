import logging
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pytest

from embodyrl.errors import ConfigError, UnknownNameError
from embodyrl.monitor.console import ConsoleMonitor
from embodyrl.monitor.group import MonitorGroup, build_monitor
from embodyrl.monitor.jsonl import JsonlMonitor
from embodyrl.monitor.protocol import Monitor, RunInfo


class Plugin(Monitor):
    """A user's backend that raises an error at a chosen call."""

    def __init__(self, breaks_at: str) -> None:
        self.breaks_at = breaks_at
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.breaks_at:
            raise OSError("server\nis down")

    def open(self, run_dir: Path, info: RunInfo) -> None:
        self._call("open")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log")

    def video(self, step: int, path: Path) -> None:
        self._call("video")

    def text(self, line: str) -> None:
        self._call("text")

    def close(self) -> None:
        self._call("close")


def test_failed_logger_start_error_contains_a_fix(tmp_path: Path):
    early, late = Plugin("never"), Plugin("never")
    fanout = MonitorGroup({"early": early, "hosted": Plugin("open"), "late": late})
    with pytest.raises(ConfigError, match=r"runner.logger.backends: 'hosted' .*server is down.*remove 'hosted'"):
        fanout.open(tmp_path, RunInfo(run_id="r"))
    assert early.calls == ["open", "close"]
    assert late.calls == []


def test_error_while_closing_does_not_hide_the_cause(tmp_path: Path):
    fanout = MonitorGroup({"early": Plugin("close"), "hosted": Plugin("open")})
    with pytest.raises(ConfigError, match="'hosted' cannot start"):
        fanout.open(tmp_path, RunInfo(run_id="r"))


@pytest.mark.parametrize("breaks_at", ["log", "video", "text", "close"])
def test_failing_logger_is_dropped_with_one_warning(breaks_at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    plugin, screen = Plugin(breaks_at), StringIO()
    fanout = MonitorGroup({"hosted": plugin, "jsonl": JsonlMonitor(), "console": ConsoleMonitor(screen)})
    fanout.open(tmp_path, RunInfo(run_id="r"))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            fanout.log(step, {"x": 1.0})
            fanout.video(step, tmp_path / "a.mp4")
            fanout.text("hello")
        fanout.close()
    assert plugin.calls.count(breaks_at) == 1
    assert [*fanout.monitors] == ["jsonl", "console"]
    assert len(caplog.records) == 1
    assert "'hosted' failed and was dropped" in caplog.records[0].message
    assert screen.getvalue().count("'hosted' failed and was dropped") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_failure_of_all_loggers_does_not_end_the_run(tmp_path: Path):
    fanout = MonitorGroup({"a": Plugin("log"), "b": Plugin("text"), "c": Plugin("text")})
    fanout.open(tmp_path, RunInfo(run_id="r"))
    fanout.log(0, {})
    assert [*fanout.monitors] == []


def test_a_closed_output_pipe_does_not_stop_training(tmp_path: Path):
    screen = StringIO()
    fanout = MonitorGroup({"console": ConsoleMonitor(screen), "jsonl": JsonlMonitor()})
    fanout.open(tmp_path, RunInfo(run_id="r"))
    screen.close()
    fanout.log(0, {"x": 1.0})
    fanout.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "x": 1.0}\n'


def test_banner_and_progress_go_to_the_console_only(tmp_path: Path):
    plugin, screen = Plugin("never"), StringIO()
    fanout = MonitorGroup({"hosted": plugin, "console": ConsoleMonitor(screen)})
    fanout.open(tmp_path, RunInfo(run_id="r"))
    fanout.banner(["embodyrl", "run r"])
    fanout.progress(1, 2, "rollout")
    assert screen.getvalue() == "embodyrl\nrun r\n"
    fanout.results("validation success", [("stack", "10.0 %", "80.0 %", "+70.0")])
    assert "80.0 %  +70.0" in screen.getvalue()
    assert plugin.calls == ["open"]


def test_monitors_are_built_by_name(tmp_path: Path):
    group = build_monitor(["console", "jsonl", "tensorboard", "jsonl"])
    assert [*group.monitors] == ["console", "jsonl", "tensorboard"]
    with pytest.raises(UnknownNameError, match="Did you mean 'tensorboard'"):
        build_monitor(["tensorbord"])
