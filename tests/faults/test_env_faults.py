"""Env workers that die, hang, raise or return invalid data are reported, restarted and counted."""

from __future__ import annotations

import json
import re

import pytest
from processes import SETS_PATH, run_cli
from toy_runs import resume_toy, rows, toy_config, toy_words, train_toy, weights

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.commands.train import train
from embodyrl.errors import WorkerError

pytestmark = pytest.mark.integration


def run_with_fault(tmp_path, *fault, workers=2):
    kwargs = [f"env.kwargs.{setting}" for setting in fault]
    words = toy_words(tmp_path, *kwargs, f"launcher.env_workers={workers}", "algorithm.rollout_epoch=2")
    done = run_cli("train", *words, cwd=tmp_path)
    return done, tmp_path / "run"


def test_crashes_for_the_same_reason_in_different_steps_are_restarted_and_counted(tmp_path):
    done, run = run_with_fault(tmp_path, "fault=segv", "at=[3,60]", f"once={tmp_path}/marker", workers=1)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    lines = [line for line in printed.splitlines() if "restarting" in line]
    assert [line.partition("worker env_0 ")[2][:31] for line in lines] == ["died with SIGSEGV; restarting it"[:31]] * 2
    assert "Traceback" not in printed
    assert all("its running episodes start again" in line for line in lines)
    counts = [(r["env/restarts"], r["train/episodes"], r["env/dropped_episodes"]) for r in rows(run)]
    assert counts == [(1, 8, 0), (2, 8, 0)]
    CheckpointStore(run / "checkpoints").verify(run / "checkpoints" / "step_000002")


@pytest.mark.parametrize(
    ("restarts", "said"), [(0, "it was restarted 0 times already"), (3, "failed in the same step of the same episode")]
)
def test_checkpoint_is_saved_before_env_worker_failures_end_the_run(tmp_path, restarts, said):
    """The environment raises in each first step, from the second training step on."""
    fault = ("env.kwargs.fault=raise", f"env.kwargs.after={tmp_path}/begun", "runner.max_steps=3")
    cfg = toy_config(tmp_path, *fault, f"faults.max_restarts_per_worker={restarts}", "runner.save_interval=-1")
    with pytest.raises(
        WorkerError, match=f"worker env_0 raised RuntimeError: the toy broke .env 'toy'(.|\n)*{said}"
    ) as error:
        train(cfg, on_step=lambda step, row: (tmp_path / "begun").touch())
    assert f"saved {tmp_path}/run/checkpoints/step_000001; resume with: embodyrl train" in str(error.value)
    (tmp_path / "begun").unlink()
    whole = weights(resume_toy(tmp_path / "run"), 3)
    assert whole == weights(train_toy(tmp_path, "runner.max_steps=3", name="undisturbed"), 3)


def test_hanging_inline_simulator_is_reported_and_restarted(tmp_path):
    words = toy_words(tmp_path, "env.kwargs.fault=hang", "env.kwargs.at=3", f"env.kwargs.once={tmp_path}/marker")
    done = run_cli("train", *words, "launcher=inline", "faults.step_timeout_s=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker env_0 did not respond for \d s; restarting it", " ".join(done.stdout.split()))
    assert [(row["env/restarts"], row["train/episodes"]) for row in rows(tmp_path / "run")] == [(1, 4)] * 2


def test_failed_worker_start_ends_the_run(tmp_path):
    done, _ = run_with_fault(tmp_path, "fault=raise", "where=init", workers=1)
    assert done.returncode == 4
    assert "worker env_0 raised RuntimeError: the toy broke" in done.stderr
    assert "restart" not in done.stdout


def test_episode_that_crashes_its_worker_is_dropped(tmp_path):
    """Other episodes of the worker crash with it twice; then it runs alone, so that no other episode is dropped."""
    faulty = ("env.kwargs.fault=kill", "env.kwargs.state=2", "video=all", "eval.episodes=4")
    words = toy_words(tmp_path, *faulty, command="eval")
    done = run_cli("eval", *words, "launcher.env_workers=1", "rollout.pipeline_stage_num=1", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    said = " ".join(done.stdout.split())
    assert "episode 2 (task 0, reset id 2, seed 1002) is dropped: its env worker died 3 times" in said
    result = said.partition("is dropped")[2]
    assert result.index("INCOMPLETE: 1 of 4 episodes") < result.index("95 % interval")
    folder = tmp_path / "run" / "eval" / "step_000000"
    assert json.loads((folder / "eval.json").read_text())["dropped"] == 1
    played = [json.loads(line)["episode"] for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert sorted(played) == [0, 1, 3]
    films = sorted(p.stem.partition("_ep")[2][:3] for p in (tmp_path / "videos").rglob("*"))
    assert [f for f in films if f] == ["000", "001", "003"], "one whole video each, and no half one"


def test_evaluation_that_exhausts_restarts_prints_the_resume_command(tmp_path):
    faulty = ("env.kwargs.fault=raise", "faults.max_restarts_per_worker=1")
    words = toy_words(tmp_path, *faulty, command="eval")
    done = run_cli("eval", *words, "launcher.env_workers=1", "eval.episodes=8", cwd=tmp_path)
    assert done.returncode == 4
    assert (
        "worker env_0 raised RuntimeError: the toy broke [env 'toy', environment 0, task 0 ('go right')" in done.stderr
    )
    assert "it was restarted 1 times already" in done.stderr
    assert "faults.max_restarts_per_worker" in done.stderr
    assert "env_0.log" in done.stderr
    assert not (tmp_path / "run" / "lock").exists()
    assert f"resume with: {SETS_PATH}embodyrl eval --resume {tmp_path / 'run'}" in done.stderr.splitlines()[0]
