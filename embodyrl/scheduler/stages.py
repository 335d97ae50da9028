"""Stages of the env workers: groups of slots that step together."""

from collections.abc import Hashable, Sequence

import numpy as np

from embodyrl.channels.messages import EnvReport, EnvRequest
from embodyrl.plan.run_plan import WorkerSlots
from embodyrl.types import IntArray

StageKey = tuple[str, int]
"""Name of the worker, and index of the stage in the worker."""


class Stages:
    """Stages with their open requests, and the stages that may have work.

    Only stages with an event since the last call are checked: the cost of an event is independent of their number.
    """

    def __init__(self, workers: Sequence[WorkerSlots], per_worker: int) -> None:
        self._rows: dict[StageKey, IntArray] = {}
        self._own: dict[str, range] = {}
        for worker in workers:
            parts = np.array_split(worker.slots, min(per_worker, len(worker.slots)))
            self._own[worker.name] = range(len(self._rows), len(self._rows) + len(parts))
            self._rows |= {(worker.name, stage): rows for stage, rows in enumerate(parts)}
        self._all = list(self._rows.items())
        self._stage_of = np.repeat(np.arange(len(self._all)), [len(rows) for _, rows in self._all])
        self.first = {worker.name: worker.slots[0] for worker in workers}
        """First slot of each worker."""
        self.busy: dict[StageKey, EnvRequest] = {}
        """Open requests."""
        self._reports: list[tuple[int, EnvRequest, EnvReport]] = []
        self._changed: set[int] = set()
        self._work: Hashable = None

    def slots_of(self, worker: str) -> list[int]:
        """Return the slots of a worker."""
        return [row for stage in self._own[worker] for row in self._all[stage][1].tolist()]

    def drop_requests(self, worker: str) -> None:
        """Drop the open requests of a dead worker."""
        for stage in self._own[worker]:
            self.busy.pop(self._all[stage][0], None)

    def close(self, worker: str, report: EnvReport) -> None:
        """Close the open request of a stage, and store its report."""
        request = self.busy.pop((worker, report.stage), None)
        assert request is not None, f"{worker} reports stage {report.stage}, which has no open request"
        assert request.sequence == report.sequence, f"{worker}: reply {report.sequence} to request {request.sequence}"
        self._reports.append((self.first[worker], request, report))
        self.note_worker(worker)

    def take_reports(self) -> list[tuple[int, EnvRequest, EnvReport]]:
        """Return the new reports with the worker's first slot and the request."""
        reports, self._reports = self._reports, []
        return reports

    def note_worker(self, worker: str) -> None:
        """Record an event of a worker; a task limit may couple its stages."""
        self._changed.update(self._own[worker])

    def note_slots(self, rows: IntArray) -> None:
        """Record an event of slots."""
        self._changed.update(np.unique(self._stage_of[rows]).tolist())

    def to_check(self, work: Hashable) -> list[tuple[StageKey, IntArray]]:
        """Return the idle stages with events, or all idle stages if `work` has changed or is None; in order.

        Args:
            work: identifies the episodes that any stage may start.
        """
        chosen = range(len(self._all)) if work is None or work != self._work else sorted(self._changed)
        self._work = work
        self._changed.clear()
        return [stage for stage in map(self._all.__getitem__, chosen) if stage[0] not in self.busy]
