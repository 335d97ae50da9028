"""Environment code in a separate process."""

import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from processes import wait_until
from settings import env_of

from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import EnvError, MissingDependencyError
from embodyrl.isolation import NoResultError, call_isolated
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config

ENV = """
import os, signal, subprocess, threading, time
import gymnasium, numpy as np

class Plain(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(np.float32([-1, 0]), np.float32([1, np.inf]))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}
    def step(self, action):
        return np.ones(3, np.float32), 1.0, False, False, {}

class Threads(Plain):
    def __init__(self):
        threading.Thread(target=threading.Event().wait, name="endless").start()

class Crash(Plain):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGSEGV)

class Leaves(Plain):
    def reset(self, *, seed=None, options=None):
        raise SystemExit("no display")

gymnasium.register("Named-v0", Plain, max_episode_steps=7)
"""


@dataclass(frozen=True)
class Answer:
    number: int


def start_child(file: str, crash: bool) -> Answer:
    child = subprocess.Popen(["sleep", "600"])
    Path(file).write_text(str(child.pid))
    if crash:
        os.kill(os.getpid(), signal.SIGKILL)
    return Answer(child.pid)


def leave(file: str) -> Answer:
    """Create the files and processes that a library may leave behind, and a thread that does not end."""
    semaphore, memory = multiprocessing.get_context("spawn").RLock(), SharedMemory(create=True, size=64)
    shared = multiprocessing.Manager()
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    child.start()
    threading.Thread(target=threading.Event().wait, args=(600,)).start()
    names = [f"sem.{semaphore._semlock.name.removeprefix('/')}", memory.name]  # pyright: ignore[reportAttributeAccessIssue]
    folders = [os.path.dirname(str(shared.address)), multiprocessing.util.get_temp_dir()]
    Path(file).write_text(" ".join([str(child.pid), *(f"/dev/shm/{name}" for name in names), *folders]))
    raise ValueError("no display")


def fail(text: str) -> Answer:
    raise MissingDependencyError(text)


def hang() -> Answer:
    threading.Event().wait()
    raise AssertionError


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("crash", [False, True])
def test_child_processes_end_with_the_process(crash, tmp_path):
    file = tmp_path / "pid"
    if crash:
        with pytest.raises(NoResultError, match="killed by SIGKILL"):
            call_isolated(f"{__name__}:start_child", str(file), True, kind=Answer)
    else:
        assert call_isolated(f"{__name__}:start_child", str(file), False, kind=Answer).number == int(file.read_text())
    while is_running(int(file.read_text())):  # the signal is sent, and the kernel delivers it
        time.sleep(0.01)


def test_isolated_call_leaves_no_semaphore_memory_folder_or_process(tmp_path):
    file = tmp_path / "files"
    with pytest.raises(NoResultError, match=r"no display$"):
        call_isolated(f"{__name__}:leave", str(file), kind=Answer)
    pid, *files = file.read_text().split()
    assert len(files) == 4
    # The fork server and the resource tracker end after their process.
    assert wait_until(lambda: not (is_running(int(pid)) or any(map(os.path.exists, files))), 30.0)


def test_error_in_an_isolated_call_keeps_class_and_message():
    with pytest.raises(MissingDependencyError, match="pip install it") as found:
        call_isolated(f"{__name__}:fail", "pip install it", kind=Answer)
    assert str(found.value) == "pip install it"
    assert "in fail" in "".join(found.value.__notes__)


def test_hanging_process_is_killed():
    with pytest.raises(NoResultError, match="no response within"):
        call_isolated(f"{__name__}:hang", kind=Answer, timeout_s=0.5)


def described(tmp_path: Path, name: str, monkeypatch, module: str = "isolated_env"):
    (tmp_path / f"{module}.py").write_text(ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    return ENVS.get("gym").spec(env_of(env_type="gym", id=f"{module}:{name}"), EnvContext())


def test_gymnasium_environment_specs_are_read_outside_the_driver(tmp_path, monkeypatch):
    found = described(tmp_path, "Plain", monkeypatch)
    assert "isolated_env" not in sys.modules
    named = described(tmp_path, "Named-v0", monkeypatch)
    assert named == replace(found, name="isolated_env:Named-v0", tasks=("isolated_env:Named-v0",), max_episode_steps=7)

    threads = {*threading.enumerate()}
    assert "thread endless did not end" in described(tmp_path, "Threads", monkeypatch).warnings[-1]
    assert {*threading.enumerate()} <= threads

    assert found.action.high == (1.0, float("inf"))


def test_imported_environment_spec_is_read_in_process(tmp_path, monkeypatch):
    found = described(tmp_path, "Plain", monkeypatch, "loaded_env")
    loaded = importlib.import_module("loaded_env")
    monkeypatch.setattr(loaded.Plain, "observation_space", gymnasium.spaces.Box(-1, 1, (4,)))
    monkeypatch.setattr(loaded.Plain, "reset", lambda self, **_: (np.zeros(4, np.float32), {}))
    monkeypatch.setattr(loaded.Plain, "step", lambda self, _: (np.zeros(4, np.float32), 1.0, False, False, {}))
    here = described(tmp_path, "Plain", monkeypatch, "loaded_env")
    assert (found.state_dim, here.state_dim) == (3, 4)


@pytest.mark.parametrize(("name", "reason"), [("Crash", "killed by SIGSEGV"), ("Leaves", "SystemExit: no display")])
def test_environment_crash_becomes_an_error(name, reason, tmp_path, monkeypatch):
    with pytest.raises(EnvError, match=f"env.id=isolated_env:{name}: .*{reason}"):
        described(tmp_path, name, monkeypatch)


def test_workers_do_not_probe_the_environment_again(tmp_path, monkeypatch):
    (tmp_path / "counted_env.py").write_text(
        ENV.replace("super().reset", "open('resets', 'a').write('.'); super().reset")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plan = build_run_plan(load_config("eval", ["env=gym", "env.id=counted_env:Plain", "model=random"]), training=False)
    count = len(Path("resets").read_text())
    env = ENVS.get("gym").make(plan.cfg.env, replace(plan.context, num_envs=1))
    assert len(Path("resets").read_text()) == count > 0
    assert env.spec == replace(plan.env, warnings=())
    env.close()
