"""Training runs on the toy environment with a small convolutional policy, or with the tiny OpenVLA-OFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.commands.train import train
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.scheduler.start import RolloutWorkers, start_workers

TOY_CNN = (
    *("model=random", "model.model_type=cnn", "model.precision=fp32", "eval.sampling_params.do_sample=false"),
    *("model.normalize_state=false", "model.ortho_init=false"),
)
"""A small convolutional policy with the default hyperparameters."""
TOY_OFT = ("model=openvla_oft_tiny", "model.num_images_in_input=1", "model.use_proprio=false")
"""Overrides for the tiny OpenVLA-OFT."""
TOY = (
    "env=gym",
    "env.env_type=toy_env:FACTORY",
    "env.train.state_ids=null",
    "env.eval.state_ids=null",
    "env.use_rel_reward=true",
    "env.train.max_steps_per_rollout_epoch=null",
    "env.train.max_episode_steps=8",
    "env.train.total_num_envs=4",
    "env.eval.max_episode_steps=8",
    "env.eval.total_num_envs=2",
    "algorithm.group_size=2",
    *TOY_CNN,
    "model.num_action_chunks=4",
    "actor.global_batch_size=8",
    "runner.max_steps=2",
)
"""Steps of four episodes with at most two chunks: a whole inline run takes a fifth of a second."""
FOR_TRAINING = ("env.train.", "algorithm.", "actor.", "runner.max_steps=")
TOY_EVAL = tuple(word for word in TOY if not word.startswith(FOR_TRAINING))
"""The arguments that `embodyrl eval` accepts."""
TOY_COLLECT = tuple(word for word in TOY if word.startswith("env.") and not word.startswith("env.eval."))
"""The arguments that `embodyrl collect` accepts."""


def toy_words(folder: Path, *overrides: str, command: str = "train", name: str = "run") -> list[str]:
    """Return the overrides of a run in <folder>/<name>; videos go to <folder>/videos/<name>. "~key=" omits a key."""
    places = [f"runner.output_dir={folder}", f"runner.experiment_name={name}"]
    if any(word.startswith("video=") and word != "video=none" for word in overrides):
        places.append(f"video_cfg.base_dir={folder}/videos")
    dropped = tuple(word[1:] for word in overrides if word.startswith("~"))
    base = [*(TOY_EVAL if command == "eval" else TOY), *places]
    if any(word.startswith("model=") for word in overrides):
        base = [word for word in base if word not in TOY_CNN]
    return [word for word in (*base, *overrides) if not word.startswith(("~", *dropped))]


def toy_config(folder: Path, *overrides: str, command: str = "train", name: str = "run") -> Any:
    """Config of an inline run that logs to files only."""
    quiet = ("launcher=inline", "runner.logger.backends=[jsonl]")
    cfg = load_config(command, toy_words(folder, *quiet, *overrides, command=command, name=name))
    check_components(cfg)
    return cfg


def train_toy(folder: Path, *overrides: str, name: str = "run") -> Path:
    """Train in this process; return the run folder."""
    return train(toy_config(folder, *overrides, name=name)).run


def resume_toy(run: Path, *overrides: str) -> Path:
    """Resume a run in this process."""
    return train(load_saved_config(run, ["trust=true", *overrides]), resume=run).run


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def comparable(run: Path) -> list[dict[str, Any]]:
    """Return the rows without clock-dependent values."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(run)]


def weights(run: Path, step: int) -> dict[str, bytes]:
    """Return the policy's weight files of a checkpoint."""
    folder = run / "checkpoints" / f"step_{step:06d}" / "policy"
    files = {p.name: p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}
    assert files, f"no weights in {folder}"
    return files


@dataclass(frozen=True)
class Stage:
    """Workers that wait for rollouts, without a run folder or a loop."""

    run_plan: RunPlan
    workers: RolloutWorkers
    said: list[str]
    """Messages of the supervisor for the user."""


@contextmanager
def running_crew(folder: Path, *overrides: str, cfg: Config | None = None) -> Iterator[Stage]:
    """Start the workers of a config, inline by default, and stop them at the end."""
    run_plan = build_run_plan(cfg or toy_config(folder, *overrides), training=True)
    said: list[str] = []
    workers = start_workers(run_plan, folder, said.append)
    try:
        yield Stage(run_plan, workers, said)
    finally:
        workers.close()
