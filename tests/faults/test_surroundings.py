"""Unusual process environments: no leftovers, and no dependency on files outside of the run."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import Command, command_environment, run_cli, start_cli, wait_until, workers_of
from toy_runs import comparable, resume_toy, rows, toy_words, train_toy

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Field, RecordLayout
from embodyrl.cluster.local import LocalLauncher
from embodyrl.monitor.group import build_monitor
from embodyrl.monitor.protocol import RunInfo
from embodyrl.reports.card import build_card
from embodyrl.workers.lifecycle import WorkerSpec

INLINE = ("launcher=inline", "runner.max_steps=1")


def shared_memory() -> set[str]:
    """Return the shared memory segments of embodyrl."""
    return {name for name in os.listdir("/dev/shm") if "embodyrl" in name}


@pytest.fixture
def start():
    commands: list[Command] = []

    def begin(*words: str, cwd: Path, env: dict[str, str] | None = None) -> Command:
        commands.append(start_cli("train", *words, cwd=cwd, env=env))
        return commands[-1]

    yield begin
    for command in commands:
        command.stop()


@pytest.mark.integration
def test_killed_process_group_leaves_no_files_and_resumes(start, tmp_path):
    """No process remains for cleanup, not even Python's resource tracker."""
    gate = tmp_path / "gate"
    words = toy_words(tmp_path, f"env.kwargs.once={gate}", "env.kwargs.fault=gate", "env.kwargs.at=40")
    command = start(*words, "runner.save_interval=1", "launcher.env_workers=1", cwd=tmp_path)
    shared = shared_memory()
    command.wait_for(gate, deadline_s=100)
    pids = list(workers_of(command.pid).values())
    assert len(pids) == 2
    command.signal_group(signal.SIGKILL)
    command.wait()
    assert wait_until(lambda: not any(Path(f"/proc/{p}").exists() for p in pids), 5.0)
    assert shared_memory() <= shared
    resume_toy(tmp_path / "run", "launcher.name=inline")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


@pytest.mark.integration
def test_runs_tolerate_unusual_paths_and_missing_home_locale_or_shm(tmp_path):
    """A folder with blanks and umlauts behind a link, a /dev/shm of 64 KiB, an unwritable home, the C locale."""
    if os.geteuid() != 0:
        pytest.skip("a private /dev/shm needs root")
    real = tmp_path / "Bär & Söhne" / "läufe"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    hostile = {"HOME": "/proc/nowhere", "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "embodyrl.cli.main", "train", *toy_words(tmp_path / "link", "runner.max_steps=1")]
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    done = subprocess.run(
        [*mounted, *words],
        cwd=tmp_path / "link",
        env=command_environment(tmp_path, hostile),
        capture_output=True,
        timeout=110,
        check=False,
    )
    if b"unshare failed" in done.stderr or b"mount:" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr!r}")
    assert done.returncode == 0, done.stderr
    assert len(rows(real / "run")) == 1


