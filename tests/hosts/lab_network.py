"""Network of a lab: a namespace for each host, joined by a switch that can delay, lose, limit or cut.

The switch is a TUN device in each namespace and a thread that copies packets between them. It needs root and
/dev/net/tun, but no kernel module for network emulation.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


class Switch(threading.Thread):
    """Switch that copies packets between the devices of the hosts; its attributes may change at any time."""

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.carried_bytes = [0] * len(devices)
        """Number of bytes that each host has received."""
        self._devices = devices
        self._over = threading.Event()
        self.restore()

    def restore(self) -> None:
        """Make the network fast and lossless."""
        self.cut: set[int] = set()
        """Hosts without a connection."""
        self.delay_s = self.loss = 0.0
        self.bytes_per_s = float("inf")

    def run(self) -> None:
        chance, waiting, sent, count = random.Random(0), [], [0.0] * len(self._devices), 0
        while not self._over.is_set():
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            for device in select.select(self._devices, [], [], min(left, 0.2))[0]:
                packet, source = os.read(device, 1 << 16), self._devices.index(device)
                target = packet[19] - 1  # the last byte of an IPv4 address
                if packet[0] >> 4 != 4 or not 0 <= target < len(self._devices):
                    continue
                if self.cut.isdisjoint((source, target)) and chance.random() >= self.loss:
                    count += 1
                    self.carried_bytes[target] += len(packet)
                    sent[target] = max(sent[target], time.monotonic()) + len(packet) / self.bytes_per_s
                    heapq.heappush(waiting, (sent[target] + self.delay_s, count, source, target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, source, target, packet = heapq.heappop(waiting)
                if self.cut.isdisjoint((source, target)):
                    os.write(self._devices[target], packet)

    def close(self) -> None:
        self._over.set()
        self.join()
        for device in self._devices:
            os.close(device)


class Network:
    """Namespaces with addresses 10.77.0.1, ... and names host0, ... (as Kubernetes names pods: train-0.train, ...)."""

    def __init__(self, count: int) -> None:
        self.names = [f"embodyrl-{os.getpid()}-{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        devices = [self._add(name, address) for name, address in zip(self.names, self.addresses, strict=True)]
        self.switch = Switch(devices)
        self.switch.start()

    def _add(self, name: str, address: str) -> int:
        _ip("netns", "add", name)
        table = Path("/etc/netns", name, "hosts")  # `ip netns exec` mounts it over /etc/hosts
        table.parent.mkdir(parents=True)
        lines = (f"{own} host{number} train-{number}.train" for number, own in enumerate(self.addresses))
        table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        device = _device(name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "wire", "up")
        return device

    def processes(self, host: int) -> list[int]:
        """Return the processes of a host."""
        held = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in held.stdout.split()]

    def close(self) -> None:
        self.switch.close()
        for name in self.names:
            _ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns", name))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


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
