"""Atomic file writes, size-limited reads of untrusted files, and the cores and memory available to this process."""

import errno
import io
import json
import os
import re
import secrets
import select
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_MAX_LOG_BYTES, _TRUNCATED_LOG_BYTES = 16 << 20, 1 << 20
SCRATCH = ".tmp-"
"""Prefix of the names of incomplete files."""
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def natural_sort_key(name: Path | str) -> list[str | tuple[int, str]]:
    """Return a sort key of names and paths that compares digits as numbers: step_1000000 follows step_999999.

    >>> sorted(["step_10", "step_9"], key=natural_sort_key)
    ['step_9', 'step_10']
    """
    parts = re.split("0*([0-9]+)", str(name))
    # A number is compared by its length and its digits, because `int` rejects very long numbers.
    return [(len(part), part) if index % 2 else part for index, part in enumerate(parts)]


def visible_files(folder: Path, *suffixes: str) -> list[Path]:
    """Return the files with one of the suffixes in a folder and its subfolders, sorted by `natural_sort_key`.

    Hidden files and folders contain copies and metadata of editors and operating systems, and are skipped.
    """
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file()]
    visible = (p for p in paths if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return sorted(visible, key=natural_sort_key)


@contextmanager
def replace_atomically(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `target` at the end of the block.

    The temporary file is deleted if the block raises. Its name is random, because a folder from an untrusted source
    may contain links with predictable names.
    """
    scratch = target.with_name(f"{SCRATCH}{secrets.token_hex(8)}-{target.name}")
    try:
        yield scratch
        os.replace(scratch, target)
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)


def is_full_disk(error: BaseException) -> bool:
    """Return True for disk-full errors, including wrapped errors; safetensors keeps only the error text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL_DISK:
            return True
        if any(f"os error {code}" in str(cause) for code in _FULL_DISK):
            return True
        cause = cause.__cause__
    return False


def describe_full_disk(error: BaseException, path: Path | str = "a file") -> str:
    """Return the message of a disk-full error; `path` names the written file if the error does not."""
    if not isinstance(error, OSError):
        return str(error)
    return f"Cannot write to {error.filename or path}: {error.strerror or error}. Free some space."


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely and flush it to disk, or write nothing."""
    with replace_atomically(path) as scratch, open(scratch, "xb") as f:
        f.write(content.encode("utf-8") if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


def remove_scratch(folder: Path) -> None:
    """Delete incomplete files of killed processes in a folder tree; call only if no process writes there."""
    for path in folder.rglob(f"{SCRATCH}*"):
        if path.is_file():
            path.unlink()


def inside(folder: Path, name: str | Path) -> Path:
    """Return the path of a file in a folder; `name` may come from untrusted metadata of the folder.

    Links are followed. In the Hugging Face cache, the files of a snapshot are links to a folder next to the snapshots.

    Raises:
        ValueError: the path leads outside the folder, or to a device or pipe.
    """
    path = folder / str(name)
    caches = (p.parent for p in folder.parents if re.search(r"/(models|datasets)--[^/]+/snapshots$", f"/{p}"))
    root = next(caches, folder)
    # Unlike `resolve`, `realpath` accepts a loop of links.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise ValueError(f"{str(name)[:200]!r} is outside the folder {folder}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path


_MAX_FILE_BYTES = 1 << 26
LONGEST_LINE = 1 << 24
"""Maximum length in bytes of the lines that `read_lines` yields."""


def read_small(path: Path) -> bytes:
    """Read a small file; the size is limited, because the file may be damaged or from an untrusted source.

    Raises:
        OSError: the file is missing, or not a regular file.
        ValueError: the file is larger than 64 MiB.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
        raise OSError(f"{path} is not a regular file")
    if status.st_size > _MAX_FILE_BYTES:
        raise ValueError(f"{path} has {status.st_size} bytes; expected at most {_MAX_FILE_BYTES}")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Read a JSON file, possibly from an untrusted source.

    Raises:
        OSError: the file is missing, or not a regular file.
        ValueError: the file is malformed, too deeply nested, or larger than 64 MiB.
    """
    try:
        return json.loads(read_small(path).decode("utf-8"))
    except RecursionError:
        raise ValueError(f"the JSON in {path} is nested too deeply") from None


def read_stream(stream: Any, most_bytes: int, timeout_s: float) -> bytes:
    """Read a response, for example from an untrusted server, to its end, with limits on size and time.

    Raises:
        OSError: the response is longer than `most_bytes`, or not complete after `timeout_s`.
    """
    received, deadline = bytearray(), time.monotonic() + timeout_s
    while part := stream.read1(1 << 16):
        received += part
        if len(received) > most_bytes:
            raise OSError(f"the response has more than {most_bytes} bytes; check the address")
        if time.monotonic() > deadline:
            raise OSError(f"the response is not complete after {timeout_s:g} s; try again")
    return bytes(received)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; lines longer than `LONGEST_LINE` are split, and holes of sparse files are skipped."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            yield line
            if len(line) == LONGEST_LINE:
                try:
                    file.seek(file.tell(), os.SEEK_DATA)
                except OSError:  # no data up to the end
                    return


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of a JSON Lines file, possibly from an untrusted source.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is malformed, or longer than `LONGEST_LINE`; the message contains its number.
    """
    # Unlike `splitlines`, this does not split at U+2028 and other line separators in a text.
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        if len(line) == LONGEST_LINE:
            raise ValueError(f"line {number} is longer than {LONGEST_LINE >> 20} MiB")
        try:
            # Some editors write a byte order mark at the start of a file.
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if b"\\ud" in line.lower():
                json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is not a character
        except (ValueError, RecursionError) as error:
            start = line.rstrip(b"\n")[:60].decode("utf-8", "replace")
            raise ValueError(f"line {number} is not JSON ({error}): {start!r}") from error
        yield number, value


VALUE_BYTES = 32
"""Assumed size of one value of a table with its copies, in bytes."""
_BATCH_ROWS = 64


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Read a Parquet file, or some of its columns, as a `pyarrow.Table`. Small files can decompress to any size.

    Raises:
        OSError: the file is missing.
        pyarrow.ArrowException: the file is damaged, or its values need more than a quarter of the free memory.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    file, limit = ParquetFile(path), available_bytes() // 4
    too_large = pa.ArrowInvalid(f"the file unpacks to more than {limit >> 20} MiB, a quarter of the free memory")
    names = file.schema_arrow.names if columns is None else columns
    schema = pa.schema([file.schema_arrow.field(name) for name in names], file.schema_arrow.metadata)
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    declared = sum(
        max(chunk.total_uncompressed_size, max(VALUE_BYTES, file.schema.column(k).length) * chunk.num_values)
        for k, chunk in [(k, group.column(k)) for group in groups for k in range(group.num_columns)]
        if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in names)
    )
    if declared > limit:
        raise too_large
    size, arrays = 0, []
    # Small batches of one column at a time, because sizes in the file may be wrong.
    for field in schema:
        parts = []
        num_rows = _choose_batch_rows(path, file, field.name, limit - size)
        if num_rows == 0:
            raise too_large
        for batch in file.iter_batches(num_rows, columns=[field.name]):
            parts.append(part := batch.column(field.name))
            size += part.nbytes + VALUE_BYTES * len(part) + _count_expanded_bytes(part)
            if size > limit:
                raise too_large
        arrays.append(pa.chunked_array(parts, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _choose_batch_rows(path: Path, file: Any, name: str, limit: int) -> int:
    """Return the number of rows of a column to read at a time; 0 if its texts need more than `limit` bytes.

    A file can contain a text once that occurs in many rows, or many times in one row.
    """
    from pyarrow.parquet import ParquetFile

    leaves = [(k, file.schema.column(k)) for k in range(len(file.schema))]
    texts = {
        k: leaf for k, leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and f"{leaf.path}.".startswith(f"{name}.")
    }
    chunks = [file.metadata.row_group(i).column(k) for i in range(file.num_row_groups) for k in texts]
    if all(chunk.total_uncompressed_size * chunk.num_values <= limit for chunk in chunks):
        return _BATCH_ROWS
    has_prefixes = any(encoding.startswith("DELTA") for chunk in chunks for encoding in chunk.encodings)
    if has_prefixes and not any(leaf.max_repetition_level for leaf in texts.values()):
        return min(_BATCH_ROWS, max(1, limit // max(chunk.total_uncompressed_size for chunk in chunks)))
    reader = ParquetFile(path, metadata=file.metadata, read_dictionary=[leaf.path for leaf in texts.values()])
    size = 0
    # One row group at a time, because the dictionaries of several row groups are not joined in nested columns.
    for group in range(file.num_row_groups):
        for batch in reader.iter_batches(64 * _BATCH_ROWS, row_groups=[group], columns=[name]):
            size += _count_expanded_bytes(batch.column(name))
            if size > limit:
                return 0
    return _BATCH_ROWS


def _count_expanded_bytes(column: Any) -> int:
    """Return the number of bytes that are added when dictionaries in a column are expanded to one value per row."""
    import pyarrow as pa
    import pyarrow.compute as compute  # type: ignore[import-untyped]

    if pa.types.is_map(column.type):
        return _count_expanded_bytes(column.keys) + _count_expanded_bytes(column.items)
    if pa.types.is_struct(column.type):
        return sum(map(_count_expanded_bytes, column.flatten()))
    if pa.types.is_nested(column.type):
        return _count_expanded_bytes(column.flatten())
    if not pa.types.is_dictionary(column.type):
        return 0
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(kind(column.type.value_type) for kind in kinds):
        return len(column) * column.dictionary.nbytes
    lengths: Any = compute.binary_length(column.dictionary)  # type: ignore[attr-defined]
    return compute.sum(lengths.take(column.indices)).as_py() or 0  # type: ignore[attr-defined]


def read_tail(path: Path, limit: int) -> bytes:
    """Return the last `limit` bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return file.read(limit)


def json_text(data: Any) -> str:
    """Return indented JSON; non-finite numbers become null, and objects without a JSON form become `str(object)`."""
    finite = json.loads(json.dumps(data, default=str), parse_constant=lambda name: None)
    return json.dumps(finite, indent=2) + "\n"


def cap_log(path: Path) -> None:
    """Truncate a log of more than 16 MiB to its last MiB; processes can continue to append."""
    size = path.stat().st_size if path.exists() else 0  # the log may have been deleted
    if size > _MAX_LOG_BYTES:
        with path.open("r+b") as file:
            file.seek(size - _TRUNCATED_LOG_BYTES)
            tail = file.read()
            file.seek(0)
            file.write(f"... {size - _TRUNCATED_LOG_BYTES} bytes were dropped here\n".encode() + tail)
            file.truncate()


def has_room(stream: TextIO, timeout_s: float) -> bool:
    """Return True if the stream accepts up to 4096 bytes within `timeout_s`; a write to a full pipe would block."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (io.UnsupportedOperation, ValueError):
        return True  # in memory or closed: the write itself raises
    return bool(poll.poll(timeout_s * 1000))


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, flag) of this process's control groups and their parent groups; the flag is True for cgroup v2.

    In a container, the root is the container's own group; a Slurm job has several parent groups.
    """
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP
        group_folder = root / path.strip("/")
        for folder in (group_folder, *group_folder.parents):
            yield folder, not controllers
            if folder == root:
                break


def available_cores() -> int:
    """Count the cores that this process may use, limited by its affinity and by control-group quotas (rounded up)."""
    cores = len(os.sched_getaffinity(0))
    for folder, is_v2 in control_groups("cpu"):
        files = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        fields = " ".join((folder / name).read_text() for name in files if (folder / name).is_file()).split()
        if len(fields) == 2 and fields[0] not in ("max", "-1"):
            cores = min(cores, -(-int(fields[0]) // int(fields[1])))
    return max(cores, 1)


def available_bytes() -> int:
    """Return the memory in bytes that this process can allocate: free memory of the host, limited by control groups."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    assert match is not None, "/proc/meminfo without MemAvailable"
    available = int(match[1]) * 1024
    for folder, is_v2 in control_groups("memory"):
        names = ("max", "current", "stat") if is_v2 else ("limit_in_bytes", "usage_in_bytes", "stat")
        limit, used, stat = (folder / f"memory.{name}" for name in names)
        if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
            # Cached files count as free memory, like in the host's MemAvailable.
            text = stat.read_text() if stat.is_file() else ""
            cached = re.search(rf"^{'' if is_v2 else 'total_'}inactive_file (\d+)$", text, re.MULTILINE)
            available = min(
                available, int(limit.read_text()) - int(used.read_text()) + (int(cached[1]) if cached else 0)
            )
    return max(available, 0)
