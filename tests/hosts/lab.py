"""Lab of three hosts on one machine: each has its own address, name, temporary folder and Ray node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lab_network import Network
from processes import Command, command_environment, wait_until

PORT = 6379
COUNT = 3
SPACE = "96m"
"""Size of the temporary folder of a host."""
_AS_HOST = 'hostname "$0" && { [ "$SPACE" = 0 ] || mount -t tmpfs -o size="$SPACE" tmpfs "$RAY_TMPDIR"; } && exec "$@"'
"""Shell program: run a command with a host's name and, unless SPACE is 0, a temporary folder of that size."""
_RAY = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
_COUNTER = """
import sys, time, ray
ray.init(log_to_driver=False)
while True:
    print(*sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]), flush=True)
    time.sleep(0.3)
"""
HEALTH = {"period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "4", "initial_delay_ms": "1000"}
"""Ray's health check: a host without a connection counts as lost after 8 to 12 seconds."""


class Lab:
    """Three hosts; the driver runs on the first, which is also the head of the Ray cluster."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder, self._network = folder, network
        self.switch = network.switch
        self.gate = folder / "gate"
        """Gate at which a run waits at the moment of a test: its second update or checkpoint (`toy_gates`)."""
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp")  # names of sockets must be short
        self._alive = folder / "alive.txt"
        self._counter: subprocess.Popen[bytes] | None = None

    def environment(self, host: int) -> dict[str, str]:
        """Return the environment variables of a host; all but the driver's have their own temporary folder."""
        temporary, space = self._temporary.name, SPACE if host else "0"
        return {
            **command_environment(
                self._folder, {"TOY_GATE": str(self.gate), "TOY_GATE_OPEN_CALLS": "1", "SPACE": space}
            ),
            **{f"RAY_health_check_{name}": value for name, value in HEALTH.items()},
            "RAY_worker_niceness": "0",
            "RAY_TMPDIR": temporary,
            "RAY_ADDRESS": f"{self._network.addresses[0]}:{PORT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            **({"TMPDIR": temporary} if host else {}),
        }

    def on(self, host: int, *command: str) -> list[str]:
        """Return the arguments that run a command on a host."""
        place = ["ip", "netns", "exec", self._network.names[host], "unshare", "--uts", "--mount"]
        return [*place, "sh", "-c", _AS_HOST, f"host{host}", *command]

    def start_on(
        self, host: int, command: Sequence[str], out: IO[bytes], err: IO[bytes], **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, with more environment variables."""
        started = subprocess.Popen(
            self.on(host, *command),
            stdout=out,
            stderr=err,
            cwd=self._folder,
            env={**self.environment(host), **more},
            start_new_session=True,
        )
        self._started.append(started)
        return started

    def start_ray(self) -> None:
        """Start the nodes that do not run: all, or those that return after an outage."""
        running = [host for host, node in self._nodes.items() if node.poll() is None]
        if not running or not wait_until(lambda: len(self.alive()) == len(running), 20):  # a test has failed
            self.lose_all()
            running = []
        for host in set(range(COUNT)) - {*running}:
            place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            place = [f"--address={self._network.addresses[0]}:{PORT}"] if host else place
            words = ["start", *place, f"--node-ip-address={self._network.addresses[host]}", "--num-cpus=4", "--block"]
            command = [sys.executable, "-c", _RAY, *words, "--object-store-memory=100000000", "--disable-usage-stats"]
            with open(self._folder / f"ray_{host}.log", "wb") as log:
                self._nodes[host] = self.start_on(host, command, log, log)
            if not host:
                self._stop_counter()
                self.wait_for_nodes(1)
        self.wait_for_nodes(COUNT)

    def alive(self) -> list[str]:
        """Return the addresses of the hosts that are in the cluster."""
        if self._counter is None or self._counter.poll() is not None:
            with open(self._alive, "wb") as out:
                self._counter = self.start_on(0, [sys.executable, "-c", _COUNTER], out, out)
        lines = self._alive.read_text().splitlines()
        return lines[-1].split() if lines and lines[-1].startswith("10.") else []

    def _stop_counter(self) -> None:
        if self._counter is not None:
            self._counter.kill()
            self._counter.wait()
            self._counter = None

    def wait_for_nodes(self, count: int) -> None:
        """Wait until the cluster has a number of live nodes."""
        assert wait_until(lambda: len(self.alive()) == count, 150), self._alive.read_text()[-2000:]

    def run(self, folder: Path, *words: str, **more: str) -> Command:
        """Start `embodyrl WORDS` on the first host."""
        out, err = folder / "stdout.txt", folder / "stderr.txt"
        command = [sys.executable, "-m", "embodyrl.cli.main", *words]
        with open(out, "wb") as out_file, open(err, "wb") as err_file:
            process = self.start_on(0, command, out_file, err_file, **more)
        return Command(process, out, err)

    def kill_service(self, host: int, program: str, *, alone: bool = False) -> None:
        """Kill one of Ray's own processes on a host (raylet/raylet, gcs/gcs_server); the workers stay.

        Without `alone`, `ray start --block` then ends the host's other processes of Ray.
        """
        if alone:
            _signal(self._nodes[host].pid, signal.SIGSTOP)
        found = [pid for pid in self._network.processes(host) if program.encode() in _title(pid)]
        assert len(found) == 1, found
        _signal(found[0], signal.SIGKILL)

    def lose_power(self, host: int) -> None:
        """Kill all processes of a host while its link is cut, so no connection is closed for the other hosts."""
        self.switch.cut.add(host)
        self.kill(host)

    def kill(self, host: int) -> None:
        """Kill all processes of a host."""
        for pid in self._network.processes(host):
            _signal(pid, signal.SIGKILL)
        if host in self._nodes:
            self._nodes.pop(host).wait()

    def discard_attempt(self, host: int) -> None:
        """Kill all processes of a host, and wait until the cluster has noticed."""
        self.kill(host)
        self.wait_for_nodes(COUNT - 1)

    def lose_all(self) -> None:
        """Kill all processes of all hosts; `start_ray` starts a new cluster."""
        for host in range(COUNT):
            self.kill(host)

    def workers(self, *hosts: int) -> list[int]:
        """Return the processes that run workers, on some hosts or on all."""
        held = (pid for host in hosts or range(COUNT) for pid in self._network.processes(host))
        return [pid for pid in held if _title(pid).startswith(b"ray::RemoteWorker")]

    def temporary_folder(self, host: int) -> Path:
        """Return a host's own temporary folder, as this process sees it."""
        return Path(f"/proc/{self._nodes[host].pid}/root{self._temporary.name}")

    @contextmanager
    def frozen(self, host: int) -> Iterator[None]:
        """Stop all processes of a host inside the block."""
        held = self._network.processes(host)
        for pid in held:
            _signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in held:
                _signal(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Kill all processes of all hosts."""
        self.lose_all()
        for process in self._started:
            process.wait()
        self._temporary.cleanup()


def _signal(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _title(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def three_hosts(folder: Path) -> Iterator[Lab]:
    """Create the hosts; remove them at the end."""
    network = Network(COUNT)
    try:
        lab = Lab(folder, network)
        try:
            yield lab
        finally:
            lab.stop()
    finally:
        network.close()
