"""Message channel between two processes of a host; arrays stay in the arena."""

import os
import pickle
import select
import socket
import struct
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from embodyrl.errors import ChannelClosed, ChannelTimeout

_LENGTH = struct.Struct("!Q")
"""Format of the prefix of each message, which contains the message's length in bytes."""
_READ_BYTES = 1 << 16
"""Maximum number of bytes per read."""


class PipeChannel:
    """Message channel over a pipe between two processes of a host.

    The class uses plain pickle and one persistent poll object: `Connection.send` and `Connection.poll` create a
    pickler or selector for every message, which takes longer than the round trip. Partial messages are supported,
    whereas `Connection.recv` blocks on a message whose writer was stopped.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._incomplete = bytearray()
        """Received bytes of an incomplete message."""
        self.arrived: deque[Any] = deque()
        """Messages that were received during a blocked `put`; `get` returns these messages first."""

    def put(self, message: Any, timeout_s: float | None = None) -> None:
        """Send a picklable message.

        Exactly one of the two ends sets a deadline; messages received while sending are stored in `arrived`.

        Raises:
            ChannelClosed: the other end is closed.
            ChannelTimeout: the other end read nothing for `timeout_s` and the pipe is full. The rest of the message is
                lost, and the channel is unusable.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        rest = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            while rest:
                try:
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._wait_until_writable(timeout_s)
        except (EOFError, OSError) as error:
            raise ChannelClosed(f"The other end of the channel is closed: {error}.") from error

    def _wait_until_writable(self, timeout_s: float | None) -> None:
        """Wait until the pipe has room; if there is a deadline, also read incoming messages."""
        # The other end may be blocked in `put`, too. Exactly one end must read: with both pipes full, neither could
        # finish.
        read_event = select.POLLIN if timeout_s is not None else 0
        descriptor = self.connection.fileno()
        self._poll.modify(descriptor, select.POLLOUT | read_event)
        ready = self._poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)
        self._poll.modify(descriptor, select.POLLIN)
        if not ready:
            raise ChannelTimeout(f"The receiver did not read from the channel for {timeout_s:g} s.")
        if ready[0][1] & read_event:
            self._read()

    def get(self, timeout_s: float) -> Any:
        """Receive the next message.

        Raises:
            ChannelClosed: the other end is closed.
            ChannelTimeout: nothing arrived for `timeout_s`; the rest of a partial message may still arrive.
        """
        while not self.arrived:
            if not self._poll.poll(timeout_s * 1000):
                raise ChannelTimeout(f"No message arrived on the channel within {timeout_s:g} s.")
            try:
                self._read()
            except (EOFError, ConnectionResetError, BrokenPipeError) as error:
                raise ChannelClosed("The other end of the channel is closed.") from error
        return self.arrived.popleft()

    def _read(self) -> None:
        """Read available bytes, and store complete messages in `arrived`."""
        count = self._socket.recv_into(self._read_buffer)
        if not count:
            raise EOFError
        self._incomplete += self._read_buffer[:count]
        while len(self._incomplete) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._incomplete)[0]
            if len(self._incomplete) < end:
                return
            with memoryview(self._incomplete) as view:
                self.arrived.append(pickle.loads(view[_LENGTH.size : end]))
            del self._incomplete[:end]

    def close(self) -> None:
        """Close this end of the channel; idempotent."""
        self._socket.close()
        self.connection.close()
