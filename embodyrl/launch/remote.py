"""Records between hosts: what an order's worker must see, and what it has changed when it is done.

Within a host workers share the arena, and the buckets for new weights. A worker on another host holds mirrors of them:
the rows that an order reads travel with the order, the rows that it wrote come back with its replies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena, RecordState, Ticket
from embodyrl.workers.messages import (
    EnvOrders,
    InferOrder,
    PublishOrder,
    ScoreOrder,
    TakeOrder,
    UpdateOrder,
    ValueOrder,
)

_SEEN = ("images", "observed_state", "instruction")
_HEADER = ("generation", "sequence", "state")
_OUTCOME = ("action", "reward", "terminated", "truncated", "valid", "success", "components")
_ACTED = ("action", "tokens", "logprob", "value", "version", "reply", "cut_off", "cost")


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


@dataclass(frozen=True, slots=True)
class _Use:
    tickets: Sequence[Ticket]
    fields: tuple[str, ...]
    pool: int = 0


def copy_in(pools: Pools, order: Any) -> list[Rows]:
    """The rows that the worker of an order reads."""
    return [_copy(pools, use) for use in _reads(pools[0], order)]


def copy_out(pools: Pools, order: Any) -> list[Rows]:
    """The rows that the worker of an order wrote."""
    return [_copy(pools, use) for use in _writes(pools, order)]


def paste(pools: Pools, rows: Sequence[Rows]) -> None:
    """Write rows where they belong."""
    for part in rows:
        for name, values in part.fields.items():
            pools[part.pool][name][part.records] = values


def _reads(arena: Arena, order: Any) -> Iterator[_Use]:
    match order:
        case EnvOrders():
            yield _Use([step.source for step in order.steps], ("action", "reply", "cut_off", *_HEADER))
            yield _Use([o.target for o in (*order.steps, *order.resets)], _HEADER)
        case InferOrder():
            yield _Use([item.ticket for item in order.items], (*_SEEN, *_HEADER))
        case ValueOrder():
            yield _Use(order.tickets, (*_SEEN, *_HEADER))
        case ScoreOrder() | UpdateOrder():
            yield _Use(order.tickets, tuple(field.name for field in arena.layout.all_fields))
        case PublishOrder():
            yield _Use([order.ticket], _HEADER, pool=1)
        case TakeOrder():
            yield _Use([order.ticket], ("weights", *_HEADER), pool=1)


def _writes(pools: Pools, order: Any) -> Iterator[_Use]:
    match order:
        case EnvOrders():
            yield _Use([step.source for step in order.steps], _OUTCOME)
            yield _Use([o.target for o in (*order.steps, *order.resets)], (*_SEEN, "state"))
        case InferOrder():
            yield _Use([item.ticket for item in order.items], _ACTED)
        case ValueOrder():
            yield _Use(order.tickets, ("value",))
        case ScoreOrder():
            yield _Use(order.tickets, ("ref_logprob",))
        # All ranks get the order, one of them writes.
        case PublishOrder() if pools[1]["state"][order.ticket.record] == RecordState.READY:
            yield _Use([order.ticket], ("weights", "state"), pool=1)


def _copy(pools: Pools, use: _Use) -> Rows:
    records = np.fromiter((ticket.record for ticket in use.tickets), dtype=np.int64, count=len(use.tickets))
    return Rows(use.pool, records, {name: pools[use.pool][name][records] for name in use.fields})
