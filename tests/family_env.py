"""Gymnasium environments that start child processes and write their process ids to a file."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import gymnasium
import numpy as np

FOLDER = "FAMILY_ENV_FOLDER"
"""Environment variable with the folder for process ids."""


def note(pid: int) -> None:
    """Write a process id to the folder, where the test looks for leftover processes."""
    folder = Path(os.environ[FOLDER])
    (folder / f"{pid}.part").touch()
    (folder / f"{pid}.part").rename(folder / f"{pid}.pid")


def serve(connection: Connection) -> None:
    """Reply with numbers until the other end is closed."""
    while (number := connection.recv()) is not None:
        connection.send(number + 1)


def fork_again() -> None:
    """Start a session, and fork a process that ignores the end of its parent."""
    os.setsid()
    note(os.getpid())
    if os.fork() == 0:
        note(os.getpid())
    time.sleep(600)


class Parent(gymnasium.Env):
    """Environment without child processes."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        pass

    def work(self) -> None:
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.work()
        self.steps += 1
        return np.full(3, self.steps, np.float32), 1.0, False, self.steps >= 5, {"is_success": self.steps > 3}


class Commands(Parent):
    """Environment with a child in this session, a child in its own session, and an orphan."""

    def start(self) -> None:
        self.children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
        for child in self.children:
            note(child.pid)
        orphan = subprocess.run(["sh", "-c", "sleep 600 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True)
        note(int(orphan.stdout))


class Stuck(Commands):
    """Environment whose first step never returns."""

    seconds = 600.0

    def work(self) -> None:
        time.sleep(self.seconds)


class Slow(Stuck):
    seconds = 0.1


class Simulated(Parent):
    """Environment that runs in a separate process, which ends with `close`."""

    method = "spawn"

    def start(self) -> None:
        context = multiprocessing.get_context(self.method)
        self.ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,))
        self.process.start()
        note(self.process.pid)

    def work(self) -> None:
        self.ours.send(self.steps)
        assert self.ours.recv() == self.steps + 1

    def close(self) -> None:
        self.process.terminate()
        self.process.join()


class Forked(Simulated):
    method = "fork"


class SlowForks(Forked):
    """Forks a process in a process group of its own, and that process forks another one."""

    def start(self) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=fork_again)
        self.process.start()

    def work(self) -> None:
        time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


class Served(Simulated):
    method = "forkserver"


class Unclosed(Simulated):
    """Environment that leaves its process running."""

    def close(self) -> None:
        pass
