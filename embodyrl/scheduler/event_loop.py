"""Event loop of the driver, and its clients for the policy processes."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from embodyrl.algorithms.metrics import count_batch_tokens
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import EstimatorInputs
from embodyrl.channels.arena import Arena, get_record_indices, hash_observations
from embodyrl.channels.layout import BUCKET, Record, WeightInfo, WeightPart, fill_buckets
from embodyrl.channels.messages import (
    ContinueRequest,
    Done,
    ImitateRequest,
    InferRequest,
    LoadRequest,
    LoadWeightsRequest,
    PublishRequest,
    Request,
    SaveRequest,
    ScoreRequest,
    UpdateRequest,
    WorkerReady,
)
from embodyrl.cluster.protocol import Message, WorkerDied
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.errors import CheckpointError
from embodyrl.files import read_json
from embodyrl.plan.run_plan import RunPlan
from embodyrl.scheduler.rollout import RolloutResult
from embodyrl.types import ActionKind, PreparedBatch
from embodyrl.workers.lifecycle import WorkerSpec

OnDone = Callable[[Done], None]
_WEIGHT_CHANGING_REQUESTS = (UpdateRequest, ContinueRequest, ImitateRequest, LoadRequest)


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies of several processes to the same request."""

    expected: tuple[str, ...]
    arrived: dict[str, Done] = field(default_factory=dict)

    def is_complete(self) -> bool:
        """Return True if all processes have replied."""
        return len(self.arrived) == len(self.expected)


