"""Weights & Biases; with `runner.logger.offline` or WANDB_MODE=offline it writes below the run folder only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from embodyrl.monitor.hosted import HostedMonitor, resumes, settings_of
from embodyrl.monitor.protocol import RunInfo


class WandbMonitor(HostedMonitor):
    """Scalars and recordings."""

    requires = "wandb"

    def open(self, run_dir: Path, info: RunInfo) -> None:
        self._run = self._package.init(
            project=info.project,
            id=info.run_id,
            name=info.run_id,
            dir=str(run_dir),
            config=settings_of(run_dir),
            mode="offline" if info.offline else None,
            resume="allow" if resumes(info) else None,
            settings=self._package.Settings(console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def video(self, step: int, path: Path) -> None:
        self._run.log({f"video/{path.stem}": self._package.Video(str(path), format="mp4")}, step=step)
