"""Checks of replies from workers on other hosts, before the driver stores their records."""

import math
from collections.abc import Sequence

import numpy as np

from embodyrl.channels.arena import Arena, records_of
from embodyrl.channels.layout import BUCKET, Record
from embodyrl.channels.messages import Done, EnvReport, EnvRequest, InferRequest, Reply, Request, Use, WorkerFailed
from embodyrl.cluster.ray_cluster.rows import DIVIDED, HEADER, Pools, Rows

_FINITE = frozenset({Record.observed_state, Record.reward, Record.logprob})
"""Record fields that must contain only finite numbers."""


def fault_of(pools: Pools, request: Request, replies: Sequence[Reply], rows: Sequence[Rows], *, mirrored: bool) -> str:
    """Return the protocol violation in the reply to a request; empty: the reply is valid.

    A worker can write wrong numbers, but only into the fields and records that the request declares.

    Args:
        pools: shared memory of the driver.
        request: the request.
        replies: messages of the reply.
        rows: record fields that the worker wrote.
        mirrored: the worker has its own copy of the records, so all written fields are in `rows`.
    """
    if any(isinstance(reply, WorkerFailed) for reply in replies):
        return ""
    if len(replies) != 1:
        return f"{len(replies)} messages instead of one"
    return _fault_of_message(request, replies[0]) or _fault_of_rows(pools, request, rows, mirrored=mirrored)


def _fault_of_message(request: Request, reply: Reply) -> str:
    if not isinstance(reply, EnvReport if isinstance(request, EnvRequest) else Done):
        return f"{type(reply).__name__} in response to {type(request).__name__}"
    if reply.sequence != request.sequence:
        return f"the reply to request {reply.sequence} instead of {request.sequence}"
    if not (isinstance(reply, EnvReport) and isinstance(request, EnvRequest)):
        return ""
    if reply.stage != request.stage:
        return f"the report of stage {reply.stage} instead of {request.stage}"
    if not all(map(math.isfinite, (reply.sim_s, reply.render_s, reply.reset_s))):
        return "times that are not finite"
    reset = {one.slot for one in request.resets}
    named = {one.slot for one in reply.recordings} | {slot for slot, _ in reply.reward_errors}
    if unknown := {*reply.solved} - reset | named - {*request.slots} - reset:
        return f"results of slots {sorted(unknown)}, which are not in the request"
    return ""


def _fault_of_rows(pools: Pools, request: Request, rows: Sequence[Rows], *, mirrored: bool) -> str:
    uses = request.writes() if mirrored else ()
    if len(rows) != len(uses):
        return f"{len(rows)} groups of records instead of {len(uses)}"
    for part, use in zip(rows, uses, strict=True):
        if part.pool != use.pool:
            return f"records of memory {part.pool} instead of {use.pool}"
        wanted = records_of(use.tickets)
        # Ranks divide some requests, and one of them writes the weights; all other records are complete.
        partial = use.pool == 1 or isinstance(request, DIVIDED)
        if not (np.isin(part.records, wanted).all() if partial else np.array_equal(part.records, wanted)):
            return f"records {np.asarray(part.records).tolist()} instead of {wanted.tolist()}"
        if fault := _fault_of_fields(pools[use.pool], request, use, part):
            return fault
    return ""


def _fault_of_fields(arena: Arena, request: Request, use: Use, part: Rows) -> str:
    names = {field.name for field in arena.layout.fields} if use.fields is None else {*use.fields}
    if unknown := part.fields.keys() - names - {*HEADER}:
        return f"the fields {sorted(unknown)}, which the request does not write"
    if missing := names - part.fields.keys():
        return f"no fields {sorted(missing)}"
    for name, values in part.fields.items():
        held = arena[name]
        shape = (len(part.records), *held.shape[1:])
        if name == BUCKET and use.length is not None:
            shape = (len(part.records), use.length)
        if not isinstance(values, np.ndarray) or values.dtype != held.dtype or values.shape != shape:
            found = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
            return f"{name} as {found} instead of {held.dtype}{list(shape)}"
        if name in _FINITE and not np.isfinite(values).all():
            return f"{name} with NaN or infinite numbers"
        if name == Record.version and isinstance(request, InferRequest) and (values != request.version).any():
            return f"actions of weight version {values.tolist()} instead of {request.version}"
    return ""
