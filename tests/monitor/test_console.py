import fcntl
import os
import pty
from io import StringIO
from pathlib import Path

import pytest

from embodyrl.monitor.console import PROGRESS_PERIOD_S, ConsoleMonitor, step_line
from embodyrl.monitor.intervals import Rate
from embodyrl.monitor.protocol import RunInfo

METRICS = {
    "time/step": 12.4,
    "time/rollout": 9.9,
    "time/simulate": 9.3,
    "time/update": 2.48,
    "time/render": 0.5,
    "time/log": 0.01,
    "train/success_once": 0.25,
    "train/episodes": 12.0,
    "train/return": 0.25,
    "actor/loss": 0.0123,
    "actor/kl": 0.0004,
    "actor/grad_norm": 0.91,
    "env/steps_per_s": 45.2,
    "env/restarts": 0,
}
LINE = (
    "step 3/100 | 12.4 s | success 0.250 (12 ep) | return 0.25 | loss 0.0123 | kl 0.0004 | gn 0.91 | 45 env steps/s"
    " | restarts 0 | simulate 75% update 20% render 4%"
)
TOTAL = ("all tasks", Rate(2, 20), Rate(8, 10))
INFO = RunInfo(run_id="r", total_steps=100)


def test_step_line_formats_metrics():
    assert step_line(3, 100, METRICS) == LINE


def test_time_share_of_a_long_validation_is_below_100_percent():
    assert step_line(3, 100, {"time/step": 1.0, "time/update": 1.0, "time/validate": 3.0}).endswith(
        "validate 75% update 25%"
    )


def test_step_line_without_training_shows_validation_only():
    assert step_line(0, 0, {"eval/success_once": 0.45, "eval/return": 3.0}) == "step 0 | eval 0.450"


def test_pair_accuracy_is_shown_as_accuracy():
    row = {"eval/loss": 0.6, "eval/accuracy": 0.75, "train/loss": 0.5, "train/accuracy": 1.0}
    assert step_line(5, 9, row) == "step 5/9 | val loss 0.6000 | val acc 0.750 | train acc 1.000"


def test_return_is_shown_if_success_is_unknown():
    row = {"eval/return": 475.25, "train/return": 31.5, "time/step": 1.0}
    assert step_line(3, 9, row) == "step 3/9 | 1.0 s | eval return 475.2 | return 31.50"


def test_non_terminal_lines_are_plain_and_unwrapped(tmp_path: Path):
    out = StringIO()
    monitor = ConsoleMonitor(out)
    monitor.open(tmp_path, INFO)
    monitor.log(3, METRICS)
    monitor.text("[bold]brackets stay[/bold]")
    monitor.close()
    assert out.getvalue() == LINE + "\n[bold]brackets stay[/bold]\n"


def test_non_terminal_progress_is_rate_limited(tmp_path: Path):
    now, out = [0.0], StringIO()
    monitor = ConsoleMonitor(out, clock=lambda: now[0])
    monitor.open(tmp_path, INFO)
    seen = []
    for tick in range(9):
        now[0] = tick * PROGRESS_PERIOD_S / 3
        monitor.progress(tick, 9, "rollout")
        seen.append(out.getvalue().count("\n"))
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert out.getvalue() == "rollout: 3 of 9 done\nrollout: 6 of 9 done\n"
    monitor.log(1, {})
    now[0] += PROGRESS_PERIOD_S - 1
    monitor.progress(9, 9, "rollout")
    assert out.getvalue().endswith("step 1/100\n")


def on_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, info: RunInfo = INFO, **environ: str) -> str:
    """Return the output of a short run on a pseudo terminal."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"} | environ).items():
        monkeypatch.setenv(name, value)
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        monitor = ConsoleMonitor(stream)
        monitor.open(tmp_path, info)
        monitor.banner(["embodyrl train", "  env        tabletop (21 tasks) · 64 slots"])
        monitor.progress(1, 8, "rollout")
        monitor.log(3, METRICS)
        monitor.text("env worker 1 [died]")
        monitor.progress(2, 8, "rollout")
        monitor.results([("stack", Rate(1, 10), Rate(8, 10))])
        monitor.close()
        os.set_blocking(reader, False)
        received = bytearray()
        try:
            while part := os.read(reader, 65536):
                received += part
        except BlockingIOError:
            pass
    os.close(reader)
    return received.decode()


def test_terminal_keeps_the_last_dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = on_terminal(monkeypatch, tmp_path)
    for part in (
        "Time per phase",
        "step 3/100",
        "rollout: 2 of 8 done",
        "env worker 1 [died]",
        "0.0123",
        "simulate",
    ):
        assert part in text, part
    assert text.index("embodyrl train") < text.index("Progress")
    assert text.rindex("80.0 % [49.0, 94.3] (8/10)") > text.rindex("gradient norm")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "\x1b[3" in text


def test_a_banner_breaks_between_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = on_terminal(monkeypatch, tmp_path, COLUMNS="30")
    assert "tabletop (21\r\n             tasks) · 64 slots\r\n" in text


def test_narrow_terminal_puts_results_below_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lines = on_terminal(monkeypatch, tmp_path, COLUMNS="66").splitlines()
    at = lines.index("stack")
    assert lines[at + 1].split("  ") == ["", "10.0 % [1.8, 40.4] (1/10)", "80.0 % [49.0, 94.3] (8/10)", "+70.0"]
    assert lines[at - 1].split() == ["first", "validation", "last", "validation", "change"]


def test_evaluation_on_a_terminal_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = on_terminal(monkeypatch, tmp_path, RunInfo(run_id="r"))
    assert "rollout: 2 of 8 done" in text
    assert "step 3 | 12.4 s" in text
    assert "env worker 1 [died]" in text
    assert "Time per phase" not in text


def test_no_color_disables_colours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = on_terminal(monkeypatch, tmp_path, NO_COLOR="1")
    assert "Time per phase" in text
    assert "\x1b[3" not in text


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = on_terminal(monkeypatch, tmp_path, TERM="dumb")
    assert "\x1b" not in text
    assert LINE in text


def test_results_are_aligned_in_columns(tmp_path: Path):
    out = StringIO()
    monitor = ConsoleMonitor(out)
    monitor.open(tmp_path, INFO)
    monitor.results([("pick", Rate(2, 10), Rate(8, 10)), ("place", Rate(0, 10), Rate(0, 0)), TOTAL])
    lines = [line.split("  ") for line in out.getvalue().splitlines()]
    table = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert table == [
        ["task", "first validation", "last validation", "change"],
        ["pick", "20.0 % [5.7, 51.0] (2/10)", "80.0 % [49.0, 94.3] (8/10)", "+60.0"],
        ["place", "0.0 % [0.0, 27.8] (0/10)", "-", "-"],
        ["all tasks", "10.0 % [2.8, 30.1] (2/20)", "80.0 % [49.0, 94.3] (8/10)", "+70.0"],
    ]


def test_blocked_output_reader_does_not_block_training(tmp_path: Path):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with open(writing, "w", encoding="utf-8") as stream, open(reading, "rb", buffering=0) as reader:
        monitor = ConsoleMonitor(stream)
        monitor.open(tmp_path, INFO)
        for _ in range(1000):
            monitor.text("x" * 99)
        first = reader.read(1 << 16).decode()
        monitor.text("y" * 1500)
        monitor.close()
        assert set(first.splitlines()) == {"x" * 99}
        missed = 1000 - first.count("\n")
        assert missed > 900
        second = reader.read(1 << 16).decode()
    assert second.startswith(f"({missed} lines were dropped: the output was blocked)\nyyy")
