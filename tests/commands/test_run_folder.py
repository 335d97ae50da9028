"""The run folder: name, lock and metadata."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import command_environment
from toy_runs import resume_toy, rows, toy_config, train_toy

from embodyrl.commands.run_folder import open_run
from embodyrl.commands.train import train
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError
from embodyrl.monitor.history import COSTS_FILE, read_rows
from embodyrl.plan.config import load_saved_config
from embodyrl.plan.weights import resolve_weights
from embodyrl.reports.card import build_card
from embodyrl.version import __version__


def test_an_existing_run_is_an_error_by_default(tmp_path):
    cfg = toy_config(tmp_path)
    open_run(cfg, "train", [], None).close()
    with pytest.raises(ConfigError, match=r"on_existing=resume.*on_existing=rename"):
        open_run(cfg, "train", [], None)


def test_on_existing_rename_numbers_folders_and_resume_reuses_the_folder(tmp_path):
    first = open_run(toy_config(tmp_path), "train", [], None)
    first.close()
    renamed = [open_run(toy_config(tmp_path, "runner.on_existing=rename"), "train", [], None) for _ in range(2)]
    assert [folder.root.name for folder in renamed] == ["run-2", "run-3"]
    resumed = open_run(toy_config(tmp_path, "runner.on_existing=resume"), "train", [], None)
    assert resumed.root == first.root
    assert (first.logs.name, resumed.logs.name) == ("attempt_1", "attempt_2")
    resumed.close()
    shutil.rmtree(first.logs)
    assert open_run(toy_config(tmp_path), "train", [], first.root).logs.name == "attempt_3"


def test_on_existing_resume_continues_from_the_last_step(tmp_path):
    words = ("runner.on_existing=resume", "runner.deterministic=true")
    run = train_toy(tmp_path, *words, "runner.max_steps=1")
    assert train_toy(tmp_path, *words, "runner.max_steps=3") == run
    assert [row["step"] for row in rows(run)] == [1, 2, 3]


def test_unnamed_runs_started_in_the_same_second_do_not_collide(tmp_path):
    cfg = toy_config(tmp_path, "runner.experiment_name=null")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: open_run(cfg, "train", [], None), range(24)))
    assert len({folder.root for folder in folders}) == 24
    assert all("train-toy_env-FACTORY" in folder.root.name for folder in folders)


def test_run_folder_contains_its_command_line(tmp_path):
    cfg = toy_config(tmp_path, "seed=3")
    folder = open_run(cfg, "train", ["seed=3"], None)
    folder.close()
    open_run(cfg, "train", ["runner.max_steps=9", "env.kwargs={a: 1}"], folder.root)
    assert load_saved_config(folder.root, ["trust=true"]) == cfg.updated({"trust": True})
    overrides = (folder.root / "overrides.txt").read_text().splitlines()
    assert overrides == ["# attempt 1: train seed=3", "# attempt 2: train runner.max_steps=9 'env.kwargs={a: 1}'"]
    assert f"python {sys.version.split()[0]}" in (folder.root / "env.txt").read_text()


@pytest.mark.integration
def test_run_in_use_is_rejected_without_changes(tmp_path):
    """The lock holder is a real child process that waits for its input to close."""
    cfg = toy_config(tmp_path, "runner.on_existing=resume")
    code = (
        "import sys; from pathlib import Path; from embodyrl.plan.config import load_saved_config as load;"
        "from embodyrl.commands.run_folder import open_run; run = Path(sys.argv[1]);"
        "folder = open_run(load(run, ['trust=true']), 'train', [], run); print('locked', flush=True); sys.stdin.read()"
    )
    open_run(cfg, "train", [], None).close()
    run = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=command_environment(tmp_path),
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "locked\n"
        before = sorted(p.relative_to(run) for p in run.rglob("*"))
        with pytest.raises(EmbodyError, match=f"in use by process {holder.pid}"):
            open_run(cfg, "train", [], None)
        assert sorted(p.relative_to(run) for p in run.rglob("*")) == before
        holder.stdin.close()
        holder.wait()
    # It ended without unlocking, like a killed one.
    assert open_run(cfg, "train", [], None).root == run


def test_stale_lock_with_a_reused_process_id_is_replaced(tmp_path):
    cfg = toy_config(tmp_path, "runner.on_existing=resume")
    folder = open_run(cfg, "train", [], None)
    lock = folder.root / "lock"
    folder.close()
    other = os.getppid()  # some living process that never locked this run
    lock.write_text(f"{os.uname().nodename} {other}")
    assert open_run(cfg, "train", [], None).root == folder.root


@pytest.mark.parametrize("what", ["a file", "below a file"])
def test_unusable_output_folder_error_contains_a_fix(tmp_path, what):
    (tmp_path / "taken").write_text("")
    parent = tmp_path / "taken" if what == "a file" else tmp_path / "taken" / "deeper"
    with pytest.raises(EmbodyError, match=r"Cannot write to .*runner\.output_dir"):
        open_run(toy_config(tmp_path, f"runner.output_dir={parent}"), "train", [], None)


def test_failed_run_releases_its_lock(tmp_path):
    with pytest.raises(EmbodyError):
        train(toy_config(tmp_path, "env.kwargs.fault=raise", "env.kwargs.where=init"))
    assert not (tmp_path / "run" / "lock").exists()


def test_weights_load_from_run_checkpoint_or_policy_folder(tmp_path):
    run = train_toy(tmp_path, "runner.save_interval=1")
    newest = run / "checkpoints" / "step_000002"
    assert resolve_weights(str(run)) == newest / "policy"
    assert resolve_weights(str(run / "checkpoints" / "step_000001")) == run / "checkpoints" / "step_000001" / "policy"
    assert resolve_weights(str(newest / "policy")) == newest / "policy"
    with pytest.raises(CheckpointError, match="neither a run, a checkpoint"):
        resolve_weights(str(tmp_path))


def test_run_folder_contains_code_version_machine_and_cost(tmp_path):
    folder = open_run(toy_config(tmp_path, "runner.on_existing=resume"), "train", [], None)
    spent = sum(k * k for k in range(2_000_000))
    folder.close()
    open_run(toy_config(tmp_path, "runner.on_existing=resume"), "train", [], folder.root).close()
    rows = read_rows(folder.root / COSTS_FILE)
    assert [row["attempt"] for row in rows] == ["attempt_1", "attempt_2"]
    assert spent
    assert 0 < rows[0]["cpu_s"] <= rows[0]["wall_s"] * 64 + 0.1
    assert 10 < rows[0]["peak_mib"] < 1 << 20
    lines = dict(line.split(" ", 1) for line in (folder.root / "env.txt").read_text().splitlines())
    assert lines["commit"] == "not known" or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", lines["commit"])
    assert lines["embodyrl"] == __version__


def test_run_whose_folder_was_deleted_keeps_usable_weights(tmp_path: Path):
    folder, warned = tmp_path / "run", "was deleted during the run"

    def delete(step: int, metrics: object) -> None:
        if step == 1:
            shutil.rmtree(folder)

    train(toy_config(tmp_path, "runner.max_steps=3"), on_step=delete)
    assert warned in (folder / "logs" / "events.log").read_text()
    assert build_card(folder)["command"] == "embodyrl train"
    assert not (folder / "lock").exists()
    resume_toy(folder, "runner.max_steps=4")
    assert [row["step"] for row in rows(folder)] == [2, 3, 4]
    assert (folder / "logs" / "events.log").read_text().count(warned) == 1


def test_evaluation_whose_folder_was_deleted_names_the_cause(tmp_path: Path):
    folder = open_run(toy_config(tmp_path), "eval", [], None)
    shutil.rmtree(folder.root)
    with pytest.raises(EmbodyError, match="run was deleted during the run"), folder:
        (folder.root / "eval.json").write_text("")


def test_restored_folder_is_locked(tmp_path: Path):
    cfg = toy_config(tmp_path, "runner.on_existing=resume")
    folder = open_run(cfg, "train", [], None)
    assert not folder.restore()
    shutil.rmtree(folder.root)
    assert folder.restore()
    with pytest.raises(EmbodyError, match="in use by process"):
        open_run(cfg, "train", [], None)
    shutil.rmtree(folder.root)
    with open_run(cfg, "train", [], None) as other:
        with pytest.raises(EmbodyError, match="in use by process"):
            folder.restore()
        folder.close()
        assert (other.root / "lock").exists()
