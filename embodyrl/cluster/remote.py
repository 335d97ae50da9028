"""Records between hosts: what a request's worker must see, and what it has changed when it is done.

Within a host workers share the arena, and the buckets for new weights. A worker on another host holds mirrors of them:
the rows that a request reads travel with the request, the rows that it wrote come back with its replies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena, RecordState, Ticket
from embodyrl.workers.messages import (
    EnvRequest,
    InferRequest,
    LoadWeightsRequest,
    PublishRequest,
    ScoreRequest,
    UpdateRequest,
    ValueRequest,
)

_SEEN = ("images", "observed_state", "instruction")
_HEADER = ("sequence", "state")
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


def copy_in(pools: Pools, request: Any) -> list[Rows]:
    """The rows that the worker of a request reads."""
    return [_copy(pools, use) for use in _reads(pools[0], request)]


def copy_out(pools: Pools, request: Any) -> list[Rows]:
    """The rows that the worker of a request wrote."""
    return [_copy(pools, use) for use in _writes(pools, request)]


def paste(pools: Pools, rows: Sequence[Rows]) -> None:
    """Write rows where they belong."""
    for part in rows:
        for name, values in part.fields.items():
            pools[part.pool][name][part.records] = values


def _reads(arena: Arena, request: Any) -> Iterator[_Use]:
    match request:
        case EnvRequest():
            yield _Use([step.source for step in request.steps], ("action", "reply", "cut_off", *_HEADER))
            yield _Use([o.target for o in (*request.steps, *request.resets)], _HEADER)
        case InferRequest():
            yield _Use([item.ticket for item in request.items], (*_SEEN, *_HEADER))
        case ValueRequest():
            yield _Use(request.tickets, (*_SEEN, *_HEADER))
        case ScoreRequest() | UpdateRequest():
            yield _Use(request.tickets, tuple(field.name for field in arena.layout.all_fields))
        case PublishRequest():
            yield _Use([request.ticket], _HEADER, pool=1)
        case LoadWeightsRequest():
            yield _Use([request.ticket], ("weights", *_HEADER), pool=1)


def _writes(pools: Pools, request: Any) -> Iterator[_Use]:
    match request:
        case EnvRequest():
            yield _Use([step.source for step in request.steps], _OUTCOME)
            yield _Use([o.target for o in (*request.steps, *request.resets)], (*_SEEN, "state"))
        case InferRequest():
            yield _Use([item.ticket for item in request.items], _ACTED)
        case ValueRequest():
            yield _Use(request.tickets, ("value",))
        case ScoreRequest():
            yield _Use(request.tickets, ("ref_logprob",))
        # All ranks get the request, one of them writes.
        case PublishRequest() if pools[1]["state"][request.ticket.record] == RecordState.READY:
            yield _Use([request.ticket], ("weights", "state"), pool=1)


def _copy(pools: Pools, use: _Use) -> Rows:
    records = np.fromiter((ticket.record for ticket in use.tickets), dtype=np.int64, count=len(use.tickets))
    return Rows(use.pool, records, {name: pools[use.pool][name][records] for name in use.fields})
