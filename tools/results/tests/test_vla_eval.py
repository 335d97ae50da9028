"""Export of evaluations to result files of vla-eval."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from embodyrl_results.command import main
from embodyrl_results.foreign import import_result
from embodyrl_results.vla_eval import vla_eval_result

from embodyrl.errors import ConfigError

CLIENTS = os.environ.get("EMBODYRL_TEST_CLIENTS")
"""Python of an environment with vla-eval."""


def write_run(folder: Path, outcomes: dict[str, list[bool | None]], *, first: int = 0, model: str = "mlp") -> Path:
    """Write a run with one finished evaluation; state numbers of each task begin at `first`."""
    place = folder / "eval/step_000000"
    place.mkdir(parents=True)
    config = {"env": {"env_type": "tabletop"}, "model": {"model_type": model}, "ckpt": "assets/start"}
    (folder / "config.yaml").write_text(json.dumps(config))
    rows = [
        {"task_id": task_id, "task": task, "reset_id": 100 * task_id + first + k, "seed": 1000, "success_once": success}
        for task_id, (task, found) in enumerate(outcomes.items())
        for k, success in enumerate(found)
    ]
    same = {
        "success_at_end": None,
        "return": 0.0,
        "terminated": True,
        "truncated": False,
        "seconds": 0.5,
        "video": None,
    }
    lines = [json.dumps(row | same | {"episode": k, "steps": 10 + k}) for k, row in enumerate(rows)]
    (place / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    (place / "eval.json").write_text("{}")
    return folder


def test_evaluations_are_merged_into_one_vla_eval_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = write_run(tmp_path / "one", {"a": [True, False], "b": [True]})
    other = write_run(tmp_path / "other", {"a": [True, True, False]}, first=2)
    assert main(["export", "found.json", str(one), str(other)]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(t["task"], t["num_episodes"], t["mean_success"], t["avg_steps"]) for t in found["tasks"]] == [
        ("a", 5, 0.6, (10 + 11 + 10 + 11 + 12) / 5),
        ("b", 1, 1.0, 12.0),
    ]
    assert [one["episode_id"] for one in found["tasks"][0]["episodes"]] == [0, 1, 2, 3, 4]
    assert (found["benchmark"], found["mean_success"]) == ("tabletop", 0.6667)
    assert found["config"]["params"] == {"model": "mlp", "weights": "assets/start"}
    row = import_result(tmp_path / "found.json", None)["figures"][0]["rows"][0]
    assert (row["episodes"], row["value"]) == (6, pytest.approx(4 / 6))


def test_runs_of_different_policies_or_equal_episodes_are_rejected(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", {"a": [True]})
    with pytest.raises(ConfigError, match="model differ"):
        vla_eval_result([one, write_run(tmp_path / "other", {"a": [True]}, first=1, model="cnn")])
    with pytest.raises(ConfigError, match="same episode"):
        vla_eval_result([one, one])
    with pytest.raises(ConfigError, match="does not report success"):
        vla_eval_result([write_run(tmp_path / "unknown", {"a": [None]})])
    assert main(["export", str(tmp_path / "found.json")]) == 2


COLLECT = """
import json, sys
from vla_eval.results.collector import ResultCollector
found = json.load(open(sys.argv[1]))
collector = ResultCollector(found["benchmark"], found["mode"], found["metric_keys"])
for task in found["tasks"]:
    for episode in task["episodes"]:
        collector.record(task["task"], episode)
print(json.dumps(collector.get_benchmark_result(found["config"])))
"""


@pytest.mark.integration
@pytest.mark.skipif(not CLIENTS, reason="EMBODYRL_TEST_CLIENTS names no Python with vla-eval")
def test_vla_eval_computes_the_same_result(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(vla_eval_result([write_run(tmp_path / "run", {"a": [True, False, True], "b": [True]})])))
    said = subprocess.run([str(CLIENTS), "-c", COLLECT, str(path)], check=True, capture_output=True, text=True)
    own = {"harness_version", "created_at"}
    ours, theirs = json.loads(path.read_text()), json.loads(said.stdout)
    assert {k: v for k, v in ours.items() if k not in own} == {k: v for k, v in theirs.items() if k not in own}
