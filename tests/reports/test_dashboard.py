import pytest
from rich.console import Console

from embodyrl.monitor.dashboard import Dashboard, replay_metrics, sparkline
from embodyrl.monitor.phases import format_duration
from embodyrl.monitor.protocol import RunInfo

ROW = {
    "step": 1,
    "train/success_once": 0.5,
    "train/episodes": 16.0,
    "env/steps": 1000.0,
    "env/restarts": 2.0,
    "time/step": 90.0,
    "time/rollout": 60.0,
    "time/validate": 10.0,
    "eval/task_0/success_once": 0.9,
    "eval/task_2/success_once": 0.1,
}


INFO = RunInfo(run_id="my_run", total_steps=11, tasks=("open", "close", "lift"))


def drawn(width: int, row: dict[str, float] = ROW, times: int = 1) -> list[str]:
    return printed(replay_metrics(INFO, [row] * times, ["12:00:00 env worker 0 died " + "x" * 300]), width)


def printed(board: Dashboard, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(board)
    return capture.get().splitlines()


def cells(lines: list[str], name: str) -> list[str]:
    return next(line[line.index(name) + len(name) :] for line in lines if name in line).split()


def test_sparklines_span_their_range_and_keep_the_newest_values():
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█"
    assert sparkline([9, 0, 1], 2) == "▁█"
    assert sparkline([5, 5], 4) == "▄▄"


def test_durations_are_formatted():
    assert [format_duration(s) for s in (7.4, 200, 18720)] == ["7 s", "3 min 20 s", "5 h 12 min"]


def test_dashboard_shows_the_metrics():
    lines = drawn(100)
    assert {len(line) for line in lines} == {100}
    assert cells(lines, "restarts")[0] == "2"
    assert cells(lines, "env steps ")[0] == "1,000"
    assert cells(lines, "rollout")[:4] == ["60.0", "s", "60", "%"]
    assert cells(lines, "other")[:4] == ["30.0", "s", "30", "%"]
    assert cells(lines, "success ")[:2] == ["0.500", "±0.22"]
    assert "step 1/11 · ETA 16 min 40 s · 1 min 40 s in steps" in lines[-1]
    assert "my_run" in lines[0]


def test_progress_shows_only_logged_metrics():
    """SFT has no environment, and deterministic runs log no env steps per second."""
    lines = drawn(100, ROW, times=2)
    assert cells(lines, "env steps ")[0] == "2,000"
    assert not any("env steps/s" in line or "dropped" in line for line in lines)
    sft = drawn(100, {"step": 1, "time/step": 2.0, "actor/loss": 0.5, "actor/memory_gib": 1.5})
    assert cells(sft, "memory")[:2] == ["1.5", "GiB"]
    assert not any(name in line for line in sft for name in ("env steps", "episodes", "restarts"))


def test_dashboard_keeps_task_order_and_wraps_events():
    lines = drawn(100)
    tasks = [line.split()[1] for line in lines if "░" in line]
    assert tasks == ["open", "lift"]
    assert any("Success per task" in line for line in lines)
    assert sum("xxxx" in line for line in lines) > 1
    assert not any("…" in line for line in lines)


LONGEST = ROW | {
    "env/steps": 100_000.0,
    "rollout/slot_occupancy": 0.51,
    "eval/success_once": 0.42,
    "eval/episodes": 200.0,
    "actor/loss": 0.2731,
    "actor/clip_fraction": 0.031,
    "time/simulate": 50.0,
    "time/update": 20.0,
}


@pytest.mark.parametrize("width", [40, 80, 92])
def test_dashboard_fits_narrow_terminals(width: int):
    lines = drawn(width, LONGEST, times=6)
    assert {len(line) for line in lines} == {width}
    assert cells(lines, "simulate")[:4] == ["50.0", "s", "50", "%"]
    assert cells(lines, "success (eval)")[:2] == ["0.420", "±0.07"]
    assert [line for line in lines[1:-1] if "…" in line] == []


def test_elapsed_time_includes_time_between_steps():
    seconds = iter([100.0, 130.0, 170.0])
    board = Dashboard(INFO, clock=lambda: next(seconds))
    board.log(0, {"eval/success_once": 0.5})
    assert "step 0/11 · 30 s so far" in printed(board, 92)[-1]
    board.log(1, ROW)
    assert "1 min 10 s so far" in printed(board, 92)[-1]


def test_return_equal_to_success_is_hidden():
    assert not any("return" in line for line in drawn(92, ROW | {"train/return": 0.5}))
    assert cells(drawn(92, ROW | {"train/return": 23.25}), "return")[0] == "23.2"
