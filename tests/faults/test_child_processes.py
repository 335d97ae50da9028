"""Child processes of environments can start in every process of a run and end with the run."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from family_env import FOLDER
from processes import Command, run_cli, start_cli, wait_until, workers_of

EVAL = ("eval", "env=gym", "model=random", "eval.episodes=4", "env.eval.total_num_envs=2", "launcher.env_workers=1")


def running(folder: Path) -> list[int]:
    """Return the running processes among the process ids written by the environments."""
    found = []
    for file in folder.glob("*.pid"):
        try:
            state = Path(f"/proc/{file.stem}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        found += [int(file.stem)] if state != "Z" else []
    return found


def count(folder: Path) -> int:
    return len([*folder.glob("*.pid")])


def end(command: Command) -> None:
    """Kill the driver only, as the kernel does when memory runs out."""
    os.kill(command.pid, signal.SIGKILL)
    command.wait()


def gone(folder: Path) -> bool:
    return wait_until(lambda: not running(folder), 10.0)


@pytest.mark.integration
@pytest.mark.parametrize("words", [EVAL, ("check-env", "env=gym")], ids=["probe", "check-env"])
def test_child_processes_end_when_the_driver_is_killed_while_reading_a_spec(words, tmp_path):
    command = start_cli(*words, "env.id=family_env:Stuck", cwd=tmp_path, env={FOLDER: str(tmp_path)})
    assert wait_until(lambda: count(tmp_path) >= 3, 60.0), command.printed
    assert len(running(tmp_path)) >= 3
    end(command)
    assert gone(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize("launcher", ["local", pytest.param("inline", marks=pytest.mark.slow)])
def test_child_processes_of_workers_end_when_the_driver_is_killed(launcher, tmp_path):
    words = [*EVAL, f"launcher={launcher}", "env.id=family_env:Slow", "eval.episodes=400"]
    words = [word for word in words if launcher == "local" or not word.startswith("launcher.env_workers")]
    command = start_cli(*words, cwd=tmp_path, env={FOLDER: str(tmp_path)})
    # Three of the process that describes the environment, three of each environment.
    assert wait_until(lambda: count(tmp_path) >= 9, 90.0), command.printed
    assert len(running(tmp_path)) >= 6
    end(command)
    assert gone(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize("launcher", [pytest.param("local", marks=pytest.mark.slow), "inline"])
def test_forked_processes_end_when_the_driver_is_killed(launcher, tmp_path):
    words = [*EVAL, f"launcher={launcher}", "env.id=family_env:SlowForks", "eval.episodes=400"]
    words = [word for word in words if launcher == "local" or not word.startswith("launcher.env_workers")]
    command = start_cli(*words, cwd=tmp_path, env={FOLDER: str(tmp_path)})
    # Two of each environment, once the process that describes the environment has ended.
    assert wait_until(lambda: count(tmp_path) >= 6 and len(running(tmp_path)) >= 4, 90.0), command.printed
    end(command)
    assert gone(tmp_path)


@pytest.mark.integration
def test_child_processes_of_a_worker_end_when_the_worker_is_killed(tmp_path):
    words = (*EVAL, "env.id=family_env:Slow", "eval.episodes=400", "faults.on_env_crash=fail")
    command = start_cli(*words, cwd=tmp_path, env={FOLDER: str(tmp_path)})
    assert wait_until(lambda: "env_0" in workers_of(command.pid) and len(running(tmp_path)) >= 6, 90.0)
    os.kill(command.worker("env_0"), signal.SIGKILL)
    assert command.wait() != 0
    assert gone(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        pytest.param("local", "Simulated", marks=pytest.mark.slow),
        pytest.param("local", "Forked", marks=pytest.mark.slow),
        ("local", "Served"),
        ("local", "Unclosed"),
        pytest.param("inline", "Unclosed", marks=pytest.mark.slow),
    ],
)
def test_environment_can_use_a_separate_process(launcher, name, tmp_path):
    words = [word for word in EVAL if launcher == "local" or not word.startswith("launcher.env_workers")]
    words += [f"launcher={launcher}", f"env.id=family_env:{name}"]
    # A fork server creates its socket in TMPDIR, and the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as short:
        done = run_cli(*words, cwd=tmp_path, env={FOLDER: str(tmp_path), "TMPDIR": short})
        assert done.returncode == 0, done.stdout + done.stderr
        assert os.listdir(short) == []
    assert count(tmp_path) >= 3
    assert gone(tmp_path)


@pytest.mark.integration
def test_check_env_supports_environments_with_child_processes(tmp_path):
    done = run_cli("check-env", "env=gym", "env.id=family_env:Simulated", cwd=tmp_path, env={FOLDER: str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert gone(tmp_path)


@pytest.mark.integration
def test_child_processes_of_an_inline_environment_end_with_the_run(tmp_path):
    words = [word for word in EVAL if not word.startswith("launcher.env_workers")]
    words += ["launcher=inline", "env.id=family_env:Commands"]
    done = run_cli(*words, cwd=tmp_path, env={FOLDER: str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "did not end with the environment's close()" in done.stdout + done.stderr
    assert gone(tmp_path)
