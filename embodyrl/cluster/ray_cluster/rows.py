"""Transfer of record fields between the driver's memory and the mirrors on other hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodyrl.channels.arena import Arena, RecordState, get_record_indices
from embodyrl.channels.layout import BUCKET, SEQUENCE, STATE
from embodyrl.channels.messages import RecordAccess, Request, ScoreRequest, ValueRequest

RANK_SPLIT_REQUESTS = (ValueRequest, ScoreRequest)
"""Requests whose records the ranks divide among themselves; each rank writes a part."""
_UNWRITTEN_BYTE = 0xFF
"""Byte that fills unwritten fields; as float32, the bytes are a NaN that no computation returns."""
HEADER = (SEQUENCE, STATE)
"""Fields with the state of a record, which are sent with every record."""
Pools = tuple[Arena, ...]
"""Shared memory of a worker, or its mirrors on another host: the arena and, if used, the weight buckets."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Fields of n records, for transfer between hosts."""

    pool: int
    """Index of the memory pool in `Pools`."""
    records: np.ndarray
    fields: dict[str, np.ndarray]
    """Arrays [n, ...] by field name; for a weight bucket, only the used bytes."""


def copy_in(pools: Pools, request: Request) -> list[Rows]:
    """Return the record fields that a worker reads to execute a request."""
    return [
        _copy(pools[access.pool], access, get_record_indices(access.record_refs), HEADER)
        for access in request.get_read_access()
    ]


def copy_out(pools: Pools, request: Request) -> list[Rows]:
    """Return the record fields that a worker wrote while executing a request.

    The result contains only complete records: all ranks receive the request to publish weights, but only one writes.
    For a request in `RANK_SPLIT_REQUESTS`, the result contains only the records that this rank wrote since the call of
    `mark_unwritten`.
    """
    rows = []
    for access in request.get_write_access():
        records, arena = get_record_indices(access.record_refs), pools[access.pool]
        written = arena[STATE][records] == RecordState.READY
        if isinstance(request, RANK_SPLIT_REQUESTS):
            written &= ~np.logical_and.reduce(
                [_get_smallest_bytes(arena[name][records]) == _UNWRITTEN_BYTE for name in access.fields or ()]
            )
        rows.append(_copy(arena, access, records[written]))
    return rows


def mark_unwritten(pools: Pools, request: Request) -> None:
    """Fill fields with `_UNWRITTEN_BYTE` before a request in `RANK_SPLIT_REQUESTS`, for `copy_out`."""
    if isinstance(request, RANK_SPLIT_REQUESTS):
        for access in request.get_write_access():
            for name in access.fields or ():
                values = pools[access.pool][name]
                values[get_record_indices(access.record_refs)] = np.full(
                    values.itemsize, _UNWRITTEN_BYTE, np.uint8
                ).view(values.dtype)[0]


def _get_smallest_bytes(values: np.ndarray) -> np.ndarray:
    """Return the smallest byte [n] of each record, which is `_UNWRITTEN_BYTE` only if the whole record is unwritten."""
    flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    return flat.min(axis=1, initial=_UNWRITTEN_BYTE)


def write_rows(pools: Pools, rows: Sequence[Rows]) -> None:
    """Write record fields that another host sent into the shared-memory pools."""
    for part in rows:
        for name, values in part.fields.items():
            field = pools[part.pool][name]
            if values.shape[1:] == field.shape[1:]:
                field[part.records] = values
            else:
                field[part.records, : values.shape[1]] = values


def _copy(arena: Arena, access: RecordAccess, records: np.ndarray, header: tuple[str, ...] = ()) -> Rows:
    names = (field.name for field in arena.layout.fields) if access.fields is None else access.fields
    used = {BUCKET: (records, slice(access.length))}
    return Rows(access.pool, records, {name: arena[name][used.get(name, records)] for name in (*names, *header)})
