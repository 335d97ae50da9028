"""Files that matter, written complete or not at all; streams that nobody reads; and the free memory."""

import io
import json
import os
import re
import select
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_LOG_LIMIT, _LOG_KEPT = 16 << 20, 1 << 20
SCRATCH = ".tmp-"
"""How names of files that are not complete begin."""
CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def by_number(name: Path | str) -> list[str | int]:
    """Sort key of names and paths: runs of digits count as numbers, so that step_1000000 follows step_999999.

    >>> sorted(["step_10", "step_9"], key=by_number)
    ['step_9', 'step_10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", str(name))]


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Another name beside `target` to write a file or a folder under; complete, it becomes `target`.

    A failure leaves nothing behind.
    """
    scratch = target.with_name(f"{SCRATCH}{os.getpid()}-{target.name}")
    try:
        yield scratch
        os.replace(scratch, target)
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write complete and flushed to disk, or not at all."""
    with replacing(path) as scratch, open(scratch, "wb") as f:
        f.write(content.encode("utf-8") if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


def json_text(data: Any) -> str:
    """Indented JSON. It has no word for what is no finite number, which becomes null, nor for objects: their text."""
    plain = json.loads(json.dumps(data, default=str), parse_constant=lambda name: None)
    return json.dumps(plain, indent=2) + "\n"


def cap_log(path: Path) -> None:
    """Keep the last MiB of a log above 16 MiB; whoever has it open for appending simply goes on."""
    size = path.stat().st_size if path.exists() else 0  # somebody may have tidied up
    if size > _LOG_LIMIT:
        with path.open("r+b") as file:
            file.seek(size - _LOG_KEPT)
            tail = file.read()
            file.seek(0)
            file.write(f"... {size - _LOG_KEPT} bytes were dropped here\n".encode() + tail)
            file.truncate()


def has_room(stream: TextIO, timeout_s: float) -> bool:
    """Whether a write of up to 4096 bytes will not block: a pipe that nobody reads blocks its writer for ever."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (io.UnsupportedOperation, ValueError):
        return True  # in memory, or closed: then the write itself says so
    return bool(poll.poll(timeout_s * 1000))


def _control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups and of all above them, whose limits hold as well.

    True: of version 2. A container sees its own group as the root, a Slurm job lies below several others.
    """
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            yield folder, not controllers
            if folder == root:
                break


def available_cores() -> int:
    """Count the cores that this process may use: its affinity, or a smaller quota of a control group (rounded up)."""
    cores = len(os.sched_getaffinity(0))
    for folder, unified in _control_groups("cpu"):
        files = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join((folder / name).read_text() for name in files if (folder / name).is_file()).split()
        if len(words) == 2 and words[0] not in ("max", "-1"):
            cores = min(cores, -(-int(words[0]) // int(words[1])))
    return max(cores, 1)


def available_bytes() -> int:
    """Return the memory that the host and all control groups still give."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    assert match is not None, "/proc/meminfo without MemAvailable"
    available = int(match[1]) * 1024
    for folder, unified in _control_groups("memory"):
        names = ("max", "current", "stat") if unified else ("limit_in_bytes", "usage_in_bytes", "stat")
        limit, used, stat = (folder / f"memory.{name}" for name in names)
        if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
            # What files left in memory goes where programs want it, as MemAvailable has it for the host.
            text = stat.read_text() if stat.is_file() else ""
            cached = re.search(rf"^{'' if unified else 'total_'}inactive_file (\d+)$", text, re.MULTILINE)
            available = min(
                available, int(limit.read_text()) - int(used.read_text()) + (int(cached[1]) if cached else 0)
            )
    return max(available, 0)
