"""The driver's one event loop, and its side of the policy's processes: what each was asked, who must know the reply."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from embodyrl.channels.arena import Arena, Ticket
from embodyrl.channels.layout import BUCKET, WeightInfo, WeightPart, fill_buckets
from embodyrl.channels.messages import ContinueRequest, Done, LoadWeightsRequest, PublishRequest, Request, WorkerReady
from embodyrl.cluster.protocol import Message
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.errors import CheckpointError
from embodyrl.workers.lifecycle import WorkerSpec

OnDone = Callable[[Done], None]


@dataclass(frozen=True, slots=True)
class Replies:
    """What comes back for a request that several processes carry out together."""

    expected: tuple[str, ...]
    arrived: dict[str, Done] = field(default_factory=dict)

    def complete(self) -> bool:
        """Whether all have replied."""
        return len(self.arrived) == len(self.expected)


class PolicyClient:
    """Keeps the books of requests and replies, and never waits (`EventLoop.run_until` does).

    A process answers in the order in which it was asked; a reply that does not belong to its oldest open request is a
    defect.
    """

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

    @property
    def busy(self) -> bool:
        """Nobody can act: every process has work, or new weights are on their way."""
        return self._publishing or all(self._open[name] for name in self._acting)

    @property
    def idle(self) -> bool:
        """No process has work."""
        return not any(self._open.values())

    def submit(self, request: Request, on_done: OnDone) -> None:
        """Send a request to whoever acts and has the least work; `on_done` runs inside a later `Supervisor.pump`."""
        self._send(min(self._acting, key=lambda name: len(self._open[name])), request, on_done)

    def ask_acting(self, request: Request) -> Replies:
        """Let all processes that act carry out a request together."""
        return self._ask(self._acting, request)

    def ask_training(self, request: Request) -> Replies:
        """Let all actor ranks carry out a request together."""
        return self._ask(self._training, request)

    def publish(self) -> Iterator[Replies]:
        """Bring new weights from the actor ranks to those who act; yields what must be complete before it goes on.

        The first time these are all weights, afterwards those that are trained. Nobody acts before all have arrived.
        """
        if (arena := self._bucket_arena) is None:
            return
        # Makes the acting processes busy: no inference may run between two buckets, with half of the new weights.
        self._publishing = True
        under_way: list[tuple[Ticket, Replies]] = []
        for parts in self._buckets(arena):
            ticket = arena.allocate()
            yield self.ask_training(PublishRequest(ticket=ticket, parts=parts))
            # One bucket was filled while the one before was taken; there are two.
            yield from _taken(arena, under_way)
            under_way.append((ticket, self.ask_acting(LoadWeightsRequest(ticket=ticket, parts=parts))))
        yield from _taken(arena, under_way)
        self._publishing, self._published = False, True

    def _buckets(self, bucket_arena: Arena) -> Iterator[tuple[WeightPart, ...]]:
        held = {weight.name: weight.trained for weight in self._weights[self._training[0]]}
        wanted = self._weights[self._acting[0]]
        assert all(weight.name in held for weight in wanted), "rollout and actor were built differently"
        # Frozen weights are sent once: nobody changes them afterwards.
        chosen = [weight for weight in wanted if held[weight.name] or not self._published]
        return fill_buckets(chosen, bucket_arena[BUCKET].shape[1])

    def on_message(self, worker: str, message: Message) -> None:
        """Callback for `Supervisor`."""
        if isinstance(message, WorkerReady):
            self._weights[worker] = message.weights
        elif isinstance(message, Done):
            sequence, on_done = self._open[worker].popleft()
            assert sequence == message.sequence, f"reply {message.sequence} to request {sequence}"
            on_done(message)

    def _ask(self, workers: Sequence[str], request: Request) -> Replies:
        replies = Replies(expected=tuple(workers))
        for worker in workers:
            self._send(worker, request, partial(replies.arrived.__setitem__, worker))
        return replies

    def _send(self, worker: str, request: Request, on_done: OnDone) -> None:
        self._sequence += 1
        # Before it is sent, or a reply that is there at once would find no open request.
        self._open[worker].append((self._sequence, on_done))
        self._supervisor.send(worker, replace(request, sequence=self._sequence), timeout_s=self._timeout_s)

    def close(self) -> None:
        """Free the buckets."""
        if self._bucket_arena is not None:
            self._bucket_arena.close()


def _taken(arena: Arena, under_way: list[tuple[Ticket, Replies]]) -> Iterator[Replies]:
    """Free the bucket that is under way once everybody has taken it."""
    while under_way:
        ticket, replies = under_way.pop()
        yield replies
        arena.free([ticket])


PATIENCE_S = 1.0
"""Longest wait for news before signals are looked at again."""


class EventLoop:
    """The only place where the driver waits: takes in what workers report, sends out what can be sent.

    Callbacks of the supervisor only take notes and requests leave from `advance`, so no code of the driver ever runs
    inside other code of it. Every request has its deadline at the launcher, so no wait is endless.
    """

    def __init__(self, supervisor: Supervisor, policy: PolicyClient) -> None:
        self._supervisor = supervisor
        self._policy = policy

    def advance(self) -> float:
        """Send out all that can be sent now; returns how many seconds to wait for news at most."""
        return PATIENCE_S

    @property
    def pending(self) -> bool:
        """Whether somebody is at work, or somebody could be: else a wait would last for ever."""
        return not self._policy.idle or bool(self._supervisor.starting)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Go on until `condition` holds.

        Raises:
            Interrupted: a signal asked the run to stop.
            WorkerError: a worker died that is not restarted.
        """
        patience = self.advance()
        while not condition():
            assert self.pending, f"nobody is at work, and the wait is not over: {self!r}"
            self._supervisor.pump(patience)
            # Before the condition is looked at: between two parts of an update, inferences get their turn here.
            patience = self.advance()

    def call(self, request: Request) -> Done:
        """Let all actor ranks carry out a request; returns the first one's reply, with the time of the slowest.

        Raises:
            CheckpointError: a checkpoint could not be written or read.
        """
        seconds = 0.0
        while True:
            replies = self._policy.ask_training(request)
            self.run_until(replies.complete)
            arrived = [replies.arrived[worker] for worker in replies.expected]
            if errors := [done.error for done in arrived if done.error]:
                raise CheckpointError(errors[0])
            seconds += max(done.seconds for done in arrived)
            if arrived[0].finished:
                return replace(arrived[0], seconds=seconds)
            request = ContinueRequest()  # one part of an update is done
