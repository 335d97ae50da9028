import json
import shutil
import sys
from pathlib import Path

import pytest
from run_files import write_evaluation, write_run, write_video

from embodyrl.cli.discover.runs import describe_run
from embodyrl.errors import ConfigError
from embodyrl.reports.card import build_card
from embodyrl.reports.history import read_history
from embodyrl.reports.page import write_report

LONG = 2_000
"""Number of steps of a long run."""


def test_read_history_returns_metrics_and_evaluations(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "runs" / "a"))
    assert [row["step"] for row in history.rows] == [0, 1, 2, 3]
    assert history.series("actor/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [e.step for e in history.evaluations] == [0, 3]
    assert [e.episode for e in history.evaluations[0].episodes] == list(range(6))
    assert history.config["runner"]["max_steps"] == 3


def test_missing_success_counts_as_failure(tmp_path: Path) -> None:
    """Fails if steps and validations without a success are omitted, or shown by their return."""
    run = write_run(tmp_path / "runs" / "late")
    rows = [{"step": 0, "eval/return": -9.0}, {"step": 1, "train/return": -9.0}, {"step": 2, "train/return": -8.0}]
    rows[2]["train/success_once"] = 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, outcomes in ((0, [None] * 4), (3, [None, True, None, None])):
        shutil.rmtree(run / "eval" / f"step_{step:06d}")
        write_evaluation(run, step, outcomes)
    found = read_history(run)
    assert [str(one.score()) for one in found.evaluations] == ["0.0 % [0.0, 49.0] (0/4)", "25.0 % [4.6, 69.9] (1/4)"]
    assert found.series("train/success_once") == [(1, 0.0), (2, 0.5)]
    assert found.series("eval/success_once") == [(0, 0.0)]


def test_video_is_found_after_moving_the_run(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "runs" / "a"))
    video = write_video(tmp_path / "videos" / "a" / "x.mp4")
    assert history.find_video("/somewhere/else/videos/a/x.mp4") == video
    assert history.find_video("videos/a/y.mp4") is None


def test_report_of_a_long_run_parses_each_value_once(tmp_path):
    """Each value is parsed once, not once per row, which took minutes."""
    run = write_run(tmp_path / "run")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    with open(run / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps(row | {"step": step}) + "\n" for step in range(1, LONG + 1))
    write_report([run], tmp_path / "report.html")  # imports modules, whose definitions call `get` as well
    looks = 0

    def count(frame, event, function):
        nonlocal looks
        looks += event == "c_call" and function.__name__ == "get"

    sys.setprofile(count)
    try:
        write_report([run], tmp_path / "report.html")
    finally:
        sys.setprofile(None)
    assert looks < 6 * LONG * len(row)
    assert (tmp_path / "report.html").stat().st_size < 2 << 20


def test_unfinished_evaluation_is_not_a_result(tmp_path: Path) -> None:
    """Successful episodes are shorter and end first."""
    run = write_run(tmp_path / "run")
    write_evaluation(run, 7, [True, True], finished=False)
    found = read_history(run)
    assert [e.step for e in found.evaluations] == [0, 3]
    assert found.unfinished is not None
    assert (found.unfinished.step, len(found.unfinished.episodes)) == (7, 2)
    (line,) = write_report([run], tmp_path / "report.html")
    assert "step 3: 66.7 %" in line
    assert "the evaluation of step 7 is unfinished and not counted (2 episodes)" in line
    assert [figures["step"] for figures in build_card(run)["figures"]] == [0, 3]


def test_evaluations_are_sorted_by_step_beyond_a_million(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for step in (999_999, 1_000_000, 10_000_000):
        write_evaluation(run, step, [True])
    assert [one.step for one in read_history(run).evaluations] == [0, 3, 999_999, 1_000_000, 10_000_000]
    (run / "metrics.jsonl").unlink()
    for step in (0, 3, 999_999, 1_000_000, 10_000_000):
        overall = {"success_once": step / 1e7, "mean_return": 0.0}
        table = {"overall": overall, "tasks": [], "wall_s": 1.0, "env_steps": 1, "dropped": 0, "protocol": None}
        (run / f"eval/step_{step:06d}/eval.json").write_text(json.dumps(table))
    assert describe_run(run)["step"] == 10_000_000


def test_missing_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder is not a run"):
        read_history(tmp_path)
