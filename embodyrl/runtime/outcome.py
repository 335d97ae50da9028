"""What a training changed: first against last validation, as a table and as recordings side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from embodyrl.monitor import Rate, TaskResult
from embodyrl.monitor.side_by_side import join_side_by_side
from embodyrl.runtime.evaluation import EvalResult


def changes(first: EvalResult, last: EvalResult) -> list[TaskResult]:
    """Successes and episodes per task, before and after; both validations ran the same episodes."""
    before = {row.task_id: row for row in first.tasks}
    return [
        TaskResult(
            task=row.task,
            first=Rate(before[row.task_id].successes, before[row.task_id].episodes),
            last=Rate(row.successes, row.episodes),
        )
        for row in last.tasks
        if row.task_id in before
    ]


def compare_recordings(
    first: EvalResult, last: EvalResult, folder: Path, *, steps: tuple[int, int], fps: int, warn: Callable[[str], None]
) -> list[Path]:
    """Join the recordings of episodes that both validations kept; a failure to do so is only reported."""
    before = dict(first.recordings)
    joined: list[Path] = []
    for episode, path in last.recordings:
        if episode not in before:
            continue
        out = folder / f"before_after_ep{episode:03d}.mp4"
        labels = (f"before (step {steps[0]})", f"after (step {steps[1]})")
        try:
            join_side_by_side(Path(before[episode]), Path(path), out, labels=labels, fps=fps)
        except (OSError, RuntimeError, ValueError) as error:
            warn(f"could not join the recordings of episode {episode}: {error}")
            continue
        joined.append(out)
    return joined
