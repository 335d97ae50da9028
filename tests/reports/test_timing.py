"""Run time from rows of metrics."""

from embodyrl.monitor.phases import run_seconds, step_seconds


def test_run_seconds_include_validations_and_skipped_rows() -> None:
    rows = [
        {"step": 0, "time/validate": 7.0},
        {"step": 1, "time/step": 10.0},
        {"step": 4, "time/step": 20.0, "time/validate": 5.0},
    ]
    assert run_seconds(rows) == 10.0 + 3 * 20.0 + 5.0
    assert step_seconds(rows[2]) == 25.0
