"""Error messages for dead workers."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embodyrl.channels.messages import WorkerReady
from embodyrl.cluster import supervisor
from embodyrl.cluster.inline import InlineLauncher
from embodyrl.cluster.protocol import FaultSettings, WorkerDied
from embodyrl.cluster.supervisor import _build_worker_error
from embodyrl.errors import Interrupted, WorkerError
from embodyrl.workers.lifecycle import WorkerSpec


@pytest.mark.parametrize(("code", "shown"), [(1, True), (6, False)], ids=["bug", "error with a cause"])
def test_traceback_is_shown_only_for_unknown_causes(code: int, shown: bool):
    died = WorkerDied(reason="raised x", log="policy.log", traceback="Traceback ...", exit_code=code)
    error = _build_worker_error("worker policy raised x. Log: policy.log", died)
    assert ("Traceback" in str(error)) == shown
    assert "Log: policy.log" in str(error)
    assert error.exit_code == (4 if shown else code)


class SignallingWorker:
    """Worker whose construction creates a file, and for a policy sends Ctrl-C to this process."""

    def __init__(self, init: str) -> None:
        Path(init).touch()
        if Path(init).name == "policy":
            os.kill(os.getpid(), signal.SIGINT)

    def ready(self) -> WorkerReady:
        return WorkerReady(task_limit=None)

    def close(self) -> None:
        pass


def test_signal_during_the_start_of_a_worker_starts_no_other_worker(tmp_path: Path):
    one = supervisor.Supervisor(InlineLauncher(tmp_path), FaultSettings(), lambda line: None)
    specs: dict[str, Any] = {
        name: (WorkerSpec(name=name, entry="test_supervisor:SignallingWorker", init=str(tmp_path / name)), print)
        for name in ("policy", "env_0")
    }
    with one.handle_signals(), pytest.raises(Interrupted):
        one.start(specs)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    one.stop()


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


RAISED = WorkerDied(reason="raised x", log="", traceback="Traceback", raised=True)
SEGV = WorkerDied(reason="died with SIGSEGV", log="env_0.log", traceback="Fatal Python error: Segmentation fault")
HUNG = WorkerDied(reason="did not respond for 9 s", log="env_0.log", traceback="File sims.py, line 3 in step")


@pytest.mark.parametrize(
    ("deaths", "ends"),
    [
        ([(RAISED, "a", 3), (RAISED, "a", 3)], True),
        ([(RAISED, "a", 3), (SEGV, "b", 1), (RAISED, "a", 3)], True),
        ([(RAISED, "a", 3), (RAISED, "a", 4)], False),
        ([(RAISED, "a", 3), (RAISED, "b", 3)], False),
        ([(RAISED, "a", 3), (WorkerDied(reason="raised y", log="", raised=True), "a", 3)], False),
        ([(SEGV, "a", 3), (SEGV, "b", 9)], False),
        ([(SEGV, "a", 3), (SEGV, "a", 3)], False),
        ([(HUNG, "a", 3), (HUNG, "a", 3)], False),
    ],
)
def test_only_an_exception_in_the_same_step_of_the_same_episode_ends_the_run_early(
    deaths: list[tuple[WorkerDied, str, int]], ends: bool
):
    """Episodes of killed or hanging workers are dropped after several attempts instead."""
    unused: Any = None
    one = supervisor.Supervisor(InlineLauncher(Path()), FaultSettings(max_restarts_per_worker=7), lambda line: None)
    one._specs["env_0"] = WorkerSpec(name="env_0", entry="", init=unused, component="env")
    *earlier, (last, *place) = deaths
    for died, *at in earlier:
        one.get_running_episodes = lambda worker, at=at: {tuple(at), ("another", 7)} if at != place else {tuple(at)}
        one._on_worker_death("env_0", died)
    one.get_running_episodes = lambda worker: {tuple(place)}
    if not ends:
        one._on_worker_death("env_0", last)
        assert one.restarts == len(deaths)
        return
    with pytest.raises(
        WorkerError, match="worker env_0 raised x; after its last restart it failed in the same step of"
    ):
        one._on_worker_death("env_0", last)


def test_error_of_an_env_worker_is_raised_after_the_update():
    """Weights in the middle of an update belong to no step."""
    unused: Any = None
    launcher = InlineLauncher(Path())
    one = supervisor.Supervisor(launcher, FaultSettings(max_restarts_per_worker=0), lambda line: None)
    one._specs["env_0"] = WorkerSpec(name="env_0", entry="", init=unused, component="env")
    with one.defer_signals():
        one._on_worker_death("env_0", SEGV)
        one.pump(0.0)
        assert one.starting == {"env_0"}, "the worker gets no requests"
    with pytest.raises(WorkerError, match="worker env_0 died with SIGSEGV; it was restarted 0 times already") as error:
        one.pump(0.0)
    assert error.value.actors_reply
    one.pump(0.0)
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
