"""Import of result files of vla-eval and lerobot-eval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from embodyrl_results.command import main
from embodyrl_results.foreign import import_result

from embodyrl.errors import ConfigError
from embodyrl.monitor.intervals import wilson


def vla_eval() -> dict[str, object]:
    """A result in the layout of vla-eval 0.8: two tasks, one episode with an infrastructure error."""
    done = [{"episode_id": k, "metrics": {"success": k < 3}, "steps": 90} for k in range(5)]
    lost = {"episode_id": 5, "metrics": {}, "failure_reason": "timeout"}
    tasks = [
        {"task": "a", "episodes": [*done, lost], "num_episodes": 6, "num_errors": 1, "avg_steps": 90.0},
        {"task": "b", "episodes": [{"episode_id": 0, "metrics": {"success": 1.0}}], "num_episodes": 1, "avg_steps": 9},
    ]
    return {
        "benchmark": "LIBEROBenchmark",
        "mode": "sync",
        "harness_version": "0.8.0",
        "created_at": "2026-11-01T00:00:00+00:00",
        "tasks": tasks,
        "config": {"params": {"suite": "libero_spatial", "seed": 7}},
    }


def lerobot() -> dict[str, object]:
    """An eval_info.json in the layout of lerobot-eval."""
    metrics = {"sum_rewards": [1.0, 0.0], "max_rewards": [1.0, 0.0], "successes": [True, False], "video_paths": []}
    tasks = [{"task_group": "libero_object", "task_id": k, "metrics": metrics} for k in range(2)]
    return {"per_task": tasks, "per_group": {}, "overall": {"pc_success": 50.0, "n_episodes": 4}}


def written(folder: Path, content: object) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps(content))
    return path


def test_vla_eval_result_becomes_a_card(tmp_path: Path) -> None:
    card = import_result(written(tmp_path, vla_eval()), None)
    rows = card["figures"][0]["rows"]
    assert (rows[0]["value"], rows[0]["low"], rows[0]["high"]) == (pytest.approx(4 / 6), *wilson(4, 6))
    assert [(row["name"], row["episodes"]) for row in rows] == [("all tasks", 6), ("a", 5), ("b", 1)]
    assert (card["imported"], card["dropped_episodes"]) == ("vla-eval 0.8.0", 1)
    assert card["protocol"]["name"] == "LIBEROBenchmark, sync mode, seed 7, suite libero_spatial"


def test_lerobot_result_needs_a_protocol(tmp_path: Path) -> None:
    path = written(tmp_path, lerobot())
    with pytest.raises(ConfigError, match="--protocol"):
        import_result(path, None)
    card = import_result(path, "libero_object, 2 episodes a task")
    assert card["figures"][0]["rows"][0]["text"] == "50.0 % [15.0, 85.0] (2/4)"
    assert card["protocol"]["name"] == "libero_object, 2 episodes a task"


@pytest.mark.parametrize("content", [[], {"per_task": [{"metrics": {}}]}, {"harness_version": "0.8", "tasks": []}])
def test_result_files_of_unknown_tools_are_rejected(tmp_path: Path, content: object) -> None:
    with pytest.raises(ConfigError):
        import_result(written(tmp_path, content), "p")


def test_success_must_be_a_boolean(tmp_path: Path) -> None:
    content = lerobot()
    content["per_task"][0]["metrics"]["successes"] = [0.5]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"but is 0\.5"):
        import_result(written(tmp_path, content), "p")


def test_episodes_of_tasks_with_equal_names_are_merged(tmp_path: Path) -> None:
    content = vla_eval()
    content["tasks"][1]["task"] = "a"  # type: ignore[index]
    rows = import_result(written(tmp_path, content), "p")["figures"][0]["rows"]
    assert [row["episodes"] for row in rows] == [6]
    content = lerobot()
    content["per_task"][1]["task_id"] = 0  # type: ignore[index]
    assert import_result(written(tmp_path, content), "p")["figures"][0]["rows"][0]["episodes"] == 4


def test_result_of_lerobot_eval_with_one_task_is_imported(tmp_path: Path) -> None:
    episodes = [{"episode_ix": k, "sum_reward": 1.0, "success": k > 0, "seed": k} for k in range(3)]
    content = {"per_episode": episodes, "aggregated": {"pc_success": 66.7}}
    assert import_result(written(tmp_path, content), "p")["figures"][0]["rows"][0]["value"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("config", [None, {"params": None}])
def test_vla_eval_result_without_parameters_is_imported(tmp_path: Path, config: object) -> None:
    card = import_result(written(tmp_path, vla_eval() | {"config": config}), None)
    assert card["protocol"]["name"] == "LIBEROBenchmark, sync mode"


def test_missing_keys_of_a_result_file_are_reported(tmp_path: Path) -> None:
    content = vla_eval()
    del content["mode"]
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match="the key 'mode' is missing"):
        import_result(path, None)
    assert import_result(path, "p")["protocol"]["name"] == "p"


def test_import_keeps_the_cards_of_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipes.toml").write_text('[own]\ntitle = "Own"\ncommand = "train env=tabletop"\n')
    path = str(written(tmp_path, vla_eval()))
    assert main(["import", path, "--name", "own_seed0", "--table", str(tmp_path)]) == 2
    assert "belongs to a run" in capsys.readouterr().err
    assert not (tmp_path / "cards" / "own_seed0.json").exists()


def test_imported_row_names_excluded_episodes_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "recipes.toml").write_text("")
    words = ["--name", "pi0", "--table", str(tmp_path), "--protocol", "two\nlines"]
    assert main(["import", str(written(tmp_path, vla_eval())), *words]) == 0
    row = next(line for line in (tmp_path / "index.md").read_text().splitlines() if line.startswith("| pi0 "))
    assert "| 6, 1 with errors excluded | two lines | vla-eval 0.8.0 |" in row


def test_imported_row_names_its_protocol_on_the_page(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.mkdir()
    (table / "recipes.toml").write_text("")
    words = ["--name", "2024-pi0", "--table", str(table)]
    assert main(["import", str(written(tmp_path, vla_eval())), *words]) == 0
    row = next(line for line in (table / "index.md").read_text().splitlines() if line.startswith("| 2024-pi0 "))
    assert "66.7 %" in row
    assert "suite libero_spatial" in row
    assert "vla-eval 0.8.0" in row
