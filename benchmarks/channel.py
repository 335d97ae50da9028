"""Measure round trips of an observation between two processes: the arena, memcpy, queues, pipes and Ray.

    pip install ray; python benchmarks/channel.py --json channel.json
    python benchmarks/channel.py --json channel.json --no-ray

A round trip: the producer makes an observation available, the consumer wakes up, reads the first and last byte and
replies, the producer wakes up. All transports start from rendered pixels: for the arena and the pooled tensors in
shared memory, for the others in the producer's own memory. `ours, copied` is for a renderer that cannot render in place
and needs one memcpy. The limit is one memcpy of the payload and two wake-ups through pipes, without reading. Transports
alternate several times; a result is the lowest of the medians, GB/s is payload divided by round-trip time.

Copies are counted: another process searches the payload in the memory of both sides, /proc reports the bytes that
passed through the kernel, and tracemalloc reports memory that the consumer allocated.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena, ArenaHandle
from embodyrl.channels.channel import PipeChannel
from embodyrl.channels.layout import Field, Record, RecordLayout
from embodyrl.files import available_cores
from embodyrl.process_cleanup import signal_at_parents_end

SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "3.1 MB": 8 * 2 * 256 * 256 * 3, "25 MB": 64 * 2 * 256 * 256 * 3}
"""Payload sizes; the last two are two 256x256 cameras of 8 and of 64 environments."""
BAR = "3.1 MB"
"""Payload size with performance goals."""
SPAWN = mp.get_context("spawn")
DEADLINE_S = 60.0


@dataclass
class Link:
    """One open transport."""

    round_trip: Callable[[], Any]
    close: Callable[[], None]
    pid: int
    """Process id of the consumer."""
    payload: Callable[[], np.ndarray]
    """Return the last observation in the producer's memory."""


def check(payload: np.ndarray) -> int:
    """Read the first and last byte; reading all pixels costs the same for all transports."""
    return int(payload[0]) + int(payload[-1])


def consume(receive: Callable[[], np.ndarray | None], answer: Callable[[], None], weight: Any) -> None:
    """Run the consumer's loop; `weight`, if given, receives the maximum memory that one observation needed."""
    signal_at_parents_end(signal.SIGKILL)
    if weight is not None:
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1))  # let another process of ours look in
        tracemalloc.start()
    while True:
        before = tracemalloc.get_traced_memory()[0] if weight is not None else 0
        tracemalloc.reset_peak()
        payload = receive()
        if payload is None:
            return
        check(payload)
        if weight is not None:
            weight.value = tracemalloc.get_traced_memory()[1] - before
        answer()


# --- ours, and the limit --------------------------------------------------------------------------------------------


def _arena_side(handle: ArenaHandle, connection: Any, weight: Any) -> None:
    arena, channel = Arena.attach(handle), PipeChannel(connection)
    held: list[int] = []

    def receive() -> np.ndarray | None:
        held[:] = [channel.get(DEADLINE_S)]
        return arena[Record.images][arena.read(held)[0]] if held[0] else None

    consume(receive, lambda: channel.put(held[0]), weight)


def arena(source: np.ndarray, weight: Any = None, *, copied: bool = False) -> Link:
    layout = RecordLayout(fields=(Field(name="images", dtype="uint8", shape=source.shape),))
    pool = Arena.create(layout, 4)
    pool[Record.images][:] = 0  # reserved memory is mapped at the first touch
    connection, theirs = SPAWN.Pipe()
    side = SPAWN.Process(target=_arena_side, args=(pool.handle, theirs, weight), daemon=True)
    side.start()
    channel, last = PipeChannel(connection), [0]

    def round_trip() -> None:
        record_ref = pool.allocate()
        with pool.write(record_ref) as record:
            if copied:
                np.copyto(pool[Record.images][record], source)
            elif weight is not None:
                draw(pool[Record.images][record])
        channel.put(record_ref)
        assert channel.get(DEADLINE_S) == record_ref
        pool.free([record_ref])
        last[0] = record_ref.record

    def close() -> None:
        channel.put(None)
        side.join()
        pool.close()

    return Link(round_trip, close, side.pid or 0, lambda: pool[Record.images][last[0]])


def _limit_side(connection: Any, answers: Any) -> None:
    signal_at_parents_end(signal.SIGKILL)
    while os.read(connection.fileno(), 1) == b"x":
        os.write(answers.fileno(), b"x")


