"""Trackio, a local dashboard (`trackio show`); its data lie where TRACKIO_DIR says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from embodyrl.monitor.hosted import HostedMonitor, resumes, settings_of
from embodyrl.monitor.protocol import RunInfo


class TrackioMonitor(HostedMonitor):
    """Scalars."""

    requires = "trackio"

    def open(self, run_dir: Path, info: RunInfo) -> None:
        self._run = self._package.init(
            project=info.project,
            name=info.run_id,
            config=settings_of(run_dir),
            resume="allow" if resumes(info) else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
