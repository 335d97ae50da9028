"""Env workers that die, hang, raise or lie, in real processes: named, restarted and counted."""

from __future__ import annotations

import pytest
from processes import run_cli
from toy_runs import rows, toy_words

from embodyrl.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.integration


def run_with_fault(tmp_path, *fault, workers=2):
    kwargs = [f"env.kwargs.{setting}" for setting in fault]
    words = toy_words(tmp_path, *kwargs, f"launcher.env_workers={workers}", "algorithm.rollout_epoch=2")
    done = run_cli("train", *words, cwd=tmp_path)
    return done, tmp_path / "run"


def test_one_crash_is_named_restarted_and_counted(tmp_path):
    done, run = run_with_fault(tmp_path, "fault=kill", "at=3", f"once={tmp_path}/marker")
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    line = next(line for line in printed.splitlines() if "restarting" in line)
    assert "worker env_" in line
    assert "died with SIGKILL" in line
    assert "Traceback" not in printed
    first, second = rows(run)
    assert (first["env/restarts"], second["env/restarts"]) == (1, 1)
    assert second["env/dropped_episodes"] == 0
    # A dead worker takes at most the episodes in its own two slots with it, and what it took is counted.
    assert 1 <= first["env/dropped_episodes"] <= 2
    assert first["train/episodes"] + first["env/dropped_episodes"] == 8
    assert second["train/episodes"] == 8
    CheckpointStore(run / "checkpoints").verify(run / "checkpoints" / "step_000002")


def test_a_worker_that_always_crashes_ends_the_run_with_exit_4(tmp_path):
    words = toy_words(tmp_path, "env.kwargs.fault=raise", "faults.max_restarts_per_worker=1", "launcher.env_workers=1")
    done = run_cli("train", *words, "algorithm.rollout_epoch=4", cwd=tmp_path)
    assert done.returncode == 4
    assert "worker env_0 raised RuntimeError: the toy broke [env 'toy', slot 0, task 0 ('go right')" in done.stderr
    assert "it was restarted 1 times already" in done.stderr
    assert "faults.max_restarts_per_worker" in done.stderr
    assert "env_0.log" in done.stderr
    assert not (tmp_path / "run" / "lock").exists()


def test_a_worker_that_cannot_start_ends_the_run_at_once(tmp_path):
    done, _ = run_with_fault(tmp_path, "fault=raise", "where=init", workers=1)
    assert done.returncode == 4
    assert "worker env_0 raised RuntimeError: the toy broke" in done.stderr
    assert "restart" not in done.stdout


def test_a_step_that_loses_all_its_episodes_changes_nothing_and_goes_on(tmp_path):
    """All four episodes run in the one worker that dies; there is nothing to learn from, and a next step."""
    words = toy_words(tmp_path, "env.kwargs.fault=kill", "env.kwargs.at=3", f"env.kwargs.once={tmp_path}/marker")
    words += ["rollout.pipeline_stage_num=1", "launcher.env_workers=1", "runner.save_interval=1"]
    done = run_cli("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = rows(tmp_path / "run")
    assert (first["train/episodes"], first["env/dropped_episodes"], first["env/restarts"]) == (0, 4, 1)
    assert first["actor/optimizer_steps"] == 0
    assert (second["train/episodes"], second["env/dropped_episodes"]) == (4, 0)