def limit(source: np.ndarray, weight: Any = None) -> Link:
    (ask_out, ask), (answer, answer_in) = SPAWN.Pipe(duplex=False), SPAWN.Pipe(duplex=False)
    side = SPAWN.Process(target=_limit_side, args=(ask_out, answer_in), daemon=True)
    side.start()
    target = np.zeros_like(source)

    def round_trip() -> None:
        np.copyto(target, source)
        os.write(ask.fileno(), b"x")
        os.read(answer.fileno(), 1)

    def close() -> None:
        os.write(ask.fileno(), b"q")
        side.join()

    return Link(round_trip, close, side.pid or 0, lambda: target)


# --- queues and pipes -----------------------------------------------------------------------------------------------


def _queue_side(queue: Any, done: Any, weight: Any) -> None:
    def receive() -> np.ndarray | None:
        item = queue.get()
        return item if item is None or isinstance(item, np.ndarray) else item.numpy()

    consume(receive, done.release, weight)


def _queue_link(
    context: Any, put: Callable[[Any], None], queue: Any, weight: Any, payload: Callable[[], np.ndarray]
) -> Link:
    done = context.Semaphore(0)
    side = context.Process(target=_queue_side, args=(queue, done, weight), daemon=True)
    side.start()

    def round_trip() -> None:
        put(queue)
        assert done.acquire(timeout=DEADLINE_S)

    def close() -> None:
        queue.put(None)
        side.join()

    return Link(round_trip, close, side.pid or 0, payload)


def mp_queue(source: np.ndarray, weight: Any = None) -> Link:
    return _queue_link(SPAWN, lambda queue: queue.put(source), SPAWN.Queue(4), weight, lambda: source)


def torch_queue(source: np.ndarray, weight: Any = None) -> Link:
    """Return a transport with a reused pool of shared tensors, so that no segment is created during a round trip."""
    import torch
    import torch.multiprocessing as tmp

    torch.set_num_threads(1)
    pool = [torch.from_numpy(source).clone().share_memory_() for _ in range(4)]
    turn = [0]

    def put(queue: Any) -> None:
        turn[0] = (turn[0] + 1) % len(pool)
        if weight is not None:
            draw(pool[turn[0]].numpy())
        queue.put(pool[turn[0]])

    context: Any = tmp.get_context("spawn")
    return _queue_link(context, put, context.Queue(4), weight, lambda: pool[turn[0]].numpy())


def _pipe_side(connection: Any, weight: Any) -> None:
    def receive() -> np.ndarray | None:
        data = connection.recv_bytes()
        return np.frombuffer(data, np.uint8) if len(data) > 1 else None

    consume(receive, lambda: connection.send_bytes(b"k"), weight)


def pipe(source: np.ndarray, weight: Any = None) -> Link:
    connection, theirs = SPAWN.Pipe()
    side = SPAWN.Process(target=_pipe_side, args=(theirs, weight), daemon=True)
    side.start()

    def round_trip() -> None:
        connection.send_bytes(source)
        connection.recv_bytes()

    def close() -> None:
        connection.send_bytes(b"x")
        side.join()

    return Link(round_trip, close, side.pid or 0, lambda: source)


# --- Ray ------------------------------------------------------------------------------------------------------------


def ray_transports() -> dict[str, Callable[[np.ndarray], Link]]:
    """Start a local Ray cluster and return its two transports."""
    import asyncio

    import ray

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=512 << 20, log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Consumer:
        def take(self, payload: np.ndarray) -> int:
            return check(payload)

        def take_from(self, broker: Any) -> int:
            return self.take(ray.get(broker.get.remote()))

    @ray.remote(num_cpus=0)
    class Broker:
        """Ray actor with asyncio queues through which items are passed by value, like RLinf's channel worker."""

        def __init__(self) -> None:
            self.queue: asyncio.Queue[Any] = asyncio.Queue(4)

        async def put(self, item: Any) -> None:
            await self.queue.put(item)

        async def get(self) -> Any:
            return await self.queue.get()

    def link(round_trip: Callable[[], None], actors: list[Any], source: np.ndarray) -> Link:
        return Link(round_trip, lambda: [ray.kill(a) for a in actors] and None, 0, lambda: source)

    def store(source: np.ndarray) -> Link:
        consumer = Consumer.remote()
        return link(lambda: ray.get(consumer.take.remote(ray.put(source))), [consumer], source)

    def broker(source: np.ndarray) -> Link:
        consumer, middle = Consumer.remote(), Broker.remote()

        def round_trip() -> None:
            taken = consumer.take_from.remote(middle)
            ray.get(middle.put.remote(source))
            ray.get(taken)

        return link(round_trip, [consumer, middle], source)

    return {"Ray object store": store, "Ray broker actor": broker}


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(transports: dict[str, Callable[..., Link]], size: int, *, turns: int, budget_s: float) -> dict[str, float]:
    """Return the seconds per round trip of each transport."""
    source = np.random.default_rng(0).integers(0, 200, size, dtype=np.uint8)
    links = {name: make(source) for name, make in transports.items()}
    medians: dict[str, list[float]] = {name: [] for name in links}
    for turn in range(turns + 1):
        for name, link in links.items():
            times: list[float] = []
            end = time.perf_counter() + (budget_s if turn else 0.0)  # the first turn warms up
            while not times or (time.perf_counter() < end and len(times) < 2000):
                started = time.perf_counter()
                link.round_trip()
                times.append(time.perf_counter() - started)
            if turn:
                medians[name].append(statistics.median(times))
    for link in links.values():
        link.close()
    return {name: min(values) for name, values in medians.items()}


