"""SwanLab; with `runner.logger.offline` it writes below the run folder only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from embodyrl.monitor.hosted import HostedMonitor, settings_of
from embodyrl.monitor.protocol import RunInfo


class SwanlabMonitor(HostedMonitor):
    """Scalars."""

    requires = "swanlab"

    def open(self, run_dir: Path, info: RunInfo) -> None:
        folder = run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = self._package.init(
            project=info.project,
            name=info.run_id,
            log_dir=str(folder),
            config=settings_of(run_dir),
            mode="offline" if info.offline else None,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
