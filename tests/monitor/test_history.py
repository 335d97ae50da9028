import json
import math
from pathlib import Path

import pytest
from run_files import write_run

from embodyrl.errors import ConfigError
from embodyrl.files import natural_sort_key
from embodyrl.monitor import history
from embodyrl.monitor.history import read_episodes, read_newest_values, read_rows


def test_truncated_json_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": ')
    assert read_rows(tmp_path / "x.jsonl") == [{"a": 1}]
    assert read_rows(tmp_path / "y.jsonl") == []


LONG = 2_000
"""Number of steps of a long run."""


def test_reading_newest_values_parses_few_rows(tmp_path, monkeypatch):
    lines = [json.dumps({"step": step} | ({"eval/return": step} if step % 50 == 0 else {})) for step in range(LONG)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2000, "eval/return"']))
    parsed: list[object] = []
    parse = history.from_json
    monkeypatch.setattr(history, "from_json", lambda line, **how: parsed.append(line) or parse(line, **how))
    assert read_newest_values(tmp_path / "metrics.jsonl", ("step", "eval/return")) == [1999, 1950]
    assert 0 < len(parsed) < 10
    assert read_newest_values(tmp_path / "metrics.jsonl", ("nothing",)) == [None]
    assert read_newest_values(tmp_path / "no_file", ("step",)) == [None]


def test_least_likely_tokens_are_listed_in_order(tmp_path: Path) -> None:
    said = (-0.1, -3.0, -0.2, -2.0, -5.0, -1.0, -4.0)
    raw = dict.fromkeys(("task_id", "reset_id", "seed", "episode", "steps", "return", "seconds"), 0)
    raw |= dict.fromkeys(("terminated", "truncated", "success_once", "success_at_end"), False)
    raw |= {"task": "copy", "video": None}
    raw |= {"logprobs": [[(f"t{i}", value), ("best", -0.25)] for i, value in enumerate(said)]}
    (tmp_path / "episodes.jsonl").write_text(json.dumps(raw))
    (row,) = read_episodes(tmp_path / "episodes.jsonl")
    assert row.warnings == [f'token {i + 1}: "t{i}" {said[i]:.2f}; most probable "best" -0.25' for i in (1, 3, 4, 5, 6)]


def test_names_are_sorted_numerically() -> None:
    names = ["chunk-1000/file-002", "chunk-999/file-1000", "chunk-999/file-999", "env_10.log", "env_9.log", "a", ""]
    assert sorted(names, key=natural_sort_key) == [
        *("", "a", "chunk-999/file-999", "chunk-999/file-1000", "chunk-1000/file-002", "env_9.log", "env_10.log")
    ]
    names = ["1" + "0" * 5000, "1a2", "1\u06632", "002", "0"]
    assert sorted(names, key=natural_sort_key) == ["0", "1a2", "1\u06632", "002", "1" + "0" * 5000]


@pytest.mark.parametrize("value", [1e308, -1e101, math.inf])
def test_returns_with_squares_beyond_a_float_are_rejected(value, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    file = run / "eval" / "step_000003" / "episodes.jsonl"
    assert len(read_episodes(file)) == 6
    file.write_text(file.read_text().replace('"return": 1.0', f'"return": {json.dumps(value)}'))
    with pytest.raises(ConfigError, match=r"episodes.jsonl is damaged: a return is larger than 1e\+100"):
        read_episodes(file)
