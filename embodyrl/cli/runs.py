"""What the runs in an output folder tell about themselves, read from their files only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from embodyrl.errors import ConfigError
from embodyrl.monitor.history import read_rows
from embodyrl.registry import closest


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run folder."""

    id: str
    path: str
    started: str
    """Local time, minutes."""
    step: int | None
    """Last logged training step; None before the first."""
    success: float | None
    """Newest success rate of a validation, 0 to 1."""


def list_runs(output_dir: Path) -> list[Run]:
    """Return the runs below a folder, newest first."""
    folders = sorted(_run_folders(output_dir), key=_started, reverse=True)
    return [_read(folder) for folder in folders]


def newest_run(output_dir: Path, experiment_name: str) -> Path | None:
    """Return the newest training run of an experiment, or None if there is none."""
    for folder in sorted(_run_folders(output_dir), key=_started, reverse=True):
        saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        # An evaluation leaves a run folder too, but nothing to go on from.
        if saved["runner"]["experiment_name"] == experiment_name and (folder / "checkpoints").is_dir():
            return folder
    return None


def find_run(word: str) -> Path:
    """Return the run folder that a word on the command line names.

    Raises:
        ConfigError: there is none.
    """
    for path in (Path(word), Path("runs") / word):
        if (path / "config.yaml").is_file():
            return path
    known = [path.parent.name for path in Path("runs").glob("*/config.yaml")]
    raise ConfigError(f"'{word}' is no run: no config.yaml there.{closest(Path(word).name, known)}")


def _run_folders(output_dir: Path) -> list[Path]:
    return [file.parent for file in output_dir.glob("*/config.yaml")]


def _started(folder: Path) -> float:
    return (folder / "config.yaml").stat().st_mtime


def _read(folder: Path) -> Run:
    step, success = None, None
    for row in read_rows(folder / "metrics.jsonl"):
        step, success = row.get("step", step), row.get("eval/success_once", success)
    started = datetime.fromtimestamp(_started(folder)).strftime("%Y-%m-%d %H:%M")
    return Run(id=folder.name, path=str(folder), started=started, step=step, success=success)
