"""The driver's side of the processes that hold the policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from embodyrl.runtime.fleet import Fleet
from embodyrl.workers.messages import ContinueOrder, Done

OnDone = Callable[[Done], None]


class PolicyClient:
    """Orders in sequence; a reply that does not belong to a rank's oldest open order is a defect."""

    def __init__(self, fleet: Fleet, workers: Sequence[str], *, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._sequence = 0
        self._open: dict[str, deque[tuple[int, OnDone]]] = {worker: deque() for worker in workers}
        self.meanwhile: Callable[[], None] = lambda: None
        """What else there is to do while somebody waits for a reply."""

    @property
    def busy(self) -> bool:
        """Every rank has work."""
        return all(self._open.values())

    @property
    def idle(self) -> bool:
        """No rank has work."""
        return not any(self._open.values())

    def submit(self, order: Any, on_done: OnDone) -> None:
        """Send an order to the rank with the least work and return; `on_done` runs inside a later `Fleet.pump`."""
        self._send(min(self._open, key=lambda worker: len(self._open[worker])), order, on_done)

    def call(self, order: Any) -> Done:
        """Let all ranks carry out an order together; returns the first rank's reply, with the longest time.

        An order that is carried out in parts lets others in between.
        """
        seconds = 0.0
        while True:
            replies: dict[str, Done] = {}
            for worker in self._open:
                self._send(worker, order, partial(replies.__setitem__, worker))
            while len(replies) < len(self._open):
                self._fleet.pump(1.0)
                self.meanwhile()
            seconds += max(done.seconds for done in replies.values())
            done = replies[next(iter(self._open))]
            if done.finished:
                return replace(done, seconds=seconds)
            order = ContinueOrder(sequence=0)

    def on_message(self, worker: str, message: Any) -> None:
        """Callback for `Fleet`."""
        if not isinstance(message, Done):
            return
        sequence, on_done = self._open[worker].popleft()
        assert sequence == message.sequence, f"reply {message.sequence} to order {sequence}"
        on_done(message)

    def _send(self, worker: str, order: Any, on_done: OnDone) -> None:
        self._sequence += 1
        self._open[worker].append((self._sequence, on_done))
        self._fleet.send(worker, replace(order, sequence=self._sequence), timeout_s=self._timeout_s)
