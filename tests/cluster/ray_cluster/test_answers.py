"""Replies of workers on other hosts that do not match their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_runs import toy_config

from embodyrl.channels.arena import Arena, RecordState, records_of
from embodyrl.channels.layout import STATE, Record
from embodyrl.channels.messages import (
    Done,
    EnvReport,
    EnvRequest,
    InferRequest,
    Recording,
    Reply,
    Request,
    ValueRequest,
    WorkerFailed,
    WorkerReady,
)
from embodyrl.cluster.ray_cluster.answers import fault_of
from embodyrl.cluster.ray_cluster.rows import Pools, Rows, copy_out, mark, paste
from embodyrl.plan.build import build_run_plan

Change = Callable[[Any, list[Rows]], tuple[Any, list[Rows]]]


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    with closing(Arena.create(build_run_plan(toy_config(tmp_path), training=True).layout, 6)) as arena:
        yield (arena,)


def steps(pools: Pools) -> tuple[EnvRequest, EnvReport]:
    """Return a request for two chunk steps, and its report."""
    tickets = pools[0].allocate_all(4)
    pools[0][STATE][records_of(tickets)] = RecordState.READY
    request = EnvRequest(sequence=7, stage=1, slots=[0, 3], sources=tickets[:2], targets=tickets[2:])
    return request, EnvReport(sequence=7, stage=1, sim_s=0.1, render_s=0.0, reset_s=0.0)


def actions(pools: Pools) -> tuple[InferRequest, Done]:
    """Return a request for the actions of two observations, and its reply."""
    tickets = pools[0].allocate_all(2)
    pools[0][STATE][records_of(tickets)] = RecordState.READY
    pools[0][Record.version][:] = 5
    request = InferRequest(sequence=9, tickets=tickets, noise_seeds=[1, 2], chunks=[0, 0], greedy=False, version=5)
    return request, Done(sequence=9, seconds=0.1, metrics={})


def column(name: str, change: Callable[[np.ndarray], Any]) -> Change:
    """Return a change of one field, in every group of records that has the field."""

    def changed(reply: Reply, rows: list[Rows]) -> tuple[Reply, list[Rows]]:
        assert any(name in part.fields for part in rows)
        return reply, [
            replace(part, fields={k: change(v) if k == name else v for k, v in part.fields.items()}) for part in rows
        ]

    return changed


WRONG: dict[str, tuple[Callable[[Pools], tuple[Request, Reply]], Change, str]] = {
    "repeated report": (steps, lambda r, rows: (replace(r, sequence=6), rows), "reply to request 6 instead of 7"),
    "other stage": (steps, lambda r, rows: (replace(r, stage=0), rows), "report of stage 0 instead of 1"),
    "other message": (steps, lambda r, rows: (WorkerReady(), rows), "WorkerReady in response to EnvRequest"),
    "time": (steps, lambda r, rows: (replace(r, sim_s=float("nan")), rows), "times that are not finite"),
    "forged goal": (steps, lambda r, rows: (replace(r, solved=(0,)), rows), r"results of slots \[0\]"),
    "video of another slot": (
        steps,
        lambda r, rows: (replace(r, recordings=(Recording(slot=9, path="x"),)), rows),
        r"results of slots \[9\]",
    ),
    "missing records": (steps, lambda r, rows: (r, []), "0 groups of records instead of 2"),
    "missing episode": (
        steps,
        lambda r, rows: (
            r,
            [replace(p, records=p.records[:1], fields={k: v[:1] for k, v in p.fields.items()}) for p in rows],
        ),
        r"records \[\d\] instead of \[\d, \d\]",
    ),
    "records of others": (
        steps,
        lambda r, rows: (r, [replace(p, records=p.records + 10**6) for p in rows]),
        r"records \[100000\d, 100000\d\] instead",
    ),
    "other memory": (steps, lambda r, rows: (r, [replace(p, pool=1) for p in rows]), "memory 1 instead of 0"),
    "field of the driver": (
        steps,
        lambda r, rows: (r, [replace(p, fields={**p.fields, Record.advantage: np.ones(2)}) for p in rows]),
        r"fields \['advantage'\]",
    ),
    "missing field": (
        steps,
        lambda r, rows: (r, [replace(p, fields={STATE: p.fields[STATE]}) if STATE in p.fields else p for p in rows]),
        "no fields",
    ),
    "wrong shape": (steps, column(Record.reward, lambda v: v[:, :1]), r"reward as float32\[2, 1\] instead of"),
    "wrong type": (steps, column(Record.success, lambda v: v.astype(object)), "success as object"),
    "no array": (steps, column(Record.reward, lambda v: "x" * 99), "reward as str"),
    "oversized array": (steps, column(Record.images, lambda v: np.repeat(v, 50, axis=0)), r"images as uint8\[100, "),
    "NaN reward": (steps, column(Record.reward, lambda v: v * np.nan), "reward with NaN"),
    "infinite state": (steps, column(Record.observed_state, lambda v: v + np.inf), "observed_state with NaN"),
    "NaN log-probability": (actions, column(Record.logprob, lambda v: v + np.nan), "logprob with NaN"),
    "other weights": (actions, column(Record.version, lambda v: v + 1), r"version \[6, 6\] instead of 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_reply_that_does_not_match_its_request_is_refused(pools: Pools, name: str):
    ask, change, said = WRONG[name]
    request, reply = ask(pools)
    rows = copy_out(pools, request)
    assert fault_of(pools, request, (reply,), rows, mirrored=True) == ""
    assert fault_of(pools, request, (reply, reply), rows, mirrored=True) == "2 messages instead of one"
    wrong, written = change(reply, rows)
    with pytest.raises(AssertionError, match=said):
        assert fault_of(pools, request, (wrong,), written, mirrored=True) == ""


def test_worker_with_shared_memory_sends_no_record_data(pools: Pools):
    request, reply = steps(pools)
    assert fault_of(pools, request, (reply,), [], mirrored=False) == ""
    assert "groups of records" in fault_of(pools, request, (reply,), copy_out(pools, request), mirrored=False)


def test_ranks_send_only_the_values_that_they_computed(tmp_path: Path):
    layout = build_run_plan(toy_config(tmp_path, "algorithm=ppo"), training=True).layout
    driver, first, second = both = [(Arena.create(layout, 4),) for _ in range(3)]
    tickets = driver[0].allocate_all(4)
    request = ValueRequest(tickets=tickets)
    for pools in both:
        pools[0][STATE][:] = RecordState.READY
        mark(pools, request)
    records = records_of(tickets)
    for (arena,), own, value in ((first, records[:3], 0.0), (second, records[3:], np.nan)):
        arena[Record.value][own] = value
    # The second rank replies last: its other records must not replace those of the first.
    for pools in (first, second):
        rows = copy_out(pools, request)
        assert fault_of(driver, request, (Done(sequence=0, seconds=0.0, metrics={}),), rows, mirrored=True) == ""
        paste(driver, rows)
    np.testing.assert_array_equal(driver[0][Record.value][records].ravel(), [0.0, 0.0, 0.0, np.nan])
    for (arena,) in both:
        arena.close()


def test_reported_error_of_a_worker_is_accepted(pools: Pools):
    request, _ = steps(pools)
    assert fault_of(pools, request, (WorkerFailed(error="e", traceback="t"),), [], mirrored=True) == ""
