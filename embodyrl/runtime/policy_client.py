"""The driver's side of the process that holds the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from embodyrl.runtime.fleet import Fleet
from embodyrl.workers.messages import ContinueOrder, Done

OnDone = Callable[[Done], None]


class PolicyClient:
    """Orders in sequence; a reply that does not belong to the oldest open order is a defect."""

    def __init__(self, fleet: Fleet, worker: str, *, timeout_s: float) -> None:
        self._fleet = fleet
        self._worker = worker
        self._timeout_s = timeout_s
        self._sequence = 0
        self._open: list[tuple[int, OnDone]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        """What else there is to do while somebody waits for a reply."""

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def submit(self, order: Any, on_done: OnDone) -> None:
        """Send an order and return at once; `on_done` runs inside a later `Fleet.pump`."""
        self._sequence += 1
        self._open.append((self._sequence, on_done))
        self._fleet.send(self._worker, replace(order, sequence=self._sequence), timeout_s=self._timeout_s)

    def call(self, order: Any) -> Done:
        """Send an order and wait for its reply; an order that is carried out in parts lets others in between."""
        replies: list[Done] = []
        self.submit(order, replies.append)
        seconds = 0.0
        while True:
            while not replies:
                self._fleet.pump(1.0)
                self.meanwhile()
            done = replies.pop()
            seconds += done.seconds
            if done.finished:
                return replace(done, seconds=seconds)
            self.submit(ContinueOrder(sequence=0), replies.append)

    def on_message(self, message: Any) -> None:
        """Callback for `Fleet`."""
        if not isinstance(message, Done):
            return
        sequence, on_done = self._open.pop(0)
        assert sequence == message.sequence, f"reply {message.sequence} to order {sequence}"
        on_done(message)
