"""MLflow: the server of MLFLOW_TRACKING_URI; without one, or with `runner.logger.offline`, files in the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from embodyrl.monitor.hosted import HostedMonitor, settings_of
from embodyrl.monitor.protocol import RunInfo

_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""MLflow's own defaults would hold a training step for several minutes."""


class MlflowMonitor(HostedMonitor):
    """Scalars, settings, and recordings as artifacts."""

    requires = "mlflow"

    def open(self, run_dir: Path, info: RunInfo) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        server = None if info.offline else os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = self._package.MlflowClient(tracking_uri=server or (run_dir / "mlflow").absolute().as_uri())
        experiment = client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else client.create_experiment(info.project)
        self._run = client
        self._id = client.create_run(number, run_name=info.run_id).info.run_id
        for section, values in settings_of(run_dir).items():
            client.log_param(self._id, section, str(values)[:6000])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._run.log_metric(self._id, name, value, step=step, synchronous=True)

    def video(self, step: int, path: Path) -> None:
        self._run.log_artifact(self._id, str(path), "videos")

    def close(self) -> None:
        if self._run is not None:
            self._run.set_terminated(self._id)
            self._run = None
