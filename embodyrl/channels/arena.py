"""Pool of transition records in shared memory, used by all workers of a host.

The segment is an anonymous memory file. Without a name in /dev/shm it cannot leak, and the size limit of /dev/shm (64
MiB in many containers) does not apply. Other processes attach through the owner's /proc entry.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from embodyrl.channels.layout import OBSERVATION, SEQUENCE, STATE, Record, RecordLayout, decode_instruction
from embodyrl.errors import EmbodyError, StaleRecordError
from embodyrl.files import available_bytes
from embodyrl.types import IntArray, Observation


class RecordState:
    """States of a record (free, allocated, being written, readable), as plain ints for speed."""

    FREE, ALLOCATED, WRITING, READY = range(4)


# A record reference is the handle of one record until the record is freed: the low bits are the record's index in the
# arena, the high bits a sequence number, so all record references of an arena are unique. A signed 64-bit integer has
# room for the index of 67 million records and for 10^11 sequence numbers.
_RECORD_BITS = 26
_RECORD_MASK = (1 << _RECORD_BITS) - 1


RecordRefs = Sequence[int] | npt.NDArray[np.int64]


def get_record_indices(record_refs: RecordRefs) -> npt.NDArray[np.int64]:
    """Return the indices [n] of record references [n], which may be stale, in the first axis of each field."""
    return np.asarray(record_refs, np.int64) & _RECORD_MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaHandle:
    """Data with which another process maps an arena (see `Arena.attach`)."""

    path: str
    """Path of the owner's file descriptor in /proc."""
    layout: RecordLayout
    capacity: int


class ArenaFullError(EmbodyError):
    """No record of the arena is free: more records are in use than the run plan reserved."""


class Fields(Protocol):
    """Mapping from field names to arrays, with one entry per record along the first axis."""

    def __getitem__(self, field: str, /) -> npt.NDArray[Any]:
        """Return the array [n, ...] of a field for n records."""
        ...


