"""Records between hosts: what a request's worker must see, and what it has changed when it is done.

Within a host workers share the arena, and the buckets for new weights. A worker on another host holds mirrors of them:
the rows that a request reads travel with the request, the rows that it wrote come back with its replies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodyrl.channels.arena import Arena, RecordState, records_of
from embodyrl.channels.layout import SEQUENCE, STATE
from embodyrl.workers.messages import Request, Use

Pools = tuple[Arena, ...]
"""What a worker shares with the driver, or mirrors of it: the arena and, where there are any, the buckets."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some fields of some records."""

    pool: int
    """Index in `Pools`."""
    records: np.ndarray
    fields: dict[str, np.ndarray]
    """[n, ...] by name."""


def copy_in(pools: Pools, request: Request) -> list[Rows]:
    """The rows that the worker of a request reads."""
    return [_copy(pools[use.pool], use, records_of(use.tickets), (SEQUENCE, STATE)) for use in request.reads()]


def copy_out(pools: Pools, request: Request) -> list[Rows]:
    """The rows that the worker of a request wrote.

    Only complete records: all ranks are asked to publish weights, but one of them writes, and what the others hold in
    its place must not come back.
    """
    rows = []
    for use in request.writes():
        records = records_of(use.tickets)
        rows.append(_copy(pools[use.pool], use, records[pools[use.pool][STATE][records] == RecordState.READY]))
    return rows


def paste(pools: Pools, rows: Sequence[Rows]) -> None:
    """Write rows where they belong."""
    for part in rows:
        for name, values in part.fields.items():
            pools[part.pool][name][part.records] = values


def _copy(arena: Arena, use: Use, records: np.ndarray, header: tuple[str, ...] = ()) -> Rows:
    names = (field.name for field in arena.layout.fields) if use.fields is None else use.fields
    return Rows(use.pool, records, {name: arena[name][records] for name in (*names, *header)})
