"""Two hosts on one machine: network namespaces with a link that can be interrupted, slow or lossy.

The link is two TUN devices and a thread that copies packets between them. It needs root and /dev/net/tun, but no
kernel module for network emulation.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from processes import Command, command_environment

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


class Wire(threading.Thread):
    """Link that copies packets between two devices; its attributes may change at any time."""

    def __init__(self, ends: tuple[int, int]) -> None:
        super().__init__(daemon=True)
        self.cut = False
        self.delay_s = 0.0
        self.loss = 0.0
        self.bytes_per_s = float("inf")
        self.carried = 0
        """Number of packets that arrived."""
        self.carried_bytes = 0
        self._ends = ends
        self._over = threading.Event()

    def run(self) -> None:
        chance, waiting, sent = random.Random(0), [], 0.0
        while not self._over.is_set():
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            for end in select.select(self._ends, [], [], min(left, 0.2))[0]:
                packet, other = os.read(end, 1 << 16), self._ends[1 - self._ends.index(end)]
                if not self.cut and chance.random() >= self.loss:
                    self.carried += 1
                    self.carried_bytes += len(packet)
                    sent = max(sent, time.monotonic()) + len(packet) / self.bytes_per_s
                    heapq.heappush(waiting, (sent + self.delay_s, self.carried, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(waiting)
                if not self.cut:
                    os.write(other, packet)

    def close(self) -> None:
        self._over.set()
        self.join()
        for end in self._ends:
            os.close(end)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _processes(namespace: str) -> list[int]:
    held = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in held.stdout.split()]


def _signal(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _title(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _device(namespace: str) -> int:
    """Open a TUN device inside a namespace, which this process may leave afterwards."""
    made: list[int] = []

    def make() -> None:  # a namespace belongs to a thread
        with open(f"/run/netns/{namespace}", encoding="ascii") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
                return
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
        made.append(device)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made, f"no device in {namespace}"
    return made[0]


class Hosts:
    """Two namespaces joined by `wire`, each with a Ray node; the driver runs on the first."""

    def __init__(self, folder: Path, wire: Wire, names: tuple[str, str]) -> None:
        self._folder, self._names = folder, names
        self.gate = folder / "gate"
        """Gate at which a run waits at the moment of a test (`toy_gates`)."""
        self.wire = wire
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._session = tempfile.TemporaryDirectory(prefix="two-hosts-", dir="/tmp")  # names of sockets must be short

    def environment(self) -> dict[str, str]:
        """Environment variables of all processes; a lost host is detected within seconds."""
        quick = {"period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3", "initial_delay_ms": "1000"}
        return {
            **command_environment(self._folder, {"TOY_GATE": str(self.gate)}),
            **{f"RAY_health_check_{name}": value for name, value in quick.items()},
            **{
                "RAY_worker_niceness": "0",
                "RAY_TMPDIR": self._session.name,
                "RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        }

    def on(self, host: int, *command: str) -> list[str]:
        """Return the arguments that run a command on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def start_ray(self) -> None:
        """Start the nodes that do not run: both, or the second one after an outage."""
        for host, address in enumerate(ADDRESSES):
            if host in self._nodes and self._nodes[host].poll() is None:
                continue
            place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            place = [f"--address={ADDRESSES[0]}:{PORT}"] if host else place
            words = ["start", *place, f"--node-ip-address={address}", "--num-cpus=4", "--block"]
            code = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
            with open(self._folder / f"ray_{host}.log", "wb") as log:
                self._nodes[host] = self._start(host, ["-c", code, *words, "--object-store-memory=200000000"], log, log)
            self._wait_for_nodes(host + 1)

    def _wait_for_nodes(self, count: int) -> None:
        code = f"import ray, sys; ray.init(); sys.exit(sum(n['Alive'] for n in ray.nodes()) != {count})"
        end = time.monotonic() + 120
        while True:
            asked = self.on(0, sys.executable, "-c", code)
            done = subprocess.run(asked, env=self.environment(), capture_output=True, check=False)
            if done.returncode == 0:
                return
            assert time.monotonic() < end, done.stderr.decode()[-2000:]

    def _start(self, host: int, words: list[str], out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
        command = self.on(host, sys.executable, *words)
        started = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=self._folder, env=self.environment(), start_new_session=True
        )
        self._started.append(started)
        return started

    def run(self, folder: Path, *words: str) -> Command:
        """Start `embodyrl WORDS` on the first host."""
        out, err = folder / "stdout.txt", folder / "stderr.txt"
        with open(out, "wb") as out_file, open(err, "wb") as err_file:
            process = self._start(0, ["-m", "embodyrl.cli.main", *words], out_file, err_file)
        return Command(process, out, err)

    def kill_service(self, host: int, program: str) -> None:
        """Kill one of Ray's own processes on a host (raylet/raylet, gcs/gcs_server); the workers stay."""
        found = [pid for pid in _processes(self._names[host]) if program.encode() in _title(pid)]
        assert len(found) == 1, found
        _signal(found[0], signal.SIGKILL)

    def lose_power(self, host: int) -> None:
        """Kill all processes of a host while the link is cut, so no connection is closed for the other host."""
        self.wire.cut = True
        self._kill(self._names[host])
        self._nodes[host].wait()

    def lose_second(self) -> None:
        """Kill all processes of the second host, and wait until the first host has detected the loss."""
        self._kill(self._names[1])
        self._nodes[1].wait()
        self._wait_for_nodes(1)

    def lose_all(self) -> None:
        """Kill all processes of both hosts; `start_ray` starts a new cluster."""
        for host, name in enumerate(self._names):
            self._kill(name)
            self._nodes[host].wait()

    def _kill(self, name: str) -> None:
        for pid in _processes(name):
            _signal(pid, signal.SIGKILL)

    def workers(self, host: int) -> list[int]:
        """Return the processes of a host that run workers."""
        return [pid for pid in _processes(self._names[host]) if _title(pid).startswith(b"ray::RemoteWorker")]

    @contextmanager
    def frozen(self, host: int) -> Iterator[None]:
        """Stop all processes of a host inside the block."""
        held = _processes(self._names[host])
        for pid in held:
            _signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in held:
                _signal(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Kill all processes of both hosts."""
        for name in self._names:
            self._kill(name)
        for process in self._started:
            process.wait()
        self._session.cleanup()


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Create both hosts with a Ray node each; remove them at the end."""
    names = (f"embodyrl-{os.getpid()}-a", f"embodyrl-{os.getpid()}-b")
    for name in names:
        _ip("netns", "add", name)
    try:
        ends = tuple(_device(name) for name in names)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "wire", "up")
        wire = Wire(ends)  # pyright: ignore[reportArgumentType]
        wire.start()
        hosts = Hosts(folder, wire, names)
        try:
            hosts.start_ray()
            yield hosts
        finally:
            hosts.stop()
            wire.close()
    finally:
        for name in names:
            _ip("netns", "del", name)
