"""Error messages for dead workers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embodyrl.cluster import supervisor
from embodyrl.cluster.inline import InlineLauncher
from embodyrl.cluster.protocol import FaultSettings, WorkerDied
from embodyrl.cluster.supervisor import _worker_error
from embodyrl.errors import WorkerError
from embodyrl.workers.lifecycle import WorkerSpec


@pytest.mark.parametrize(("code", "shown"), [(1, True), (6, False)], ids=["bug", "error with a cause"])
def test_traceback_is_shown_only_for_unknown_causes(code: int, shown: bool):
    died = WorkerDied(reason="raised x", log="policy.log", traceback="Traceback ...", exit_code=code)
    error = _worker_error("worker policy raised x. Log: policy.log", died)
    assert ("Traceback" in str(error)) == shown
    assert "Log: policy.log" in str(error)
    assert error.exit_code == (4 if shown else code)


def test_restart_delay_increases_with_each_restart(monkeypatch: pytest.MonkeyPatch):
    """Delays are 0.5, 1, 2 ... s, at most 8; after the maximum number of restarts the run ends."""
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: 100.0))
    said: list[str] = []
    faults = FaultSettings(max_restarts_per_worker=7)
    launcher = InlineLauncher(Path())
    unused: Any = None
    one = supervisor.Supervisor(launcher, faults, said.append)
    one._specs["env_0"] = WorkerSpec(name="env_0", entry="", init=unused, component="env")
    delays = []
    for _ in range(7):
        one._on_worker_death("env_0", WorkerDied(reason="died", log="env_0.log"))
        delays.append(one._restart_at["env_0"] - 100.0)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert one.restarts == len(said) == 7
    with pytest.raises(WorkerError, match=r"it was restarted 7 times already"):
        one._on_worker_death("env_0", WorkerDied(reason="died", log="env_0.log"))
    launcher.stop()


def test_repeated_error_after_restart_ends_the_run():
    unused: Any = None
    said: list[str] = []
    launcher = InlineLauncher(Path())
    one = supervisor.Supervisor(launcher, FaultSettings(max_restarts_per_worker=7), said.append)
    one._specs["env_0"] = WorkerSpec(name="env_0", entry="", init=unused, component="env")
    for step in (3, 4):
        one._on_worker_death("env_0", WorkerDied(reason=f"raised x, step {step}", log="", traceback="Traceback"))
    with pytest.raises(WorkerError, match="after its last restart it failed in the same step again"):
        one._on_worker_death("env_0", WorkerDied(reason="raised x, step 4", log="", traceback="Traceback"))
    assert len(said) == 2
    launcher.stop()


@pytest.mark.parametrize(
    ("component", "raised", "restarts"),
    [("env", True, True), ("rollout", False, True), ("rollout", True, False), ("actor", False, False)],
)
def test_only_workers_without_training_state_restart(component: str, raised: bool, restarts: bool):
    unused: Any = None
    one = supervisor.Supervisor(InlineLauncher(Path()), FaultSettings(), lambda line: None)
    one._specs["a"] = WorkerSpec(name="a", entry="", init=unused, component=component)
    died = WorkerDied(reason="died", log="", raised=raised)
    if restarts:
        one._on_worker_death("a", died)
        assert one.starting == {"a"}
    else:
        with pytest.raises(WorkerError, match="worker a died"):
            one._on_worker_death("a", died)
