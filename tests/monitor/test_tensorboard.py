import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embodyrl.monitor.protocol import RunInfo
from embodyrl.monitor.tensorboard import TensorboardMonitor


def logged(run_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(name)]


def run(run_dir: Path, values: dict[int, float], resume_step: int | None = None) -> None:
    monitor = TensorboardMonitor()
    monitor.open(run_dir, RunInfo(run_id="r", resume_step=resume_step))
    for step, value in values.items():
        monitor.log(step, {"actor/loss": value})
    monitor.close()
    monitor.close()


def test_resume_replaces_later_tensorboard_steps(tmp_path: Path):
    run(tmp_path, {0: 1.0, 1: 2.0, 2: 3.0})
    run(tmp_path, {1: 20.0, 2: 30.0}, resume_step=1)
    assert logged(tmp_path, "actor/loss") == [(0, 1.0), (1, 20.0), (2, 30.0)]


def test_non_finite_values_do_not_raise(tmp_path: Path):
    run(tmp_path, {0: math.nan})
    assert math.isnan(logged(tmp_path, "actor/loss")[0][1])


@pytest.mark.integration
def test_tensorboard_logger_does_not_import_torch(tmp_path: Path):
    code = (
        "import pathlib, sys, embodyrl.monitor.group as m; from embodyrl.monitor.tensorboard import *;"
        "m.build_monitor(['console', 'jsonl', 'tensorboard']); events = TensorboardMonitor();"
        "events.open(pathlib.Path(sys.argv[1]), RunInfo(run_id='r', resume_step=1));"
        "events.log(1, {'actor/loss': 1.0}); events.close();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == 0
    assert logged(tmp_path, "actor/loss") == [(1, 1.0)]
