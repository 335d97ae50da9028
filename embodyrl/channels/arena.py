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
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from embodyrl.channels.layout import SEQUENCE, STATE, Record, RecordLayout, decode_instruction
from embodyrl.errors import EmbodyError, StaleTicketError
from embodyrl.files import available_bytes
from embodyrl.types import IntArray, Observation


class RecordState:
    """Life of a record: free list, handed out, being written, readable; plain numbers, for they are looked at often."""

    FREE, ALLOCATED, WRITING, READY = range(4)


# Room for 67 million records, and for 10^11 tickets above them in a signed number of 64 bits.
_RECORD_BITS = 26
_RECORDS = (1 << _RECORD_BITS) - 1


class Ticket(int):
    """The right to use one record: stale as soon as the record is freed. A number, so that many are an array of int64.

    The low bits are the record's index in the arena; above them stands how many tickets were handed out before, plus
    one: no two tickets of an arena are the same.
    """

    @property
    def record(self) -> int:
        """Index of the record in the arena."""
        return self & _RECORDS

    @property
    def sequence(self) -> int:
        """Number of the ticket."""
        return self >> _RECORD_BITS


Tickets = Sequence[int] | npt.NDArray[np.int64]


def records_of(tickets: Tickets) -> npt.NDArray[np.int64]:
    """The records [n] of tickets [n], to index fields with, whether these are valid or not."""
    return np.asarray(tickets, np.int64) & _RECORDS


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
        # One array per field and not per record: a batch is then one indexing operation on each field.
        self._fields: dict[str, npt.NDArray[Any]] = {
            f.name: np.ndarray((capacity, *f.shape), dtype=f.dtype, buffer=buffer, offset=offsets[f.name])
            for f in layout.all_fields
        }
        # A stack: the first `_num_free` are free.
        self._free, self._num_free = np.arange(capacity - 1, -1, -1), capacity
        self._next_sequence = 1

    @classmethod
    def create(cls, layout: RecordLayout, capacity: int) -> Arena:
        """Reserve memory for `capacity` records.

        Raises:
            EmbodyError: the host has not enough free memory; says how much is needed.
        """
        _, size = layout.offsets(capacity)
        available = available_bytes()
        # A ticket has room for n record numbers only.
        if size > available or capacity > _RECORDS:
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
        return self._num_free

    def allocate(self) -> Ticket:
        """Take a record from the free list (owner only).

        Raises:
            ArenaFullError: no record is free.
        """
        return Ticket(self.allocate_all(1)[0])

    def allocate_all(self, count: int) -> npt.NDArray[np.int64]:
        """As `allocate`, for many records; returns their tickets [count]."""
        if count > self._num_free:
            raise ArenaFullError(f"All {self.capacity} records of the arena are in use.")
        self._num_free -= count
        # Reversed, so that tickets of one call are in the order in which they would be handed out one by one.
        records = self._free[self._num_free : self._num_free + count][::-1].copy()
        sequences = np.arange(self._next_sequence, self._next_sequence + count)
        self._next_sequence += count
        self._fields[STATE][records], self._fields[SEQUENCE][records] = RecordState.ALLOCATED, sequences
        # The sequence never repeats, so a ticket of an earlier holder can be told from that of the present one.
        return records | sequences << _RECORD_BITS

    def free(self, tickets: Tickets) -> None:
        """Give records back (owner only); their tickets become stale.

        A record whose writer died while writing is freed the same way: the next holder's ticket has another number.
        """
        records = self._valid(tickets)
        # Twice on the free list, a record would be given to two holders.
        assert len(np.unique(records)) == len(records), "a record is given back twice"
        self._fields[STATE][records] = RecordState.FREE
        self._free[self._num_free : self._num_free + len(records)] = records
        self._num_free += len(records)

    @contextmanager
    def write(self, ticket: int) -> Iterator[int]:
        """Hold a record while writing its observation; it becomes readable at the end, not if the body raises."""
        with self.write_all([ticket]) as records:
            yield int(records[0])

    @contextmanager
    def write_all(self, tickets: Tickets) -> Iterator[npt.NDArray[np.int64]]:
        """`write` for many records at once."""
        records, state = self._valid(tickets), self._fields[STATE]
        state[records] = RecordState.WRITING
        yield records
        # Not in a `finally`: after an error the record stays unreadable, until it is freed.
        state[records] = RecordState.READY

    def read(self, tickets: Tickets) -> npt.NDArray[np.int64]:
        """Return the record numbers of readable tickets, to index fields with.

        Raises:
            StaleTicketError: a record was freed since, or was never completely written.
        """
        records = self._valid(tickets)
        unready = records[self._fields[STATE][records] != RecordState.READY]
        for record in unready[:1].tolist():
            state = ("FREE", "ALLOCATED", "WRITING", "READY")[self._fields[STATE][record]]
            raise StaleTicketError(f"Record {record} is not readable: state {state}.")
        return records

    def _valid(self, tickets: Tickets) -> npt.NDArray[np.int64]:
        """Record numbers of tickets, none of which is stale."""
        numbers = np.asarray(tickets, np.int64)
        records = numbers & _RECORDS
        free, now = self._fields[STATE][records] == RecordState.FREE, self._fields[SEQUENCE][records]
        for i in np.flatnonzero(free | (now != numbers >> _RECORD_BITS))[:1].tolist():
            what = "free" if free[i] else f"at sequence {now[i]}"
            raise StaleTicketError(
                f"The ticket of record {records[i]}, sequence {numbers[i] >> _RECORD_BITS}, is stale: the record is "
                f"{what}."
            )
        return records

    def close(self) -> None:
        """Drop this process's mapping; the memory is freed when the last process has done so. Idempotent."""
        self._fields = {}
        if self._fd >= 0:
            # The mapping lives for as long as an array refers to it; dropping the fields above lets go of our part.
            os.close(self._fd)
            self._fd = -1


def read_instructions(fields: Fields, records: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """The instructions [n] of some records."""
    words = fields[Record.instruction][records]
    # Mostly one task for all: one comparison is a hundred times cheaper than as many texts.
    same = len(words) > 0 and words.tobytes() == words[0].tobytes() * len(words)
    return (decode_instruction(words[0]),) * len(words) if same else tuple(map(decode_instruction, words))


def read_observation(fields: Fields, records: IntArray) -> Observation:
    """Gather a batch of stored observations."""
    return Observation(
        images=fields[Record.images][records],
        state=fields[Record.observed_state][records],
        instructions=read_instructions(fields, records),
    )
