"""Loggers for the tracking services W&B, SwanLab, MLflow and Trackio; packages are imported at run start."""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from embodyrl.monitor.protocol import Monitor, RunInfo


class HostedMonitor(Monitor, ABC):
    """Base class of loggers that send metrics and settings to a tracking service.

    Subclasses implement `_start`, which starts the run of the service.
    """

    requires: ClassVar[str]
    """Name of the Python package of the service."""

    _run: Any = None

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Start or resume the run of the tracking service (see `Monitor.open`)."""
        file = run_dir / "config.yaml"
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._run = self._start(importlib.import_module(self.requires), run_dir, info, settings)

    @abstractmethod
    def _start(self, package: Any, run_dir: Path, info: RunInfo, settings: dict[str, Any]) -> Any:
        """Start a run of the service, or resume the run if the service supports it; return the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step (see `Monitor.log`)."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run of the tracking service (see `Monitor.close`)."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class WandbMonitor(HostedMonitor):
    """Logger for Weights & Biases, with videos; offline mode (or WANDB_MODE=offline) writes to the run folder."""

    requires = "wandb"

    def _start(self, package: Any, run_dir: Path, info: RunInfo, settings: dict[str, Any]) -> Any:
        self._video = package.Video
        return package.init(
            project=info.project,
            id=info.run_id,
            name=info.run_id,
            dir=str(run_dir),
            config=settings,
            mode="offline" if info.offline else None,
            resume="allow" if info.resume_step else None,
            settings=package.Settings(console="off"),
        )

    def video(self, step: int, path: Path) -> None:
        """Upload a video (see `Monitor.video`)."""
        self._run.log({f"video/{path.stem}": self._video(str(path), format="mp4")}, step=step)


class SwanlabMonitor(HostedMonitor):
    """Logger for SwanLab; offline mode writes to the run folder."""

    requires = "swanlab"

    def _start(self, package: Any, run_dir: Path, info: RunInfo, settings: dict[str, Any]) -> Any:
        folder = run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        mode = "offline" if info.offline else None
        return package.init(project=info.project, name=info.run_id, log_dir=str(folder), config=settings, mode=mode)


class TrackioMonitor(HostedMonitor):
    """Logger for Trackio, a local dashboard (`trackio show`); TRACKIO_DIR sets its data folder."""

    requires = "trackio"

    def _start(self, package: Any, run_dir: Path, info: RunInfo, settings: dict[str, Any]) -> Any:
        return package.init(
            project=info.project,
            name=info.run_id,
            config=settings,
            resume="allow" if info.resume_step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


class MlflowMonitor(HostedMonitor):
    """Logger for MLflow, with videos as artifacts; without MLFLOW_TRACKING_URI, files are in the run folder."""

    requires = "mlflow"

    def _start(self, package: Any, run_dir: Path, info: RunInfo, settings: dict[str, Any]) -> Any:
        # MLflow's default retries would block a training step for several minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        server = None if info.offline else os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = package.MlflowClient(tracking_uri=server or (run_dir / "mlflow").absolute().as_uri())
        experiment = client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else client.create_experiment(info.project)
        self._id = client.create_run(number, run_name=info.run_id).info.run_id
        for section, values in settings.items():
            client.log_param(self._id, section, str(values)[:6000])
        return client

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step (see `Monitor.log`)."""
        for name, value in metrics.items():
            self._run.log_metric(self._id, name, value, step=step, synchronous=True)

    def video(self, step: int, path: Path) -> None:
        """Upload a video (see `Monitor.video`)."""
        self._run.log_artifact(self._id, str(path), "videos")

    def close(self) -> None:
        """Finish the run of the tracking service (see `Monitor.close`)."""
        if self._run is not None:
            self._run.set_terminated(self._id)
            self._run = None
