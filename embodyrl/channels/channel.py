"""Ticket channels: small messages between two workers; the payload stays in the arena."""

from __future__ import annotations

import pickle
import select
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, Protocol

from embodyrl.errors import ChannelClosed, ChannelTimeout


class Channel(Protocol):
    """One end of a duplex message channel."""

    def put(self, message: Any) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        ...

    def get(self, timeout_s: float) -> Any:
        """Receive the next message.

        Raises:
            ChannelClosed: the other end is gone.
            ChannelTimeout: nothing arrived in time.
        """
        ...

    def close(self) -> None:
        """Close this end; idempotent."""
        ...


class PipeChannel:
    """A channel between two processes of one host.

    Plain pickle and one lasting poll object: `Connection.send` makes a pickler with a dispatch table of its own and
    `Connection.poll` a selector for every message, which together take longer than the two wake-ups of a round trip.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def put(self, message: Any) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise ChannelClosed(f"The other end of the channel is gone: {error}.") from error

    def get(self, timeout_s: float) -> Any:
        if not self._poll.poll(timeout_s * 1000):
            raise ChannelTimeout(f"Nothing arrived on the channel within {timeout_s:g} s.")
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise ChannelClosed("The other end of the channel is gone.") from error

    def close(self) -> None:
        self.connection.close()


class InlineChannel:
    """One end of a channel inside a single thread: what one end puts, the other end gets at once."""

    def __init__(self) -> None:
        self._inbox: deque[Any] = deque()
        self._peer: InlineChannel | None = None
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[InlineChannel, InlineChannel]:
        """Return two connected ends."""
        a, b = cls(), cls()
        a._peer, b._peer = b, a
        return a, b

    def __len__(self) -> int:
        return len(self._inbox)

    def put(self, message: Any) -> None:
        if self._peer is None or self._peer._closed:
            raise ChannelClosed("The other end of the channel is gone.")
        self._peer._inbox.append(message)

    def get(self, timeout_s: float) -> Any:
        if self._inbox:
            return self._inbox.popleft()
        if self._peer is None or self._peer._closed:
            raise ChannelClosed("The other end of the channel is gone.")
        # One thread of control: nobody else can put anything while we wait.
        raise ChannelTimeout(f"Nothing arrived on the channel within {timeout_s:g} s.")

    def close(self) -> None:
        self._closed = True
