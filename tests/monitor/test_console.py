import fcntl
import os
import pty
from io import StringIO
from pathlib import Path

import pytest

from embodyrl.monitor.console import PROGRESS_PERIOD_S, ConsoleMonitor, step_line
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
LINE = "step   3/100  12.4 s  success 25.0 % of 12  kl 0.0004  grad norm 0.91  45 steps/s"
TITLE = "validation success"
INFO = RunInfo(run_id="r", total_steps=100)


def test_step_line_formats_metrics():
    assert step_line(3, 100, METRICS) == LINE


def test_step_line_without_training_shows_validation_only():
    assert step_line(0, 0, {"eval/success_once": 0.45, "eval/return": 3.0}) == "step 0  validation success 45.0 %"


def test_step_line_of_sft_names_both_losses():
    row = {"eval/loss": 0.6, "eval/accuracy": 0.75, "train/loss": 0.5, "train/accuracy": 1.0, "actor/loss": 0.4}
    assert step_line(5, 9, row) == (
        "step 5/9  validation loss 0.6000  validation accuracy 75.0 %  training accuracy 100.0 %  training loss 0.4000"
    )


def test_return_is_shown_if_success_is_unknown():
    row = {"eval/return": 475.25, "train/return": 31.5, "time/step": 1.0, "actor/loss": 0.1}
    assert step_line(3, 9, row) == "step 3/9  1.0 s  validation return 475.2  return 31.5"


def test_step_line_shows_restarts_and_returns_that_differ_from_success():
    row = {"train/success_once": 0.5, "train/episodes": 4, "train/return": 0.7, "env/restarts": 2}
    assert step_line(3, 9, row) == "step 3/9  success 50.0 % of 4  return 0.7  2 worker restarts"


def test_time_left_includes_validations_and_unlogged_steps(tmp_path: Path):
    out = StringIO()
    monitor = ConsoleMonitor(out)
    monitor.open(tmp_path, RunInfo(run_id="r", total_steps=100, resume_step=11))
    monitor.log(10, {"time/validate": 50.0})
    monitor.log(20, {"time/step": 50.0, "time/validate": 100.0})
    monitor.log(30, {"time/step": 10.0})
    monitor.log(100, {"time/step": 10.0})
    lines = out.getvalue().splitlines()
    assert lines == [
        "step  10/100",
        "step  20/100  50.0 s   1 h 27 min left",
        "step  30/100  10.0 s   44 min left",
        "step 100/100  10.0 s",
    ]


def test_console_output_without_a_terminal_is_plain_and_unwrapped(tmp_path: Path):
    out = StringIO()
    monitor = ConsoleMonitor(out)
    monitor.open(tmp_path, INFO)
    monitor.log(3, METRICS)
    monitor.text("[bold]brackets stay[/bold]")
    monitor.close()
    assert out.getvalue() == LINE + "   20 min left\n[bold]brackets stay[/bold]\n"


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
    assert out.getvalue().endswith("step   1/100\n")


def on_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, info: RunInfo = INFO, **environ: str) -> str:
    """Return the output of a short run on a pseudo terminal."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"} | environ).items():
        monkeypatch.setenv(name, value)
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        monitor = ConsoleMonitor(stream)
        monitor.open(tmp_path, info)
        monitor.banner(["embodyrl train", "  env        tabletop (21 tasks) · 64 environments"])
        monitor.progress(1, 8, "rollout")
        monitor.log(3, METRICS)
        monitor.text("env worker 1 [died]")
        monitor.progress(2, 8, "rollout")
        monitor.results(TITLE, [("stack", "10.0 %", "80.0 %", "+70.0 points (p < 0.001)")])
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
    assert text.rindex("+70.0 points") > text.rindex("gradient norm")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "\x1b[3" in text


def test_a_banner_breaks_between_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = on_terminal(monkeypatch, tmp_path, COLUMNS="30")
    assert "tabletop (21\r\n               tasks) · 64\r\n               environments\r\n" in text


def test_narrow_terminal_breaks_the_change_of_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lines = on_terminal(monkeypatch, tmp_path, COLUMNS="58").splitlines()
    at = next(at for at, line in enumerate(lines) if line.endswith("validation success  first   last    change"))
    assert lines[at + 1 : at + 3] == ["stack               10.0 %  80.0 %  +70.0 points (p <", " " * 29 + "0.001)"]


def test_evaluation_on_a_terminal_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = on_terminal(monkeypatch, tmp_path, RunInfo(run_id="r"))
    assert "rollout: 2 of 8 done" in text
    assert "step 3  12.4 s" in text
    assert "env worker 1 [died]" in text
    assert "Time per phase" not in text


def test_no_color_disables_colors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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
    monitor.results(TITLE, [("pick", "2.0 %", "10.0 %", "+8.0 points"), ("all tasks", "10.0 %", "-", "-")])
    assert out.getvalue().splitlines() == [
        "validation success  first   last    change",
        "pick                2.0 %   10.0 %  +8.0 points",
        "all tasks           10.0 %  -       -",
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
