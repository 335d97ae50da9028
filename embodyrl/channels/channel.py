"""Ticket channels: small messages between two workers; the payload stays in the arena."""

import pickle
import select
from multiprocessing.connection import Connection
from typing import Any

from embodyrl.errors import ChannelClosed, ChannelTimeout


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
        """Send a message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        try:
            self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise ChannelClosed(f"The other end of the channel is gone: {error}.") from error

    def get(self, timeout_s: float) -> Any:
        """Receive the next message.

        Raises:
            ChannelClosed: the other end is gone.
            ChannelTimeout: nothing arrived in time.
        """
        if not self._poll.poll(timeout_s * 1000):
            raise ChannelTimeout(f"Nothing arrived on the channel within {timeout_s:g} s.")
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise ChannelClosed("The other end of the channel is gone.") from error

    def close(self) -> None:
        """Close this end; idempotent."""
        self.connection.close()
