"""Loggers of hosted services, offline, with the real packages if installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.errors import ConfigError
from embodyrl.monitor import MONITORS
from embodyrl.monitor.group import MonitorGroup, build_monitor, find_logger_problems
from embodyrl.monitor.jsonl import JsonlMonitor
from embodyrl.monitor.protocol import RunInfo

HOSTED = {"wandb": "offline-run-*", "swanlab": "*", "mlflow": "*", "trackio": "*.db"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a run folder, with the folders of all services below it."""
    for name in ("HOME", "TRACKIO_DIR", "WANDB_DIR", "WANDB_CACHE_DIR", "SWANLAB_SAVE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
        (tmp_path / name.lower()).mkdir()
    folder = tmp_path / "my_run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 3\nrunner: {max_steps: 4}\n")
    return folder


@pytest.mark.parametrize("name", HOSTED)
def test_missing_logger_package_is_reported_before_the_start(name: str) -> None:
    problems = find_logger_problems(["console", name])
    if importlib.util.find_spec(name) is None:
        assert problems == [
            f"runner.logger.backends: '{name}' needs a package that is not installed. Run `pip install {name}`, "
            f"or remove '{name}' from the list."
        ]
    else:
        assert problems == []


def test_unknown_logger_error_suggests_a_name() -> None:
    (problem,) = find_logger_problems(["jsonl", "wandbb"])
    assert "Did you mean 'wandb'?" in problem


@pytest.mark.integration
def test_configuring_a_logger_does_not_import_its_package() -> None:
    code = "import sys; from embodyrl.monitor.group import MONITORS, find_logger_problems as m; m(MONITORS.names()); "
    code += f"print([n for n in {list(HOSTED)} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.integration
@pytest.mark.parametrize("name", HOSTED)
def test_run_is_logged_offline(name: str, run: Path) -> None:
    pytest.importorskip(name)
    monitor = build_monitor([name])
    monitor.open(run, RunInfo(run_id="my_run", project="tests", offline=True, total_steps=2))
    for step in (1, 2):
        monitor.log(step, {"train/return": step / 4, "actor/loss": 0.5})
    monitor.text("a line")
    assert [*monitor.monitors] == [name]
    monitor.close()
    written = [p for p in run.parent.rglob(HOSTED[name]) if p != run and p.name != "config.yaml"]
    assert written
    if name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=(run / "mlflow").as_uri())
        experiment = client.get_experiment_by_name("tests")
        (entry,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(entry.info.run_id, "train/return")
        assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
        assert entry.data.params["seed"] == "3"
        assert entry.info.status == "FINISHED"


@pytest.mark.integration
def test_failing_logging_service_does_not_stop_the_run(run: Path) -> None:
    pytest.importorskip("mlflow")
    monitor = MonitorGroup({"mlflow": MONITORS.get("mlflow")(), "jsonl": JsonlMonitor()})
    monitor.open(run, RunInfo(run_id="my_run", offline=True))
    monitor.log(1, {"x": 1.0})
    shutil.rmtree(run / "mlflow")
    monitor.log(2, {"x": 2.0})
    assert [*monitor.monitors] == ["jsonl"]
    monitor.log(3, {"x": 3.0})
    monitor.close()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert "logger 'mlflow' failed and was dropped" in (run / "logs" / "events.log").read_text()


@pytest.mark.integration
def test_unreachable_logging_server_is_reported_at_the_start(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match="'mlflow' cannot start"):
        build_monitor(["mlflow"]).open(run, RunInfo(run_id="my_run"))