class PolicyClient:
    """Non-blocking client that sends requests to the policy processes and tracks replies; `EventLoop.run_until` waits.

    A process replies to requests in order; a reply that does not match its oldest open request is a bug. A restarted
    rollout process first receives all weights, then the requests without a reply; other processes continue. All
    weights of a process must have one version, so no weights are sent between the start of an update and the next
    `publish`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        policy_specs: Sequence[WorkerSpec],
        *,
        timeout_s: float,
        bucket_arena: Arena | None = None,
    ) -> None:
        """Register the processes with the supervisor.

        Args:
            supervisor: sends the requests.
            policy_specs: specs of the processes; without rollout processes, the actor ranks also run inference.
            timeout_s: maximum wait for a reply.
            bucket_arena: buckets for new weights in disaggregated mode; closed with this client.
        """
        self._supervisor = supervisor
        self._training = [spec.name for spec in policy_specs if spec.component == "actor"]
        self._rollout_names = [spec.name for spec in policy_specs if spec.component == "rollout"] or self._training
        self._timeout_s = timeout_s
        self._bucket_arena = bucket_arena
        self._sequence = 0
        self._pending: dict[str, deque[tuple[int, Request, OnDone]]] = {spec.name: deque() for spec in policy_specs}
        self._unanswered: dict[str, list[tuple[Request, OnDone]]] = {}
        """Unanswered requests of each dead rollout process, sent again when the restarted process has the weights."""
        self._restarted: list[str] = []
        self._receiving = ""
        """Name of the restarted process that is receiving the weights; empty: none."""
        self._recovery: Iterator[Replies] = iter(())
        self._awaited_replies: Replies | None = None
        """Replies for which `_recovery` waits."""
        self._weights: dict[str, tuple[WeightInfo, ...]] = {}
        self._publishing = False
        self._published = False
        self._version = 0
        """Version of the published weights."""
        self._is_current = True
        """False from the start of an update until its weights are published."""

    @property
    def num_rollout_processes(self) -> int:
        """Number of processes that run inference."""
        return len(self._rollout_names)

    @property
    def num_free(self) -> int:
        """Number of idle inference processes; 0 while new weights are being transferred."""
        return 0 if self._publishing else sum(not self._pending[name] for name in self._get_ready_processes())

    @property
    def idle(self) -> bool:
        """True if no process is busy."""
        return not any(self._pending.values())

    def submit(self, request: Request, on_done: OnDone) -> None:
        """Send a request to the least busy inference process; `on_done` is called inside a later `Supervisor.pump`."""
        ready = self._get_ready_processes()
        idle = next((name for name in ready if not self._pending[name]), None)
        self._send(idle or min(ready, key=lambda name: len(self._pending[name])), request, on_done)

    def send_to_rollout_processes(self, request: Request) -> Replies:
        """Send a request to all inference processes."""
        return self._send_to(self._rollout_names, request)

    @property
    def recovering(self) -> bool:
        """True while a restarted process receives weights."""
        return self._awaited_replies is not None

    def send_to_actors(self, request: Request) -> Replies:
        """Send a request to all actor ranks. If the request changes weights, `recovering` must be False."""
        if isinstance(request, _WEIGHT_CHANGING_REQUESTS):
            assert not self.recovering, "the rest of the weights would have another version"
            self._is_current = False
        return self._send_to(self._training, request)

    def publish(self, version: int) -> Iterator[Replies]:
        """Transfer the weights of version `version` from the actor ranks to the processes that run the policy.

        Yield the replies that must be complete before the iterator continues. The first transfer contains all weights,
        later transfers the trained weights. No process runs inference before the transfer is complete.
        """
        if (arena := self._bucket_arena) is None:
            return
        # Mark the inference processes as busy: an inference between two buckets would use partly updated weights.
        self._publishing = True
        if self._awaited_replies is not None:  # the recovery of a process uses the buckets
            yield self._awaited_replies
            yield from self._recovery
            self._awaited_replies = None
        yield from self._transfer(arena, self._fill_buckets(arena), self._get_ready_processes)
        self._version, self._is_current = version, True
        self._publishing, self._published = False, True

    def advance(self) -> None:
        """Continue the transfer of weights to restarted processes, without blocking."""
        while not self._publishing and (self._awaited_replies is None or self._awaited_replies.is_complete()):
            if self._awaited_replies is None:
                if not self._restarted or not self._is_current:
                    return
                self._recovery = self._recover(self._restarted.pop(0))
            self._awaited_replies = next(self._recovery, None)

    def _recover(self, worker: str) -> Iterator[Replies]:
        """Send all weights to a restarted process, then repeat its unanswered requests; yield the awaited replies."""
        assert self._bucket_arena is not None
        self._receiving = worker
        buckets = fill_buckets(self._weights[worker], self._bucket_arena[BUCKET].shape[1])
        yield from self._transfer(self._bucket_arena, buckets, lambda: [worker] if self._receiving == worker else [])
        if self._receiving == worker:  # it has not died again
            for request, on_done in self._unanswered.pop(worker):
                if isinstance(request, InferRequest):
                    request = replace(request, version=self._version)
                self._send(worker, request, on_done)

    def _transfer(
        self, arena: Arena, buckets: Iterator[tuple[WeightPart, ...]], targets: Callable[[], list[str]]
    ) -> Iterator[Replies]:
        """Transfer weights to the processes in `targets()`.

        Yield the replies that must be complete before the iterator continues.
        """
        transfers: list[tuple[int, Replies]] = []
        for parts in buckets:
            record_ref = arena.allocate()
            yield self.send_to_actors(PublishRequest(record_ref=record_ref, parts=parts))
            # One of the two buckets is filled while the other is read.
            yield from _finish_transfers(arena, transfers)
            transfers.append(
                (record_ref, self._send_to(targets(), LoadWeightsRequest(record_ref=record_ref, parts=parts)))
            )
        yield from _finish_transfers(arena, transfers)

    def _get_ready_processes(self) -> list[str]:
        """Return the names of inference processes that are alive and have the current weights."""
        return [name for name in self._rollout_names if name not in self._unanswered]

    def _fill_buckets(self, bucket_arena: Arena) -> Iterator[tuple[WeightPart, ...]]:
        trained = {weight.name: weight.trained for weight in self._weights[self._training[0]]}
        received = self._weights[self._rollout_names[0]]
        assert all(weight.name in trained for weight in received), "rollout and actor have different weights"
        # Frozen weights are sent once: they do not change.
        selected = [weight for weight in received if trained[weight.name] or not self._published]
        return fill_buckets(selected, bucket_arena[BUCKET].shape[1])

    def on_message(self, worker: str, message: Message) -> None:
        """Handle a message of a policy process; callback for `Supervisor`."""
        if isinstance(message, WorkerReady):
            self._weights[worker] = message.weights
            if worker in self._unanswered:
                self._restarted.append(worker)
        elif isinstance(message, WorkerDied):
            self._on_death(worker)
        elif isinstance(message, Done):
            sequence, _, on_done = self._pending[worker].popleft()
            assert sequence == message.sequence, f"reply {message.sequence} to request {sequence}"
            on_done(message)

    def _on_death(self, worker: str) -> None:
        """Keep the unanswered requests of a dead rollout process, and end the transfer of weights to the process."""
        if worker == self._receiving:
            self._receiving = ""
        if worker in self._restarted:
            self._restarted.remove(worker)
        unanswered = self._unanswered.setdefault(worker, [])
        for sequence, request, on_done in self._pending[worker]:
            if isinstance(request, LoadWeightsRequest):
                on_done(Done(sequence=sequence, seconds=0.0, metrics={}))
            else:
                unanswered.append((request, on_done))
        self._pending[worker].clear()

    def _send_to(self, workers: Sequence[str], request: Request) -> Replies:
        replies = Replies(expected=tuple(workers))
        for worker in workers:
            self._send(worker, request, partial(replies.arrived.__setitem__, worker))
        return replies

    def _send(self, worker: str, request: Request, on_done: OnDone) -> None:
        if worker in self._unanswered and not isinstance(request, LoadWeightsRequest):
            self._unanswered[worker].append((request, on_done))
            return
        self._sequence += 1
        # Register before sending: the reply may arrive inside `send`.
        self._pending[worker].append((self._sequence, request, on_done))
        self._supervisor.send(worker, replace(request, sequence=self._sequence), timeout_s=self._timeout_s)

    def close(self) -> None:
        """Free the shared memory of the weight buckets."""
        if self._bucket_arena is not None:
            self._bucket_arena.close()


def _finish_transfers(arena: Arena, transfers: list[tuple[int, Replies]]) -> Iterator[Replies]:
    """Yield the replies of each transfer, for which the caller waits; then free the bucket of the transfer."""
    while transfers:
        record_ref, replies = transfers.pop()
        yield replies
        arena.free([record_ref])


MAX_WAIT_S = 1.0
"""Maximum wait for events in seconds, after which signals are checked."""


class EventLoop:
    """Event loop of the driver: waits for messages of workers, and sends requests that are ready.

    Callbacks of the supervisor only record events; requests are sent by `advance`, so driver code is not reentrant.
    Every request has a deadline at the launcher, so every wait ends.
    """

    def __init__(self, supervisor: Supervisor, policy: PolicyClient) -> None:
        self._supervisor = supervisor
        self._policy = policy

    def advance(self) -> float:
        """Send all requests that are ready; return the longest time in seconds to wait for events."""
        self._policy.advance()
        return MAX_WAIT_S

    @property
    def pending(self) -> bool:
        """True if a request is pending or can be sent; otherwise a wait would never end."""
        return not self._policy.idle or bool(self._supervisor.starting)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Process events until `condition()` is True.

        Raises:
            Interrupted: the run received a stop signal.
            WorkerError: a worker died and is not restarted.
        """
        wait_s = self.advance()
        while not condition():
            assert self.pending, f"no worker is busy, but the wait is not over: {self!r}"
            self._supervisor.pump(wait_s)
            # Before `condition` is checked: inferences run between two parts of an update.
            wait_s = self.advance()

    def call(self, request: Request) -> Done:
        """Send a request to all actor ranks and wait; return the reply of rank 0, with the time of the slowest rank.

        Raises:
            CheckpointError: a checkpoint could not be written or read.
        """
        seconds = 0.0
        if self._policy.recovering:  # only then, because waiting could start inferences before the request
            self.run_until(lambda: not self._policy.recovering)
        while True:
            replies = self._policy.send_to_actors(request)
            self.run_until(replies.is_complete)
            arrived = [replies.arrived[worker] for worker in replies.expected]
            if errors := [done.error for done in arrived if done.error]:
                raise CheckpointError(errors[0])
            seconds += max(done.seconds for done in arrived)
            if arrived[0].finished:
                return replace(arrived[0], seconds=seconds)
            request = ContinueRequest()  # one part of an update is done


