"""`embodyrl new`: generated packages run without changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SOURCE

from embodyrl.cli.main import main
from embodyrl.cli.new import KINDS, TEMPLATES, render

ONE_STEP = (
    *("launcher=inline", "runner.max_steps=1", "runner.val_check_interval=-1", "runner.logger.backends=[jsonl]"),
    *("runner.experiment_name=run", "env.train.total_num_envs=4", "env.train.max_episode_steps=8"),
)
SHORT_EVAL = ("launcher=inline", "eval.episodes=2", "runner.experiment_name=evaluated")


def python(cwd: Path, *arguments: str, package: str = "") -> str:
    """Run Python with a new package on its path; return its output."""
    path = os.pathsep.join(str(p) for p in (cwd / package, SOURCE) if p)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def embodyrl(cwd: Path, *arguments: str, package: str = "") -> str:
    return python(cwd, "-m", "embodyrl.cli.main", *arguments, package=package)


def new(cwd: Path, kind: str, name: str) -> None:
    """Write a package to a folder, in a process that has not imported a package of this name."""
    embodyrl(cwd, "new", kind, name)


def row(folder: Path) -> dict[str, float]:
    """Return the metrics of the only training step."""
    (line,) = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


def own_tests(folder: Path) -> str:
    return python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.integration
def test_new_env_template_passes_check_env_and_trains(tmp_path):
    said = embodyrl(tmp_path, "new", "env", "my_env")
    assert "embodyrl check-env env=my_env --config-dir my_env/conf" in said
    conf = ("--config-dir", "my_env/conf")
    assert " 0 failed, 0 skipped" in embodyrl(tmp_path, "check-env", "env=my_env", *conf, package="my_env")
    group = ("algorithm.group_size=4",)
    embodyrl(tmp_path, "train", "experiment=my_env", *conf, *ONE_STEP, *group, package="my_env")
    assert row(tmp_path)["step"] == 1
    assert "actor/loss" in row(tmp_path) or row(tmp_path)["train/groups_without_signal"] > 0
    printed = embodyrl(tmp_path, "eval", "env=my_env", "model=scripted", *conf, *SHORT_EVAL, package="my_env")
    assert "(2/2)" in printed
    assert "1 passed" in own_tests(tmp_path / "my_env")


@pytest.mark.integration
def test_new_batched_env_template_passes_check_env_and_trains(tmp_path):
    new(tmp_path, "batched-env", "my_batch")
    assert "1 passed" in own_tests(tmp_path / "my_batch")
    few = ("env.train.total_num_envs=64", "env.train.max_steps_per_rollout_epoch=20", "runner.max_steps=1")
    quiet = ("runner.val_check_interval=-1", "runner.logger.backends=[jsonl]", "runner.experiment_name=run")
    words = ("experiment=my_batch", "--config-dir", "my_batch/conf", *few, *quiet)
    embodyrl(tmp_path, "train", *words, package="my_batch")
    assert row(tmp_path)["env/steps"] == 64 * 20


@pytest.mark.integration
def test_installed_env_is_found_by_its_entry_point(tmp_path):
    pytest.importorskip("hatchling")
    new(tmp_path, "env", "my_env")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    python(tmp_path, *pip, "--target", "site", "./my_env")
    code = "from embodyrl.envs import ENVS; import my_env; print(ENVS.names(), ENVS.get('my_env'), my_env.__file__)"
    printed = python(tmp_path, "-c", code, package="site")
    assert "'my_env'" in printed
    assert "my_env.env.MyEnvFactory" in printed
    assert str(tmp_path / "site" / "my_env") in printed


@pytest.mark.integration
def test_new_policy_template_trains_and_evaluates(tmp_path):
    new(tmp_path, "policy", "my_policy")
    words = ("env=tabletop", "model=my_policy", "algorithm=ppo", "--config-dir", "my_policy/conf")
    embodyrl(tmp_path, "train", *words, *ONE_STEP, package="my_policy")
    assert row(tmp_path)["actor/grad_norm"] > 0
    # One rollout, one forward pass: probabilities while training are those of acting.
    assert row(tmp_path)["actor/logprob_gap"] < 1e-5
    printed = embodyrl(tmp_path, "eval", "ckpt=runs/run", "trust=true", *SHORT_EVAL, package="my_policy")
    assert "overall" in printed
    assert "2 passed" in own_tests(tmp_path / "my_policy")


@pytest.mark.integration
def test_new_algorithm_template_trains(tmp_path):
    new(tmp_path, "algorithm", "my_algorithm")
    new(tmp_path, "env", "my_env")
    conf = ("--config-dir", "my_algorithm/conf", "--config-dir", "my_env/conf")
    conf = (*conf, "experiment=my_env", "algorithm=my_algorithm", "algorithm.group_size=8")
    # Chance succeeds in every tenth episode of the new environment, so 32 of them give some group a signal.
    package = os.pathsep.join(str(tmp_path / name) for name in ("my_env", "my_algorithm"))
    embodyrl(tmp_path, "train", *conf, *ONE_STEP, "env.train.total_num_envs=32", package=package)
    assert row(tmp_path)["actor/grad_norm"] > 0
    assert "1 passed" in own_tests(tmp_path / "my_algorithm")


PARTS = ("env", "policy", "loss", "reward", "logger", "launcher")


@pytest.mark.integration
def test_user_components_add_their_own_keys(tmp_path):
    """Six packages of one file each train together: their keys are checked and listed without registration."""
    for kind in PARTS:
        new(tmp_path, kind, f"my_{kind}")
    package = os.pathsep.join(str(tmp_path / f"my_{kind}") for kind in PARTS)
    conf = [word for kind in ("env", "policy", "loss", "launcher") for word in ("--config-dir", f"my_{kind}/conf")]
    parts = ("env=my_env", "model=my_policy", "algorithm=my_loss", "launcher=my_launcher")
    reward = ("reward.path=my_reward.reward:reward", "reward.weights.effort=0.5")
    own = ("env.reach=0.3", "model.width=16", "algorithm.softness=0.5")
    logger = "runner.logger.backends=[jsonl,my_logger.logger:MyLoggerLogger]"
    short = [word for word in ONE_STEP if not word.startswith(("launcher=", "runner.logger."))]
    words = (*parts, *reward, *own, *conf, *short, "algorithm.group_size=4", logger)
    printed = embodyrl(tmp_path, "train", *words, package=package)
    assert "my_launcher: env_0 worked" in printed
    found = row(tmp_path)
    assert found["actor/grad_norm"] > 0
    assert found["train/reward_effort"] < 0
    expected = found["train/reward_success"] + 0.5 * found["train/reward_effort"]
    assert found["train/return"] == pytest.approx(expected, rel=1e-4)
    lines = (tmp_path / "runs" / "run" / "my_logger.csv").read_text().splitlines()
    assert float(lines[1].split(",")[1]) == pytest.approx(found["train/return"])
    saved = (tmp_path / "runs" / "run" / "config.yaml").read_text()
    assert all(line in saved for line in ("softness: 0.5", "width: 16", "reach: 0.3", "effort: 0.5"))
    shown = embodyrl(tmp_path, "show", "algorithm.softness", *parts, *conf, package=package)
    assert "softness: float = 0.2" in shown
    assert "the loss saturates" in shown
    with pytest.raises(AssertionError, match="softness=-1: must be a number greater than 0"):
        embodyrl(tmp_path, "train", *parts, "algorithm.softness=-1", *conf, package=package)
    tests = [f"my_{kind}/tests" for kind in PARTS[2:]]
    assert "4 passed" in python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, package=package)


def test_new_experiment_can_be_selected_and_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "experiment", "kitchen"]) == 0
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["kitchen.yaml"]
    assert main(["list", "experiments", "--config-dir", "conf"]) == 0
    assert "kitchen" in capsys.readouterr().out
    assert main(["train", "experiment=kitchen", "--config-dir", "conf", "--dry-run"]) == 0
    assert "20 steps" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_new_command_overwrites_no_files(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", kind, "mine"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed = next(iter(before))
    changed.write_text("my own work")
    assert main(["new", kind, "mine"]) == 2
    assert "already exist: " in capsys.readouterr().err
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before.keys()
    assert changed.read_text() == "my own work"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "new env my_env. Choose one of env, batched-env, policy, algorithm, loss, reward, logger"),
        (["env"], "embodyrl new env takes one name"),
        (["envv", "x"], "Did you mean 'env'?"),
        (["env", "My-Env"], "use lower-case letters, digits and _, for example my_env"),
        (["env", "../x"], "use lower-case letters"),
        (["policy", "class"], "use lower-case letters"),
        (["env", "tabletop"], "env=tabletop is already an option of embodyrl"),
        (["experiment", "libero_laptop"], "experiment=libero_laptop is already an option of embodyrl"),
        (["env", "numpy"], "The installed Python module 'numpy' would be shadowed"),
    ],
)
def test_invalid_new_arguments_write_no_files(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_templates_contain_no_placeholders_after_rendering(kind):
    files = render(kind, "two_words")
    folders = [TEMPLATES / kind, *([TEMPLATES / "package"] if KINDS[kind].entries else [])]
    written = {p.relative_to(folder) for folder in folders for p in folder.rglob("*") if p.is_file()}
    assert len(files) == len(written)
    for path, text in files.items():
        assert "@" not in text.replace("@package", "").replace("@torch", "").replace("@pytest", ""), path
        assert "NAME" not in str(path)
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    if kind in ("env", "policy"):
        assert any("class TwoWordsFactory" in text for text in files.values())


@pytest.mark.integration
def test_generated_code_passes_ruff(tmp_path, monkeypatch):
    pytest.importorskip("ruff")
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        assert main(["new", kind, f"clean_{kind.replace('-', '_')}"]) == 0
        folder = tmp_path / f"clean_{kind.replace('-', '_')}"
        for check in (("check", "--select", "E,W,F,I,UP,B,SIM,N,RUF,PERF"), ("format", "--check")):
            if folder.is_dir():
                python(folder, "-m", "ruff", *check, "--isolated", "--no-cache", "--line-length", "120", ".")
