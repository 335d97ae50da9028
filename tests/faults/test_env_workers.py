"""Env workers that die, hang, respond slowly or print too much: real processes and exact counters."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from mixed_launcher import mixed_config
from processes import workers_of
from toy_runs import Stage, rows, running_crew

from embodyrl.channels.layout import Record
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.commands.train import train
from embodyrl.errors import WorkerError
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.rollout import Rollout, RolloutResult

ECHO = ("env.kwargs.echo=true", "env.use_rel_reward=false", "algorithm.rollout_epoch=8", "launcher.env_workers=2")


def fault(folder: Path, *settings: str) -> list[str]:
    """Return a fault that one worker has once."""
    return [f"env.kwargs.{s}" for s in (*settings, f"once={folder}/marker")]


def collect(stage: Stage) -> RolloutResult:
    plan = train_episodes(stage.run_plan.cfg, stage.run_plan.env, 0, counts_chunk_steps=False)
    return stage.workers.scheduler.collect(Rollout(plan))


def collect_with(folder: Path, *words: str) -> tuple[Sequence[str], int]:
    """Run a rollout of an echo environment; actions must match their rewards, and all records must be freed."""
    with running_crew(folder, cfg=mixed_config(folder, *ECHO, *words)) as stage:
        rollout = collect(stage)
        assert [e.spec.episode_id for e in rollout.episodes] == list(range(32)), "what was lost is played again"
        assert rollout.dropped == 0
        for e in rollout.episodes:
            np.testing.assert_array_equal(e.reward, stage.workers.arena[Record.action][e.records][..., 0])
        stage.workers.scheduler.release(rollout)
        assert stage.workers.arena.num_free == stage.workers.arena.capacity
        return stage.said, stage.workers.supervisor.restarts


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "where", "said"),
    [
        ("segv", "step", "died with SIGSEGV"),
        ("exit", "step", "exited with code 7"),
        ("kill", "observe", "died with SIGKILL"),
        ("kill", "reset", "died with SIGKILL"),
        ("raise", "step", ", task 0 ('go right'), initial state"),
        ("nonfinite", "step", "reward nan"),
        ("nonfinite", "observe", "state [nan]; expected finite numbers"),
    ],
)
def test_crash_keeps_rewards_aligned_with_actions(tmp_path, kind, where, said):
    words = fault(tmp_path, f"fault={kind}", f"where={where}", "at=6")
    lines, restarts = collect_with(tmp_path, *words)
    assert restarts == 1
    assert len(lines) == 1
    assert "worker env_" in lines[0]
    assert said in lines[0]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("hang", "step"),
        pytest.param("hang", "reset", marks=pytest.mark.slow),
        pytest.param("hang", "observe", marks=pytest.mark.slow),
        ("spin", "step"),
    ],
)
def test_hanging_worker_is_killed_with_a_stack_dump(tmp_path, kind, where):
    """`spin` never releases the interpreter lock: no Python code of the worker can run."""
    words = fault(tmp_path, f"fault={kind}", f"where={where}", "at=3")
    lines, restarts = collect_with(tmp_path, *words, "faults.step_timeout_s=1")
    assert restarts == 1
    assert "did not respond for" in lines[0]
    logs = "".join(p.read_text() for p in tmp_path.glob("env_*.log"))
    assert "_maybe_misbehave" in logs


@pytest.mark.integration
def test_hanging_worker_start_times_out(tmp_path):
    words = ("env.kwargs.fault=hang", "env.kwargs.where=init", "faults.start_timeout_s=4", "launcher.env_workers=1")
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"env_0 did not respond for 4 s"):  # noqa: SIM117
        with running_crew(tmp_path, cfg=mixed_config(tmp_path, *words)):
            pass
    assert time.monotonic() - started < 60


@pytest.mark.integration
def test_slow_worker_within_the_deadline_is_accepted(tmp_path):
    """Every step takes 50 ms; no worker is restarted, no episode is lost, and the wait is reported."""
    words = ("env.kwargs.fault=slow", "algorithm.rollout_epoch=1", "launcher.env_workers=2")
    with running_crew(tmp_path, cfg=mixed_config(tmp_path, *words)) as stage:
        rollout = collect(stage)
        assert (rollout.dropped, len(rollout.episodes), stage.workers.supervisor.restarts) == (0, 4, 0)
        assert rollout.stats.sim_s >= 0.05 * rollout.stats.env_steps
        stage.workers.scheduler.release(rollout)


@pytest.mark.integration
def test_worker_output_is_capped_and_does_not_block(tmp_path):
    words = fault(tmp_path, "fault=flood", "at=3")
    _, restarts = collect_with(tmp_path, *words)
    assert restarts == 0
    logs = list(tmp_path.glob("env_*.log"))
    assert sum(p.stat().st_size for p in logs) < 20 * 2**20
    assert any(b"bytes were dropped here" in p.read_bytes()[:100] for p in logs)


@pytest.mark.integration
def test_run_that_exhausts_worker_restarts_keeps_the_last_checkpoint(tmp_path, capsys):
    words = ("env.kwargs.fault=raise", "env.kwargs.at=40", "launcher.env_workers=1", "runner.max_steps=9")
    words += ("faults.max_restarts_per_worker=1", "runner.save_interval=1")
    with pytest.raises(WorkerError, match=r"restarted 1 times already") as caught:
        train(mixed_config(tmp_path, *words))
    assert caught.value.exit_code == 4
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    latest = store.latest()
    assert latest is not None
    store.verify(latest)
    done = rows(tmp_path / "run")
    assert store.steps()[-1] == done[-1]["step"] >= 1
    assert done[-1]["env/restarts"] == 1
    assert "restarting it (1 of 1)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.integration
def test_env_workers_do_not_import_torch(tmp_path):
    """Without torch, workers cannot initialize CUDA and use less memory."""
    with running_crew(tmp_path, cfg=mixed_config(tmp_path, "launcher.env_workers=1")):
        pid = workers_of(os.getpid())["env_0"]
        maps = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" in maps
    assert "libtorch" not in maps
