"""Whole runs with a policy process on a CUDA device."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from processes import run_cli
from text_runs import SMALL
from toy_runs import comparable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SHORT = (
    "runner.max_steps=2",
    "runner.val_check_interval=-1",
    "runner.output_dir=runs",
    "runner.logger.backends=[jsonl]",
)
GYM = ("env=gym", "model=mlp", "env.train.total_num_envs=8")
RUNS = {
    "OpenVLA-OFT": (),
    "OpenVLA-OFT, bf16, CUDA graphs": ("model.precision=bf16", "model.cuda_graphs=true"),
    "OpenVLA-OFT, adapters": ("model.is_lora=true", "model.lora.r=4"),
    "recomputed log-probabilities": ("algorithm.old_logprob=recompute", "actor.gradient_checkpointing=true"),
    "flow": ("model=flow_small",),
    "pi0.5": ("model=pi05_tiny", "env.train.total_num_envs=16", "actor.micro_batch_size=16"),
    "PPO": (*GYM, "env.id=CartPole-v1", "algorithm=ppo"),
    "SAC": (*GYM, "env.id=Pendulum-v1", "algorithm=sac"),
    "text": ("env=text/copy", "model=causal_lm_tiny", *SMALL),
}


def train(folder: Path, *words: str, gpu: bool = True) -> list[dict[str, float]]:
    """Run `embodyrl train` in `folder` and return the rows of metrics."""
    done = run_cli("train", *words, cwd=folder, env={} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs").iterdir()
    assert ("gpu 0" in (run / "env.txt").read_text().splitlines()) == gpu
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_two_steps_train_on_the_gpu(tmp_path: Path, words: tuple[str, ...]) -> None:
    found = train(tmp_path, *SHORT, *words)
    assert [row["step"] for row in found] == [1, 2]
    for row in found:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row.get("actor/logprob_gap", 0.0) < 0.02
        assert row.get("actor/skipped_nonfinite", 0.0) == 0


def test_run_that_began_on_a_cpu_continues_on_the_gpu(tmp_path: Path) -> None:
    train(tmp_path, *SHORT, gpu=False)
    (run,) = (tmp_path / "runs").iterdir()
    done = run_cli("train", "--resume", str(run), "runner.max_steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_deterministic_runs_are_equal_on_one_gpu(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train(tmp_path / name, *SHORT, "runner.deterministic=true", "launcher.env_workers=1")
        runs += (tmp_path / name / "runs").iterdir()
    assert comparable(runs[0]) == comparable(runs[1])