ALGORITHM_FILE = "algorithm.json"


class Actors:
    """Client of the actor ranks, which train, save, load and compute log-probabilities on batches of records."""

    def __init__(self, loop: EventLoop, arena: Arena, algorithm: Algorithm, run_plan: RunPlan) -> None:
        self._loop, self._arena, self._algorithm = loop, arena, algorithm
        self._reward_weights = run_plan.env.reward.weights
        self._is_text = run_plan.env.action.kind is ActionKind.text
        # A process with inference and training runs inference between the micro-batches of an update.
        self._in_parts = algorithm.settings.max_staleness > 0 and not run_plan.is_disaggregated

    def score(self, collection: RolloutResult) -> EstimatorInputs:
        """Compute reference log-probabilities if needed; return the estimator's inputs from the records."""
        if self._algorithm.needs_reference and collection.episodes:
            # Exclude the last record reference: its record has an observation without an action.
            record_refs = [collection.record_refs[e.spec.episode_id][: len(e.records)] for e in collection.episodes]
            self._loop.call(ScoreRequest(record_refs=np.concatenate(record_refs)))
        rows = [episode.records for episode in collection.episodes]
        logprob_records = rows if self._algorithm.needs_reference_in_prepare else []
        states = rows if self._algorithm.estimator.needs_states else []
        return EstimatorInputs(
            logprob=tuple(self._arena[Record.logprob][records] for records in logprob_records),
            ref_logprob=tuple(self._arena[Record.ref_logprob][records] for records in logprob_records),
            states=tuple(hash_observations(self._arena, records) for records in states),
            greedy=tuple(collection.greedy.get(e.spec.group_id) for e in collection.episodes),
            part_weights=self._reward_weights,
        )

    def update(self, step: int, collection: RolloutResult, batch: PreparedBatch) -> dict[str, float]:
        """Write advantages into the records and train; skip the update if the gradient is exactly zero."""
        if not batch.has_signal:
            return {"loss": 0.0, "grad_norm": 0.0, "optimizer_steps": 0.0, "seconds": 0.0}
        self._arena[Record.advantage][batch.records] = batch.advantage
        self._arena[Record.returns][batch.records] = batch.returns
        # A batch contains record numbers; a request contains record references, which detect reused records.
        ref_by_record = np.zeros(self._arena.capacity, np.int64)
        record_refs = np.concatenate(list(collection.record_refs.values()))
        ref_by_record[get_record_indices(record_refs)] = record_refs
        algorithm = self._algorithm
        finals = [e for e in collection.episodes if e.final_record >= 0] if algorithm.estimator.needs_replay else []
        partial_episodes = (
            collection.episodes if algorithm.settings.needs_terminal_observations and collection.continues else []
        )
        request = UpdateRequest(
            step=step,
            record_refs=ref_by_record[batch.records],
            episode=batch.episode,
            finals=tuple((e.spec.episode_id, int(ref_by_record[e.final_record])) for e in finals),
            earlier=tuple((e.spec.episode_id, e.earlier.spec.noise_seed) for e in partial_episodes if e.earlier),
            open=tuple((e.spec.episode_id, e.summary.spec.noise_seed) for e in partial_episodes if e.cut),
            in_parts=self._in_parts,
        )
        done = self._loop.call(request)
        metrics = done.metrics | {"seconds": done.seconds}
        if self._is_text:
            cost, valid = self._arena[Record.cost][batch.records], self._arena[Record.valid][batch.records]
            metrics |= count_batch_tokens(cost, valid, done.seconds)
        return metrics

    def save(self, folder: Path) -> None:
        """Write the policy, the training state and the algorithm's state to `folder`."""
        self._loop.call(SaveRequest(folder=str(folder)))
        (folder / ALGORITHM_FILE).write_text(json.dumps(self._algorithm.state()) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Load the files written by `save`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self._loop.call(LoadRequest(folder=str(folder)))
        path = folder / ALGORITHM_FILE
        try:
            self._algorithm.load_state(read_json(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint."
            ) from error
