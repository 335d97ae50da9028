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
    monitor.open(run_dir, RunInfo(run_id="r", resume_step=resume_step, summary={"env": "tabletop"}))
    for step, value in values.items():
        monitor.log(step, {"actor/loss": value})
    monitor.close()
    monitor.close()


def test_scalars_survive_and_resume_replaces_later_steps(tmp_path: Path):
    run(tmp_path, {0: 1.0, 1: 2.0, 2: 3.0})
    run(tmp_path, {1: 20.0, 2: 30.0}, resume_step=1)
    assert logged(tmp_path, "actor/loss") == [(0, 1.0), (1, 20.0), (2, 30.0)]


@pytest.mark.filterwarnings("ignore:NaN or Inf found")
def test_non_finite_values_do_not_raise(tmp_path: Path):
    run(tmp_path, {0: math.nan})
    assert math.isnan(logged(tmp_path, "actor/loss")[0][1])


def test_importing_the_monitors_needs_no_torch():
    code = (
        "import sys, embodyrl.monitor.fanout as m; m.build_monitor(['console', 'jsonl', 'tensorboard']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
