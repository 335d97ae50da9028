"""Real processes for tests: start a command, wait for its output, find leftover processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import embodyrl

MARK = "EMBODYRL_TEST_SESSION"
"""Environment variable that all processes of a test session inherit, orphans included."""
TESTS = Path(__file__).parent
SOURCE = Path(embodyrl.__file__).parents[1]
"""Environment in which commands run the code that the tests import."""


def wait_until(condition: Callable[[], object], deadline_s: float) -> bool:
    """Repeat a check until the condition holds or the deadline has passed."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def marked_processes() -> list[str]:
    """Return the live processes started by this test session, as "pid name"."""
    mark = f"{MARK}={os.getpid()}".encode()
    ours = (os.getpid(), getattr(forkserver._forkserver, "_forkserver_pid", None))  # ranks' server lives as long as we
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        try:
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended in this moment, or is somebody else's
        if parent == os.getpid() and "template_process" in command:
            continue  # renders chat templates until this process ends
        if command and "resource_tracker" not in command:  # empty: a zombie that init has not reaped yet
            found.append(f"{entry.name} {command[:200]}")
    return found


def workers_of(pid: int) -> dict[str, int]:
    """Return the live workers of a run by name, for example {"policy": 123, "env_0": 124}."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if not (entry / "comm").read_text().startswith("embodyrl:"):
                continue
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            # The kernel cuts names after 15 bytes; a worker's output goes to <its name>.log.
            name = (entry / "fd" / "1").readlink().stem
        except OSError:
            continue
        if int(parent) == pid:
            found[name] = int(entry.name)
    return found


SETS_PATH = f"PYTHONPATH={TESTS}:{SOURCE} "
"""Beginning of the commands that a run of `command_environment` prints, if its config names a toy."""


def command_environment(cwd: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command under test: toys importable, temporary files visible to the test."""
    temporary = cwd / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    path = f"{TESTS}:{SOURCE}"
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary), **(extra or {})}


def run_cli(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `embodyrl ARGS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "embodyrl.cli.main", *args],
        cwd=cwd,
        env=command_environment(cwd, env),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@dataclass(frozen=True)
class Command:
    """A running command with its own process group, as a terminal would start it."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def printed(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def signal_group(self, signum: int) -> None:
        """Send a signal to the process group, as a terminal does on Ctrl-C and a batch system on cancel."""
        os.killpg(self.process.pid, signum)

    def worker(self, name: str) -> int:
        """Return the process id of a worker, which must be running."""
        return workers_of(self.pid)[name]

    def wait_for(self, path: Path, *, lines: int = 0, deadline_s: float = 100.0) -> None:
        """Wait until a file exists and has at least n lines."""

        def there() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.printed}"
            return path.exists() and (not lines or len(path.read_text().splitlines()) >= lines)

        assert wait_until(there, deadline_s), f"{path} has not come:\n{self.printed}"

    def stop(self) -> None:
        """Kill the whole process group, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def heed_signals() -> None:
    """Restore signal handling; tests in the background or below nohup inherit ignored signals."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def start_cli(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> Command:
    """Start `embodyrl ARGS` in its own process group; its output goes to files below `cwd`."""
    environment = command_environment(cwd, env)
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    with open(out, "wb") as out_file, open(err, "wb") as err_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "embodyrl.cli.main", *args],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
            preexec_fn=heed_signals,
        )
    return Command(process, out, err)


def listening(pids: Sequence[int]) -> set[str]:
    """Return the addresses at which processes listen for TCP connections."""
    held = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                held.add(os.readlink(entry))
            except OSError:
                continue  # it was closed in this moment
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in held:
                words = bytes.fromhex(local.partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found
