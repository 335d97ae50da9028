"""Synchronous and asynchronous checkpoints of a session are complete, and errors are raised."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from toy_runs import comparable, resume_toy, rows, toy_config, train_toy, weights

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.commands import session as session_module
from embodyrl.commands.run_folder import open_run
from embodyrl.commands.session import Session
from embodyrl.commands.train import train
from embodyrl.errors import CheckpointError


def session(folder: Path, *words: str) -> Session:
    cfg = toy_config(folder, *words)
    return Session(cfg, open_run(cfg, "train", [], None), "train")


def fill(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(1000))
    (folder / "weights.bin").chmod(0o600)  # as safetensors does


def test_asynchronous_save_returns_before_completion(tmp_path):
    one = session(tmp_path, "checkpoint.async_save=true", "checkpoint.keep=1")
    gate = threading.Event()
    one._writer.submit(gate.wait, 60)
    one.step = 1
    path = one.save(fill, {})
    assert not path.exists()
    one.wait_for_save(wait=False)
    gate.set()
    one.wait_for_save()
    store = CheckpointStore(path.parent)
    store.verify(path)
    one.step = 2
    one.save(fill, {})
    one.wait_for_save()
    assert store.steps() == [2]


def test_best_checkpoint_without_success_has_the_highest_return(tmp_path):
    one = session(tmp_path, "checkpoint.keep=1", "runner.save_interval=1")
    one.record_score(0.0, 99.0)  # of the start, which has no checkpoint
    for mean_return in (-3.0, -1.0, -2.0):
        one.step += 1
        one.record_score(0.0, mean_return)
        one.save(fill, {})
    store = CheckpointStore(one.folder.checkpoints)
    assert store.steps() == [2, 3]
    assert store.best() == 2
    assert {f.stat().st_mode & 0o777 for f in store.path(3).iterdir()} == {0o644}


def test_only_a_step_with_a_checkpoint_can_be_the_best(tmp_path):
    one = session(tmp_path, "checkpoint.keep=1", "runner.save_interval=2")
    for mean_return in (9.0, 1.0, 8.0, 0.0):
        one.step += 1
        one.record_score(0.0, mean_return)
        if one.is_due(2):
            one.save(fill, {})
    store = CheckpointStore(one.folder.checkpoints)
    assert (store.steps(), store.best()) == ([2, 4], 2)


def test_synchronous_save_returns_after_completion(tmp_path):
    one = session(tmp_path)
    one.step = 1
    path = one.save(fill, {})
    store = CheckpointStore(path.parent)
    assert store.steps() == [1]
    store.verify(path)


def test_asynchronous_save_error_is_raised_later(tmp_path):
    one = session(tmp_path, "checkpoint.async_save=true")
    one.step = 1
    one.save(lambda folder: (folder / "x").symlink_to("/etc/hostname"), {})
    with pytest.raises(CheckpointError, match="link or special file"):
        one.wait_for_save()
    assert CheckpointStore(one.folder.checkpoints).steps() == []


def test_asynchronous_saving_leaves_the_same_checkpoints(tmp_path):
    words = ("runner.max_steps=3", "runner.save_interval=1", "checkpoint.keep=2", "runner.deterministic=true")
    runs = [
        train_toy(tmp_path, *words, f"checkpoint.async_save={value}", name=f"r-{value}") for value in ("false", "true")
    ]
    for run in runs:
        store = CheckpointStore(run / "checkpoints")
        assert store.steps() == [2, 3]
        store.verify(store.path(3))
    assert comparable(runs[0]) == comparable(runs[1])
    assert weights(runs[0], 2) == weights(runs[1], 2)
    assert weights(runs[0], 3) == weights(runs[1], 3)


def test_restart_count_continues_after_resume(tmp_path):
    run = train_toy(tmp_path, "runner.max_steps=1")
    row = rows(run)[0] | {"env/restarts": 4.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    resume_toy(run, "runner.max_steps=2")
    assert rows(run)[1]["env/restarts"] == 4.0


def test_keep_best_keeps_the_best_checkpoint(tmp_path):
    for keep, steps in (("true", [1, 3]), ("false", [3])):
        words = ("checkpoint.keep=1", "runner.save_interval=1", "runner.val_check_interval=1")
        one = session(tmp_path / keep, *words, f"checkpoint.keep_best={keep}")
        for score in (9.0, 1.0, 2.0):
            one.step += 1
            one.record_score(score)
            one.save(fill, {})
        assert CheckpointStore(one.folder.checkpoints).steps() == steps


def test_late_checkpoints_are_saved_between_the_intervals_and_replaced(tmp_path, monkeypatch):
    """Every step is late, as if it took five minutes."""
    monkeypatch.setattr(session_module, "SAVE_EVERY_S", 0.0)
    store, steps = CheckpointStore(tmp_path / "run" / "checkpoints"), list[list[int]]()

    def kill_copy(step: int, metrics: object) -> None:
        steps.append(store.steps())
        if step == 3:
            shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=shutil.ignore_patterns("lock"))

    words = ("runner.max_steps=6", "runner.save_interval=3", "checkpoint.keep=2", "runner.deterministic=true")
    train(toy_config(tmp_path, *words), on_step=kill_copy)
    assert steps == [[], [1], [2], [3], [3, 4], [3, 5]]
    assert store.steps() == [3, 6]
    killed = resume_toy(tmp_path / "killed")
    assert weights(killed, 6) == weights(tmp_path / "run", 6)


def test_only_the_last_step_is_saved_with_interval_minus_1(tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "SAVE_EVERY_S", 0.0)
    steps: list[int] = []
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    cfg = toy_config(tmp_path, "runner.save_interval=-1")
    train(cfg, on_step=lambda step, metrics: steps.extend(store.steps()))
    assert (steps, store.steps()) == ([], [2])
