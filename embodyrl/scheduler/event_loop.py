"""The driver's one event loop."""

from collections.abc import Callable
from dataclasses import replace

from embodyrl.cluster.supervisor import Supervisor
from embodyrl.errors import CheckpointError
from embodyrl.scheduler.policy_client import PolicyClient
from embodyrl.workers.messages import ContinueRequest, Done, Request

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
