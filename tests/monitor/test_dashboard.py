from rich.console import Console

from embodyrl.monitor.dashboard import replay, sparkline
from embodyrl.monitor.protocol import RunInfo
from embodyrl.monitor.timing import duration

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


def drawn(width: int) -> list[str]:
    info = RunInfo(run_id="my_run", total_steps=11, tasks=("open", "close", "lift"))
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(replay(info, [ROW], ["12:00:00 env worker 0 died " + "x" * 300]))
    return capture.get().splitlines()


def cells(lines: list[str], name: str) -> list[str]:
    return next(line[line.index(name) + len(name) :] for line in lines if name in line).split()


def test_sparklines_span_their_range_and_keep_the_newest():
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█"
    assert sparkline([9, 0, 1], 2) == "▁█"
    assert sparkline([5, 5], 4) == "▄▄"


def test_durations():
    assert [duration(s) for s in (7.4, 200, 18720)] == ["7 s", "3 min 20 s", "5 h 12 min"]


def test_the_dashboard_says_what_the_metrics_say():
    lines = drawn(100)
    assert {len(line) for line in lines} == {100}
    assert cells(lines, "restarts")[0] == "2"
    assert cells(lines, "env steps ")[0] == "1,000"
    assert cells(lines, "rollout")[:4] == ["60.0", "s", "60", "%"]
    assert cells(lines, "other")[:4] == ["30.0", "s", "30", "%"]
    assert cells(lines, "success ")[:2] == ["0.500", "±0.22"]
    assert "step 1/11 · ETA 16 min 40 s · 1 min 40 s so far" in lines[-1]
    assert "my_run" in lines[0]


def test_weak_tasks_come_first_and_events_are_cut_at_the_edge():
    lines = drawn(100)
    tasks = [line.split()[1] for line in lines if "░" in line]
    assert tasks == ["lift", "open"]
    assert next(line for line in lines if "died" in line).rstrip(" │").endswith("…")


def test_it_fits_a_terminal_of_92_columns():
    lines = drawn(92)
    assert {len(line) for line in lines} == {92}
    assert sum("…" in line for line in lines) == 1  # the long event
