import json
from pathlib import Path

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
