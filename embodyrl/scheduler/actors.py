"""The driver's view of the actor workers."""

import hashlib
import json
from pathlib import Path

import numpy as np

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import Scores
from embodyrl.channels.arena import Arena, records_of
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.plan.blueprint import Blueprint
from embodyrl.scheduler.rollout import RolloutResult
from embodyrl.scheduler.start import Workers
from embodyrl.types import IntArray, PreparedBatch
from embodyrl.workers.messages import LoadRequest, SaveRequest, ScoreRequest, UpdateRequest

ALGORITHM_FILE = "algorithm.json"


class Actors:
    """Scores, trains, saves and loads; replay batches are tickets, their contents stay in the arena."""

    def __init__(self, workers: Workers, algorithm: Algorithm, blueprint: Blueprint) -> None:
        self._loop = workers.scheduler
        self._arena = workers.arena
        self._algorithm = algorithm
        self._part_weights = blueprint.env.component_weights
        # A process that acts and trains does so between the micro-batches of an update.
        self._in_parts = algorithm.settings.max_staleness > 0 and not blueprint.is_disaggregated

    def score(self, collection: RolloutResult) -> Scores:
        """Let the reference policy score the collected chunks, and gather what the algorithm asks for."""
        if self._algorithm.needs_reference and collection.episodes:
            held = [collection.tickets[e.spec.episode_id][: len(e.records)] for e in collection.episodes]
            self._loop.call(ScoreRequest(tickets=np.concatenate(held)))
        return gather_scores(self._algorithm, self._arena, collection, self._part_weights)

    def update(self, step: int, collection: RolloutResult, batch: PreparedBatch) -> dict[str, float]:
        """Write advantages into the records and train on them; no update where the gradient is exactly zero."""
        if not batch.has_signal:
            return {"loss": 0.0, "grad_norm": 0.0, "optimizer_steps": 0.0, "seconds": 0.0}
        self._arena[Record.advantage][batch.records] = batch.advantage
        self._arena[Record.returns][batch.records] = batch.returns
        # A batch names records, a request the tickets that prove they are still the same ones.
        by_record = np.zeros(self._arena.capacity, np.int64)
        held = np.concatenate(list(collection.tickets.values()))
        by_record[records_of(held)] = held
        finals = [e for e in collection.episodes if e.final_record >= 0] if self._algorithm.needs_replay else []
        request = UpdateRequest(
            step=step,
            tickets=by_record[batch.records],
            episode=batch.episode,
            finals=tuple((e.spec.episode_id, int(by_record[e.final_record])) for e in finals),
            in_parts=self._in_parts,
        )
        done = self._loop.call(request)
        return done.metrics | {"seconds": done.seconds}

    def save(self, folder: Path) -> None:
        """Write policy, training state and the algorithm's state below `folder`."""
        self._loop.call(SaveRequest(folder=str(folder)))
        (folder / ALGORITHM_FILE).write_text(json.dumps(self._algorithm.state()) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        self._loop.call(LoadRequest(folder=str(folder)))
        self._algorithm.load_state(json.loads((folder / ALGORITHM_FILE).read_text(encoding="utf-8")))


def gather_scores(
    algorithm: Algorithm, arena: Arena, collection: RolloutResult, part_weights: tuple[float, ...]
) -> Scores:
    """What the algorithm asks for, out of the records of a collection."""
    rows = [episode.records for episode in collection.episodes]
    wants = rows if algorithm.needs_reference_in_prepare else []
    return Scores(
        logprob=tuple(arena[Record.logprob][records] for records in wants),
        ref_logprob=tuple(arena[Record.ref_logprob][records] for records in wants),
        states=tuple(_hashes(arena, records) for records in rows) if algorithm.needs_states else (),
        greedy=tuple(collection.greedy.get(e.spec.group_id) for e in collection.episodes),
        part_weights=part_weights,
    )


def _hashes(arena: Arena, records: IntArray) -> IntArray:
    """Hash the observation of each record."""
    fields = [arena[name] for name in OBSERVATION]
    digests = [hashlib.blake2b(b"".join(f[r].tobytes() for f in fields), digest_size=8).digest() for r in records]
    return np.frombuffer(b"".join(digests), dtype=np.int64)
