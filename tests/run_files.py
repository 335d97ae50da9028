"""Run folders written without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import imageio.v2
import numpy as np

from embodyrl.monitor.history import EpisodeRow
from embodyrl.plan.config import load_config
from embodyrl.plan.saved import save_config

TASKS = ("open the drawer", "close the <drawer>")


def write_video(path: Path) -> Path:
    """Write a video of one second with changing 64 x 48 frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = [np.full((48, 64, 3), 8 * k, np.uint8) for k in range(20)]
    imageio.v2.mimsave(path, frames, fps=20, macro_block_size=2)
    return path


def write_evaluation(
    run: Path,
    step: int,
    outcomes: Sequence[bool | None],
    *,
    videos: int = 0,
    tasks: tuple[str, str] = TASKS,
    finished: bool = True,
) -> None:
    """Write an evaluation; episodes alternate between the tasks; episode k has initial state k and seed 1000 + k."""
    folder = run / "eval" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    rows = []
    for k, success in enumerate(outcomes):
        place = run.parent.parent / "videos" / run.name / f"step{step:06d}_ep{k:03d}.mp4"
        row = EpisodeRow(
            episode=k,
            task_id=k % 2,
            task=tasks[k % 2],
            reset_id=k,
            seed=1000 + k,
            success_once=success,
            success_at_end=success,
            episode_return=-9.0 if success is None else float(success),
            steps=10 + k,
            terminated=bool(success),
            truncated=not success,
            seconds=0.5,
            video=f"videos/{run.name}/{write_video(place).name}" if k < videos else None,
        )
        rows.append(json.dumps(row.to_json()))
    (folder / "episodes.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    if finished:
        (folder / "eval.json").write_text("{}")


def write_run(folder: Path, *overrides: str, steps: int = 3, videos: int = 0) -> Path:
    """Write a run of `steps` steps with evaluations before (1 of 6 succeed) and after (4 of 6)."""
    folder.mkdir(parents=True)
    save_config(load_config("train", ["env=tabletop", f"runner.max_steps={steps}", *overrides]), folder / "config.yaml")
    rows = [{"step": 0, "eval/success_once": 1 / 6, "eval/episodes": 6.0}]
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "train/episodes": 8.0,
            "train/success_once": 0.25,
            "actor/loss": 1.0 / step,
            "env/steps": 100.0,
            "env/restarts": 1.0,
            "time/step": 10.0,
            "time/rollout": 6.0,
            "time/simulate": 4.0,
            "time/infer": 5.0,
            "time/update": 3.0,
        }
        rows.append(row)
    rows[-1] |= {"eval/success_once": 4 / 6, "eval/episodes": 6.0, "time/validate": 5.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "tra')
    (folder / "overrides.txt").write_text("# attempt 1: train env=tabletop\n")
    (folder / "env.txt").write_text("python 3.11\ncores 2\n")
    logs = folder / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    (logs / "env_0.log").write_text("started\nTraceback (most recent call last):\nValueError: a <bad> day\n")
    (folder / "logs" / "events.log").write_text(
        "12:00:00 env worker 0 died: SIGSEGV; restarted\n12:00:01 all is well\n"
    )
    write_evaluation(folder, 0, [True, False, False, False, False, False], videos=videos)
    write_evaluation(folder, steps, [False, True, True, True, True, False], videos=videos)
    return folder
