"""A user's sequence of commands: train, list, evaluate, resume."""

from __future__ import annotations

import json

import pytest
from processes import run_cli
from toy_runs import rows, toy_words

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run a default (local) training; return (working folder, finished process)."""
    cwd = tmp_path_factory.mktemp("journey")
    words = toy_words(cwd / "runs", "env.kwargs.goal=0.7", "runner.val_check_interval=1", "eval.episodes=4")
    return cwd, run_cli("train", *words, "launcher.env_workers=2", cwd=cwd)


def test_training_prints_the_paths_of_its_results(trained):
    cwd, done = trained
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    run = cwd / "runs" / "run"
    printed = "".join(done.stdout.split())
    assert str(run) in printed
    assert str(run / "checkpoints" / "step_000002") in printed
    for name in ("config.yaml", "overrides.txt", "env.txt", "metrics.jsonl", "tensorboard"):
        assert (run / name).exists(), name
    for step in range(3):
        assert (run / "eval" / f"step_{step:06d}" / "eval.json").is_file()
    logs = sorted(p.name for p in (run / "logs" / "attempt_1").iterdir())
    assert logs == ["env_0.log", "env_1.log", "policy.log"]
    assert not (run / "lock").exists()


def test_list_runs_shows_the_run(trained):
    cwd, _ = trained
    done = run_cli("list", "runs", "--json", "runner.output_dir=runs", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    assert entry["id"] == "run"
    assert entry["step"] == 2
    assert entry["success"] == rows(cwd / "runs" / "run")[-1]["eval/success_once"]


def test_eval_writes_separate_results(trained):
    cwd, _ = trained
    words = toy_words(cwd / "runs", "env.kwargs.goal=0.7", "eval.episodes=4", "video=first:1", name="evaluated")
    train_only = ("actor.", "env.train.", "runner.max_steps", "algorithm.group_size")
    words = [w for w in words if not w.startswith(train_only)]
    done = run_cli("eval", *words, "ckpt=runs/run", "launcher.env_workers=1", "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "overall" in done.stderr, "human-readable lines"
    said = json.loads(done.stdout)
    assert (said["overall"]["episodes"], len(said["recordings"])) == (4, 1)
    assert said["folder"].endswith("evaluated/eval/step_000002")
    table = json.loads((cwd / "runs" / "evaluated" / "eval" / "step_000002" / "eval.json").read_text())
    assert table["overall"]["episodes"] == 4
    assert len(list((cwd / "runs" / "videos" / "evaluated").glob("step000002_*.mp4"))) == 1


def test_resume_by_path_uses_the_settings_of_the_run(trained):
    cwd, _ = trained
    done = run_cli("train", "--resume", "runs/run", "trust=true", "runner.max_steps=3", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(cwd / "runs" / "run")] == [0, 1, 2, 3]
    assert "resumed at step 2" in done.stdout
    # `auto` names the same run by its experiment.
    words = toy_words(cwd / "runs", "env.kwargs.goal=0.7", "runner.max_steps=3")
    again = run_cli("train", "--resume", "auto", *words, cwd=cwd)
    assert again.returncode == 0, again.stderr
    assert "resumed at step 3" in again.stdout