class Arena:
    """Shared memory with a fixed number of records of one layout, and a list of free records.

    The owner (the process that created the arena) allocates and frees; any attached process may write and read records
    by record reference. Fields are numpy arrays [capacity, *shape], accessed by `arena[Record.images]`.
    """

    def __init__(self, buffer: mmap.mmap, layout: RecordLayout, capacity: int, handle: ArenaHandle, fd: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.handle = handle
        self._fd = fd
        offsets, _ = layout.offsets(capacity)
        # One array per field: gathering a batch is one indexing operation per field.
        self._fields: dict[str, npt.NDArray[Any]] = {
            f.name: np.ndarray((capacity, *f.shape), dtype=f.dtype, buffer=buffer, offset=offsets[f.name])
            for f in layout.all_fields
        }
        self._free, self.num_free = np.arange(capacity - 1, -1, -1), capacity
        """Stack of record numbers, and number of free records (owner only), which are the first in the stack."""
        self._next_sequence = 1

    @classmethod
    def create(cls, layout: RecordLayout, capacity: int, fix: str = "Free memory on this host.") -> Arena:
        """Create an arena with memory for `capacity` records; `fix` is the last sentence of the error.

        Raises:
            EmbodyError: the host has not enough free memory; the message contains the required size.
        """
        _, size = layout.offsets(capacity)
        available = available_bytes()
        # A record reference has a limited number of bits for the record.
        if size > available or capacity > _RECORD_MASK:
            raise EmbodyError(
                f"The record arena needs {size / 2**30:.2f} GiB ({capacity} records of "
                f"{layout.record_bytes / 2**10:.0f} KiB), but only {available / 2**30:.2f} GiB of memory is free. "
                f"{fix}"
            )
        fd = os.memfd_create("embodyrl-arena", os.MFD_CLOEXEC)
        # Reserve the memory here: otherwise, a lack of memory would later be a SIGBUS in a worker.
        os.posix_fallocate(fd, 0, size)
        handle = ArenaHandle(path=f"/proc/{os.getpid()}/fd/{fd}", layout=layout, capacity=capacity)
        return cls(mmap.mmap(fd, size), layout, capacity, handle, fd)

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Map an arena that another process owns.

        Raises:
            StaleRecordError: the owner exited.
        """
        try:
            fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StaleRecordError(f"Cannot attach to the arena {handle.path}; its owner exited: {error}.") from error
        _, size = handle.layout.offsets(handle.capacity)
        return cls(mmap.mmap(fd, size), handle.layout, handle.capacity, handle, fd)

    def __getitem__(self, field: str) -> npt.NDArray[Any]:
        return self._fields[field]

    def allocate(self) -> int:
        """Allocate a free record and return its record reference (owner only).

        Raises:
            ArenaFullError: no record is free.
        """
        return int(self.allocate_all(1)[0])

    def allocate_all(self, count: int) -> npt.NDArray[np.int64]:
        """Allocate `count` free records and return their record references [count] (owner only)."""
        if count > self.num_free:
            raise ArenaFullError(
                f"Cannot allocate {count} records: {self.num_free} of {self.capacity} are free. Report this bug."
            )
        self.num_free -= count
        # Reversed, so that record references are in the order of single allocations.
        records = self._free[self.num_free : self.num_free + count][::-1].copy()
        sequence_numbers = np.arange(self._next_sequence, self._next_sequence + count)
        self._next_sequence += count
        self._fields[STATE][records], self._fields[SEQUENCE][records] = RecordState.ALLOCATED, sequence_numbers
        # Sequence numbers are unique, so a stale record reference is detected.
        return records | sequence_numbers << _RECORD_BITS

    def free(self, record_refs: RecordRefs) -> None:
        """Free records (owner only); their record references become stale.

        This includes records whose writer died while writing.
        """
        records = self._check_record_refs(record_refs)
        # A record that is twice on the free list would be allocated twice.
        ordered = np.sort(records)
        assert (ordered[1:] != ordered[:-1]).all(), "a record was freed twice"
        self._fields[STATE][records] = RecordState.FREE
        self._free[self.num_free : self.num_free + len(records)] = records
        self.num_free += len(records)

    @contextmanager
    def write(self, record_ref: int) -> Iterator[int]:
        """Open a record for writing and yield its index; the record becomes readable if the block does not raise."""
        with self.write_all([record_ref]) as records:
            yield int(records[0])

    @contextmanager
    def write_all(self, record_refs: RecordRefs) -> Iterator[npt.NDArray[np.int64]]:
        """Open several records for writing and yield their indices [n] (see `write`)."""
        records, state = self._check_record_refs(record_refs), self._fields[STATE]
        state[records] = RecordState.WRITING
        yield records
        # Not in a `finally`: after an error the record stays unreadable until it is freed.
        state[records] = RecordState.READY

    def read(self, record_refs: RecordRefs) -> npt.NDArray[np.int64]:
        """Check that the records of record references [n] are readable, and return the record indices [n].

        Raises:
            StaleRecordError: a record was freed, or not completely written.
        """
        records = self._check_record_refs(record_refs)
        not_ready = records[self._fields[STATE].take(records) != RecordState.READY]
        for record in not_ready[:1].tolist():
            state = ("FREE", "ALLOCATED", "WRITING", "READY")[self._fields[STATE][record]]
            raise StaleRecordError(
                f"Record {record} in shared memory is not readable: its state is {state}, not READY. Report this bug."
            )
        return records

    def _check_record_refs(self, record_refs: RecordRefs) -> npt.NDArray[np.int64]:
        """Return the record indices of record references after checking that no record reference is stale."""
        numbers = np.asarray(record_refs, np.int64)
        records = numbers & _RECORD_MASK
        free, current = self._fields[STATE].take(records) == RecordState.FREE, self._fields[SEQUENCE].take(records)
        for i in np.flatnonzero(free | (current != numbers >> _RECORD_BITS))[:1].tolist():
            reason = "was freed" if free[i] else f"has sequence {current[i]}"
            raise StaleRecordError(
                f"The reference to shared record {records[i]}, sequence {numbers[i] >> _RECORD_BITS}, is stale: "
                f"the record {reason}. Report this bug."
            )
        return records

    def close(self) -> None:
        """Release this process's mapping of the arena; the last release frees the memory. Idempotent."""
        self._fields = {}
        if self._fd >= 0:
            # The mapping exists as long as an array references it; the fields above are the references of this object.
            os.close(self._fd)
            self._fd = -1


def read_instructions(fields: Fields, records: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Return the instruction of each of the n records."""
    encoded = fields[Record.instruction].take(records, 0)
    # Common case: one instruction for all records; comparing 64-bit numbers is far faster than decoding all.
    numbers = encoded.view(np.uint64)
    all_equal = len(encoded) > 0 and (numbers == numbers[0]).all()
    return (decode_instruction(encoded[0]),) * len(encoded) if all_equal else tuple(map(decode_instruction, encoded))


def read_observation(fields: Fields, records: IntArray, *, resized: bool = False) -> Observation:
    """Gather the observations of n records as a batch. `resized`: use the images that inference resized, if stored."""
    # `take` gathers short rows ten times faster than an index, but takes as long for empty rows.
    images = fields[Record.images]
    if resized and fields[Record.resized].size:
        images = fields[Record.resized]
    return Observation(
        images=images.take(records, 0) if images.size else images[records],
        state=fields[Record.observed_state].take(records, 0),
        instructions=read_instructions(fields, records),
    )


def hash_observations(fields: Fields, records: IntArray) -> IntArray:
    """Return a 64-bit hash of the observation of each of the n records, to find equal states."""
    parts = [fields[name] for name in OBSERVATION]
    digests = [hashlib.blake2b(b"".join(p[r].tobytes() for p in parts), digest_size=8).digest() for r in records]
    return np.frombuffer(b"".join(digests), dtype=np.int64)
