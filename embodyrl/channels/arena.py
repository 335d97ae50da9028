"""A pool of transition records in memory that all workers of a host share.

The segment is an anonymous memory file: it has no name in /dev/shm, so nothing can be left behind however the run
ends, and the size limit of /dev/shm (64 MiB in many containers) does not apply. Other processes attach through the
owner's /proc entry.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from embodyrl.channels.layout import SEQUENCE, STATE, RecordLayout
from embodyrl.errors import EmbodyError, StaleTicketError
from embodyrl.files import available_bytes


class RecordState(IntEnum):
    """Life of a record: free list, handed out, being written, readable."""

    FREE = 0
    ALLOCATED = 1
    WRITING = 2
    READY = 3


class Ticket(NamedTuple):
    """The right to use one record: stale as soon as the record is freed."""

    record: int
    """Index of the record in the arena."""
    sequence: int
    """How many tickets were handed out before, plus one: no two tickets of an arena have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaHandle:
    """What another process needs to attach."""

    path: str
    """Of the owner's file descriptor, below /proc."""
    layout: RecordLayout
    capacity: int


class ArenaFullError(EmbodyError):
    """More records are in use than the run was planned for."""


class Fields(Protocol):
    """Records, field by field."""

    def __getitem__(self, field: str, /) -> npt.NDArray[Any]:
        """[n, ...] a field of all records."""
        ...


class Arena:
    """Fixed-size records with a free list.

    The owner (the process that created the arena) allocates and frees; any process that attached may write and read
    records it holds tickets for. Fields are numpy arrays [capacity, *shape] through `arena[Record.images]`.
    """

    def __init__(self, buffer: mmap.mmap, layout: RecordLayout, capacity: int, handle: ArenaHandle, fd: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.handle = handle
        self._fd = fd
        offsets, _ = layout.offsets(capacity)
        self._fields: dict[str, npt.NDArray[Any]] = {
            f.name: np.ndarray((capacity, *f.shape), dtype=f.dtype, buffer=buffer, offset=offsets[f.name])
            for f in layout.all_fields
        }
        # Headers are read and written one number at a time: a memoryview does that many times faster than numpy.
        self._sequence, self._state = self._fields[SEQUENCE].data, self._fields[STATE].data
        self._free = list(range(capacity - 1, -1, -1))
        self._next_sequence = 1

    @classmethod
    def create(cls, layout: RecordLayout, capacity: int) -> Arena:
        """Reserve memory for `capacity` records.

        Raises:
            EmbodyError: the host has not enough free memory; says how much is needed.
        """
        _, size = layout.offsets(capacity)
        available = available_bytes()
        if size > available:
            raise EmbodyError(
                f"The record arena needs {size / 2**30:.2f} GiB ({capacity} records of "
                f"{layout.record_bytes / 2**10:.0f} KiB), but only {available / 2**30:.2f} GiB of memory is free. "
                "Lower env.train.total_num_envs, "
                "algorithm.rollout_epoch or the camera size."
            )
        fd = os.memfd_create("embodyrl-arena", os.MFD_CLOEXEC)
        # Reserving now turns a lack of memory into an error here instead of a SIGBUS in some worker later.
        os.posix_fallocate(fd, 0, size)
        handle = ArenaHandle(path=f"/proc/{os.getpid()}/fd/{fd}", layout=layout, capacity=capacity)
        return cls(mmap.mmap(fd, size), layout, capacity, handle, fd)

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Map an arena that another process owns.

        Raises:
            StaleTicketError: the owner is gone.
        """
        try:
            fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StaleTicketError(f"Cannot attach to the record arena {handle.path}: {error}.") from error
        _, size = handle.layout.offsets(handle.capacity)
        return cls(mmap.mmap(fd, size), handle.layout, handle.capacity, handle, fd)

    def __getitem__(self, field: str) -> npt.NDArray[Any]:
        return self._fields[field]

    @property
    def num_free(self) -> int:
        """Records that nobody holds a ticket for (owner only)."""
        return len(self._free)

    def allocate(self) -> Ticket:
        """Take a record from the free list (owner only).

        Raises:
            ArenaFullError: no record is free.
        """
        if not self._free:
            raise ArenaFullError(f"All {self.capacity} records of the arena are in use.")
        record = self._free.pop()
        self._state[record] = RecordState.ALLOCATED
        ticket = Ticket(record, self._next_sequence)
        self._sequence[record] = ticket.sequence
        self._next_sequence += 1
        return ticket

    def free(self, tickets: Sequence[Ticket]) -> None:
        """Give records back (owner only); their tickets become stale.

        A record whose writer died while writing is freed the same way: the next holder's ticket has another number.
        """
        for ticket in tickets:
            self._check(ticket)
            self._state[ticket.record] = RecordState.FREE
            self._free.append(ticket.record)

    @contextmanager
    def write(self, ticket: Ticket) -> Iterator[int]:
        """Hold a record while writing its observation; it becomes readable at the end, not if the body raises."""
        self._check(ticket)
        self._state[ticket.record] = RecordState.WRITING
        yield ticket.record
        self._state[ticket.record] = RecordState.READY

    @contextmanager
    def write_all(self, tickets: Sequence[Ticket]) -> Iterator[npt.NDArray[np.int64]]:
        """`write` for many records at once."""
        records, state = self._valid(tickets), self._fields[STATE]
        state[records] = RecordState.WRITING
        yield records
        state[records] = RecordState.READY

    def read(self, tickets: Sequence[Ticket]) -> npt.NDArray[np.int64]:
        """Return the record numbers of readable tickets, to index fields with.

        Raises:
            StaleTicketError: a record was freed since, or was never completely written.
        """
        records = self._valid(tickets)
        for index in np.flatnonzero(self._fields[STATE][records] != RecordState.READY)[:1].tolist():
            state = RecordState(self._state[tickets[index].record]).name
            raise StaleTicketError(f"{tickets[index]} is not readable: state {state}.")
        return records

    def _valid(self, tickets: Sequence[Ticket]) -> npt.NDArray[np.int64]:
        """Record numbers of tickets, none of which is stale."""
        records = np.array([ticket.record for ticket in tickets], dtype=np.int64)
        wanted = np.array([ticket.sequence for ticket in tickets], dtype=np.uint64)
        stale = (self._fields[STATE][records] == RecordState.FREE) | (self._fields[SEQUENCE][records] != wanted)
        for index in np.flatnonzero(stale)[:1].tolist():
            self._check(tickets[index])
        return records

    def _check(self, ticket: Ticket) -> None:
        free = self._state[ticket.record] == RecordState.FREE
        if free or self._sequence[ticket.record] != ticket.sequence:
            now = "free" if free else f"at sequence {self._sequence[ticket.record]}"
            raise StaleTicketError(f"{ticket} is stale: the record is {now}.")

    def close(self) -> None:
        """Drop this process's mapping; the memory is freed when the last process has done so. Idempotent."""
        self._fields = {}
        self._sequence = self._state = memoryview(b"")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