JUMPING_CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static long calls;
    int failed = syscall(SYS_clock_gettime, id, t);
    if (!failed && id == CLOCK_REALTIME) t->tv_sec += (2 * calls + calls % 3 - 1) * 86400, calls++;
    return failed;
}
"""


@pytest.mark.integration
def test_clock_jumps_have_no_effect(tmp_path):
    """As after suspension or a time server correction; only the wall clock jumps."""
    compiler, library = shutil.which("cc"), tmp_path / "clock.so"
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, "-x", "c", "-"], input=JUMPING_CLOCK, text=True, check=True
    )
    words = ("launcher.env_workers=1", "runner.deterministic=true")
    done = run_cli("train", *toy_words(tmp_path, *words), cwd=tmp_path, env={"LD_PRELOAD": str(library)})
    assert done.returncode == 0, done.stderr
    calm = train_toy(tmp_path, "runner.deterministic=true", name="calm")
    assert comparable(tmp_path / "run") == comparable(calm)
    assert build_card(tmp_path / "run")["costs"]["wall_hours"] < 1


@pytest.mark.integration
def test_concurrent_runs_work_with_an_occupied_port(start, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        folders = [tmp_path / "a", tmp_path / "b"]
        commands = []
        for folder in folders:
            folder.mkdir()
            commands.append(start(*toy_words(tmp_path, *INLINE, name=f"run_{folder.name}"), cwd=folder, env=env))
        for command in commands:
            assert command.wait(100) == 0, command.printed
    assert [len(rows(tmp_path / f"run_{name}")) for name in "ab"] == [1, 1]


@pytest.mark.integration
def test_closed_output_pipe_does_not_end_the_run(tmp_path):
    """`embodyrl train ... | head -1`."""
    words = [sys.executable, "-m", "embodyrl.cli.main", "train", *toy_words(tmp_path, *INLINE)]
    with subprocess.Popen(
        words, cwd=tmp_path, env=command_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(100) == 0
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert len(rows(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "manifest.json").is_file()


@pytest.mark.integration
def test_blocked_output_reader_does_not_stop_the_run(tmp_path):
    """A pipe that is full from the first line to the last."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"-" * 4096)
    words = [sys.executable, "-m", "embodyrl.cli.main", "train", *toy_words(tmp_path, *INLINE)]
    done = subprocess.run(
        words, cwd=tmp_path, env=command_environment(tmp_path), stdout=writing, stderr=writing, timeout=100, check=False
    )
    os.close(writing)
    with open(reading, "rb") as reader:
        assert reader.read() == b"-" * 4096
    assert done.returncode == 0
    assert len(rows(tmp_path / "run")) == 1


def _cycle(folder: Path, end: str) -> None:
    launcher = LocalLauncher(folder)
    launcher.start(WorkerSpec(name="w", entry="light_worker:LightWorker", init=""), timeout_s=60)
    assert wait_until(lambda: launcher.wait(1.0), 60)
    if end == "kill":
        os.kill(workers_of(os.getpid())["w"], signal.SIGKILL)
    if end != "stop":
        launcher.send("w", "exit", timeout_s=60)
        assert wait_until(lambda: launcher.wait(1.0), 60)
    launcher.stop()


@pytest.mark.integration
def test_start_and_stop_leak_no_resources(tmp_path):
    layout = RecordLayout(fields=(Field(name="image", dtype="uint8", shape=(256, 256, 3)),))

    def held() -> tuple[int, int, set[str]]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), shared_memory()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def use_memory() -> None:
        arena = Arena.create(layout, 50)
        arena["image"][:] = 1
        arena.close()

    use_memory()
    _cycle(tmp_path, "stop")
    gc.collect()
    before, memory = held(), resident()
    for end in ("kill", "exit", "stop"):
        _cycle(tmp_path, end)
    for _ in range(50):
        use_memory()
    gc.collect()
    # What an earlier test of this process left may end meanwhile; nothing may be added.
    after = held()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2]
    assert resident() - memory < 5 * 2**20


@pytest.fixture
def full_disk(tmp_path):
    """Mount a real file system without a free byte, with one file."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_loggers_on_a_full_disk_are_dropped_with_one_warning(full_disk, caplog):
    monitor = build_monitor(["jsonl", "tensorboard"])
    monitor.open(full_disk, RunInfo(run_id="full"))
    monitor.log(1, {"train/return": 1.0})
    free = shutil.disk_usage(full_disk).free
    (full_disk / "ballast").write_bytes(bytes(free))
    for step in range(2, 400):
        monitor.log(step, {f"train/{name}": 1.0 for name in range(50)})
    assert "jsonl" not in monitor.monitors
    assert sum("'jsonl' failed" in r.getMessage() for r in caplog.records) == 1
    monitor.close()


@pytest.mark.integration
def test_worker_with_a_full_disk_reports_the_cause(full_disk):
    """The worker cannot write to its log either."""
    launcher = LocalLauncher(full_disk)
    launcher.start(WorkerSpec(name="w", entry="light_worker:LightWorker", init=""), timeout_s=60)
    assert wait_until(lambda: launcher.wait(1.0), 60)
    (full_disk / "ballast").write_bytes(bytes(shutil.disk_usage(full_disk).free))
    launcher.send("w", "full", timeout_s=60)
    events = []
    assert wait_until(lambda: events.extend(launcher.wait(1.0)) or events, 60)
    launcher.stop()
    died = events[0].message
    assert (died.exit_code, died.raised) == (6, True)
    assert died.reason == "raised Cannot write to a file: No space left on device. Free some space."
