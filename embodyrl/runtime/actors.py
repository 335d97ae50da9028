"""The driver's view of the actor workers."""

from __future__ import annotations

from pathlib import Path

from embodyrl.algorithms.protocol import Algorithm
from embodyrl.channels.arena import Arena, Ticket
from embodyrl.runtime.policy_client import PolicyClient
from embodyrl.runtime.rollouts import Collection
from embodyrl.types import PreparedBatch
from embodyrl.workers.messages import LoadOrder, SaveOrder, ScoreOrder, UpdateOrder


class Actors:
    """Scores, trains, saves and loads; replay batches are tickets, their contents stay in the arena."""

    def __init__(self, policy: PolicyClient, arena: Arena, algorithm: Algorithm) -> None:
        self._policy = policy
        self._arena = arena
        self._algorithm = algorithm

    def score(self, collection: Collection) -> None:
        """Let the reference policy score the collected chunks, if the algorithm asks for it."""
        if not self._algorithm.needs_reference:
            return
        tickets = tuple(t for e in collection.episodes for t in collection.tickets[e.spec.episode_id][: len(e.records)])
        self._policy.call(ScoreOrder(sequence=0, tickets=tickets))

    def update(self, step: int, collection: Collection, batch: PreparedBatch) -> dict[str, float]:
        """Write advantages into the records and train on them; no update where the gradient is exactly zero."""
        if not batch.has_signal:
            return {"loss": 0.0, "grad_norm": 0.0, "optimizer_steps": 0.0, "seconds": 0.0}
        self._arena["advantage"][batch.records] = batch.advantage
        self._arena["returns"][batch.records] = batch.returns
        by_record: dict[int, Ticket] = {t.record: t for tickets in collection.tickets.values() for t in tickets}
        order = UpdateOrder(
            sequence=0,
            step=step,
            tickets=tuple(by_record[int(record)] for record in batch.records),
            episode=tuple(int(e) for e in batch.episode),
        )
        done = self._policy.call(order)
        return done.metrics | {"seconds": done.seconds}

    def save(self, folder: Path) -> None:
        """Write policy and training state below `folder`."""
        self._policy.call(SaveOrder(sequence=0, folder=str(folder)))

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        self._policy.call(LoadOrder(sequence=0, folder=str(folder)))