def draw(out: np.ndarray) -> None:
    """Render a new image in place."""
    np.random.default_rng().random(out=out.view(np.float64))


def count_copies(make: Callable[..., Link], size: int) -> dict[str, float]:
    """Return the copies of one observation in memory and in the kernel's counters."""
    source, weight = np.empty(size, np.uint8), SPAWN.Value("q", 0)
    link = make(source, weight)
    for _ in range(2):
        draw(source)
        before = _through_kernel(link.pid)
        link.round_trip()
    kernel = (_through_kernel(link.pid) - before) / size
    middle = link.payload()[size // 2 : size // 2 + 48]
    hidden = (~middle).tobytes().hex()  # inverted: the thing looked for must not lie in memory by being looked for
    words = [sys.executable, str(Path(__file__).with_name("copies.py")), hidden, str(os.getpid()), str(link.pid)]
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1))
    places = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    link.close()
    return {"places": places, "kernel": kernel, "consumer": weight.value / size}


def _through_kernel(consumer: int) -> int:
    """Return the bytes that both sides have written with system calls."""
    return sum(
        int(line.split()[1])
        for pid in (os.getpid(), consumer)
        for line in Path(f"/proc/{pid}/io").read_text().splitlines()
        if line.startswith("wchar")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.15, help="seconds of each measurement")
    args = parser.parse_args()
    transports: dict[str, Callable[..., Link]] = {
        "ours": arena,
        "ours, copied": partial(arena, copied=True),
        "memcpy + two wake-ups": limit,
        "multiprocessing.Queue": mp_queue,
        "torch.multiprocessing.Queue, pooled": torch_queue,
        "pipe": pipe,
    }
    counted = {name: count_copies(transports[name], SIZES[BAR]) for name in transports if "memcpy" not in name}
    if not args.no_ray:
        transports |= ray_transports()
    goals = {
        "memcpy + two wake-ups": 0.67, "multiprocessing.Queue": 20.0, "torch.multiprocessing.Queue, pooled": 4.0,
        "Ray broker actor": 40.0,
    }  # fmt: skip
    rows = []
    for label in args.sizes:
        size = SIZES[label]
        seconds = measure(transports, size, turns=args.turns, budget_s=args.budget)
        for name, value in seconds.items():
            ratio = value / seconds["ours"]
            print(f"{label:>7}  {name:36} {value * 1e6:10.1f} us {size / value / 1e9:8.2f} GB/s  {ratio:8.2f} x ours")
            if name == "ours":
                continue
            goal = goals.get(name) if label == BAR else None
            for unit, of in (("us", lambda s: s * 1e6), ("GB/s", lambda s, size=size: size / s / 1e9)):
                ours, theirs = round(of(seconds["ours"]), 3), round(of(value), 3)
                row = {"what": f"round trip {label}", "unit": unit, "ours": ours, "against": name, "theirs": theirs}
                rows.append(row | {"ratio": round(ratio, 3), "goal": goal})
    for name, found in counted.items():
        copies = found["places"] + round(found["kernel"])
        print(
            f"copies  {name:36} {copies}: {found['places']} places, {found['kernel']:.3f} payloads through the kernel, "
            f"{found['consumer']:.3f} in the consumer's heap"
        )
        if name != "ours":
            ours = counted["ours"]["places"] + round(counted["ours"]["kernel"])
            row = {"what": "copies per observation", "unit": "copies", "ours": ours, "against": name, "theirs": copies}
            rows.append(row | {"ratio": round(copies / ours, 3), "goal": None})
    if args.json:
        machine = {
            "platform": platform.platform(), "cores": available_cores(), "python": platform.python_version(),
            "numpy": np.__version__, "load": os.getloadavg()[0],
        }  # fmt: skip
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
