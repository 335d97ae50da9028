"""The driver's side of the processes that hold the policy."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from embodyrl.channels.arena import Arena, Ticket
from embodyrl.channels.buckets import WeightInfo, WeightPart, fill_buckets
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.errors import CheckpointError
from embodyrl.workers.lifecycle import WorkerSpec
from embodyrl.workers.messages import ContinueRequest, Done, LoadWeightsRequest, PublishRequest, WorkerReady

OnDone = Callable[[Done], None]


class PolicyClient:
    """Orders in sequence; a reply that does not belong to a process's oldest open request is a defect."""

    def __init__(
        self,
        supervisor: Supervisor,
        hosts: Sequence[WorkerSpec],
        *,
        timeout_s: float,
        bucket_arena: Arena | None = None,
    ) -> None:
        """Join.

        Args:
            supervisor: carries the requests.
            hosts: the processes; the actor ranks act where there are no rollout processes.
            timeout_s: longest wait for a reply.
            bucket_arena: where rollout and actor are apart: buckets for new weights. Closed with this client.
        """
        self._supervisor = supervisor
        self._training = [spec.name for spec in hosts if spec.component == "actor"]
        self._acting = [spec.name for spec in hosts if spec.component == "rollout"] or self._training
        self._timeout_s = timeout_s
        self._bucket_arena = bucket_arena
        self._sequence = 0
        self._open: dict[str, deque[tuple[int, OnDone]]] = {spec.name: deque() for spec in hosts}
        self._weights: dict[str, tuple[WeightInfo, ...]] = {}
        self._publishing = False
        self._published = False
        self.meanwhile: Callable[[], None] = lambda: None
        """What else there is to do while somebody waits for a reply."""

    @property
    def busy(self) -> bool:
        """Nobody can act: every process has work, or new weights are on their way."""
        return self._publishing or all(self._open[name] for name in self._acting)

    @property
    def idle(self) -> bool:
        """No process has work."""
        return not any(self._open.values())

    def submit(self, request: Any, on_done: OnDone) -> None:
        """Send a request to whoever acts and has the least work; `on_done` runs inside a later `Supervisor.pump`."""
        self._send(min(self._acting, key=lambda name: len(self._open[name])), request, on_done)

    def call_acting(self, request: Any) -> None:
        """Let all processes that act carry out a request together."""
        self._wait(self._spread(self._acting, request), self._acting)

    def call(self, request: Any) -> Done:
        """Let all actor ranks carry out a request together; returns the first one's reply, with the longest time.

        A request that is carried out in parts lets others in between.

        Raises:
            CheckpointError: a checkpoint could not be written or read.
        """
        seconds = 0.0
        while True:
            replies = self._spread(self._training, request)
            self._wait(replies, self._training)
            if errors := [done.error for done in replies.values() if done.error]:
                raise CheckpointError(errors[0])
            seconds += max(done.seconds for done in replies.values())
            done = replies[self._training[0]]
            if done.finished:
                return replace(done, seconds=seconds)
            request = ContinueRequest()

    def publish(self) -> None:
        """Bring new weights from the actor ranks to those who act; nobody acts before all of them have arrived.

        The first time these are all weights, afterwards those that are trained. One bucket is filled while the one
        before is taken.
        """
        if self._bucket_arena is None:
            return
        self._publishing = True
        under_way: list[tuple[Ticket, dict[str, Done]]] = []

        def end(bucket_arena: Arena) -> None:
            while under_way:
                ticket, replies = under_way.pop()
                self._wait(replies, self._acting)
                bucket_arena.free([ticket])

        for parts in self._buckets(self._bucket_arena):
            ticket = self._bucket_arena.allocate()
            filled = self._spread(self._training, PublishRequest(ticket=ticket, parts=parts))
            self._wait(filled, self._training)
            end(self._bucket_arena)
            under_way.append((ticket, self._spread(self._acting, LoadWeightsRequest(ticket=ticket, parts=parts))))
        end(self._bucket_arena)
        self._publishing, self._published = False, True

    def _buckets(self, bucket_arena: Arena) -> Iterator[tuple[WeightPart, ...]]:
        held = {weight.name: weight.trained for weight in self._weights[self._training[0]]}
        wanted = self._weights[self._acting[0]]
        assert all(weight.name in held for weight in wanted), "rollout and actor were built differently"
        chosen = [weight for weight in wanted if held[weight.name] or not self._published]
        return fill_buckets(chosen, bucket_arena["weights"].shape[1])

    def on_message(self, worker: str, message: Any) -> None:
        """Callback for `Supervisor`."""
        if isinstance(message, WorkerReady):
            self._weights[worker] = message.weights
        if isinstance(message, Done):
            sequence, on_done = self._open[worker].popleft()
            assert sequence == message.sequence, f"reply {message.sequence} to request {sequence}"
            on_done(message)

    def _spread(self, workers: Sequence[str], request: Any) -> dict[str, Done]:
        """Send a request to several; their replies arrive in the result."""
        replies: dict[str, Done] = {}
        for worker in workers:
            self._send(worker, request, partial(replies.__setitem__, worker))
        return replies

    def _wait(self, replies: dict[str, Done], workers: Sequence[str]) -> None:
        while len(replies) < len(workers):
            self._supervisor.pump(1.0)
            self.meanwhile()

    def _send(self, worker: str, request: Any, on_done: OnDone) -> None:
        self._sequence += 1
        self._open[worker].append((self._sequence, on_done))
        self._supervisor.send(worker, replace(request, sequence=self._sequence), timeout_s=self._timeout_s)

    def close(self) -> None:
        """Free the buckets."""
        if self._bucket_arena is not None:
            self._bucket_arena.close()
