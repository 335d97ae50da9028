"""Records between hosts: what an order's worker must see, and what it has changed when it is done.

Within a host workers share the arena. A worker on another host holds a mirror of it: the rows that an order reads
travel with the order, the rows that it wrote come back with its replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena, Ticket
from embodyrl.workers.messages import EnvOrders, InferOrder, ScoreOrder, UpdateOrder, ValueOrder

_SEEN = ("images", "observed_state", "instruction")
_HEADER = ("generation", "sequence", "state")
_OUTCOME = ("action", "reward", "terminated", "truncated", "valid", "success", "components")
_ACTED = ("action", "tokens", "logprob", "value", "version", "reply", "cost")


@dataclass(frozen=True, slots=True)
class Rows:
    """Some fields of some records."""

    records: np.ndarray
    fields: dict[str, np.ndarray]
    """[n, ...] by name."""


@dataclass(frozen=True, slots=True)
class _Use:
    tickets: Sequence[Ticket]
    fields: tuple[str, ...]


def copy_in(arena: Arena, order: Any) -> list[Rows]:
    """The rows that the worker of an order reads."""
    return [_copy(arena, use) for use in _reads(arena, order)]


def copy_out(arena: Arena, order: Any) -> list[Rows]:
    """The rows that the worker of an order wrote."""
    return [_copy(arena, use) for use in _writes(order)]


def paste(arena: Arena, rows: Sequence[Rows]) -> None:
    """Write rows into an arena."""
    for part in rows:
        for name, values in part.fields.items():
            arena[name][part.records] = values


def _reads(arena: Arena, order: Any) -> Iterator[_Use]:
    match order:
        case EnvOrders():
            yield _Use([step.source for step in order.steps], ("action", "reply", *_HEADER))
            yield _Use([o.target for o in (*order.steps, *order.resets)], _HEADER)
        case InferOrder():
            yield _Use([item.ticket for item in order.items], (*_SEEN, *_HEADER))
        case ValueOrder():
            yield _Use(order.tickets, (*_SEEN, *_HEADER))
        case ScoreOrder() | UpdateOrder():
            yield _Use(order.tickets, tuple(field.name for field in arena.layout.all_fields))


def _writes(order: Any) -> Iterator[_Use]:
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


def _copy(arena: Arena, use: _Use) -> Rows:
    records = np.fromiter((ticket.record for ticket in use.tickets), dtype=np.int64, count=len(use.tickets))
    return Rows(records, {name: arena[name][records] for name in use.fields})
