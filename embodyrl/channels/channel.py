"""Message channels between two workers (payload stays in the arena), and authenticated proxies between hosts.

A proxy gives hosts access to a server without authentication, such as a torch store, which listens on the loopback
interface. A client must answer a challenge (HMAC-SHA256 of random bytes) before any of its data is forwarded.
"""

import hmac
import os
import pickle
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from embodyrl.errors import ChannelClosed, ChannelTimeout

_LENGTH = struct.Struct("!Q")
"""Length prefix of a message, in bytes."""
_PART = 1 << 16
"""Bytes per read."""


class PipeChannel:
    """Channel between two processes of one host.

    Uses plain pickle and one persistent poll object: `Connection.send` and `Connection.poll` create a pickler or
    selector for every message, which takes longer than the round trip. Partial messages are supported:
    `Connection.recv` would block on a message whose writer was stopped.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._end = socket.socket(fileno=os.dup(connection.fileno()))
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._part = memoryview(bytearray(_PART))
        self._begun = bytearray()
        """Start of an incomplete message."""
        self.arrived: deque[Any] = deque()
        """Messages that arrived while a long one was sent; `get` returns them first."""

    def put(self, message: Any, timeout_s: float | None = None) -> None:
        """Send a message.

        One of both ends sets a deadline; messages that it receives while sending are stored in `arrived`.

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
                    rest = rest[self._end.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._wait_for_room(timeout_s)
        except (EOFError, OSError) as error:
            raise ChannelClosed(f"The other end of the channel is closed: {error}.") from error

    def _wait_for_room(self, timeout_s: float | None) -> None:
        """Wait until the pipe has room; with a deadline, read incoming messages meanwhile."""
        # The other end may be blocked in `put`, too. Exactly one end must read: with both pipes full, neither could
        # finish.
        reads = select.POLLIN if timeout_s is not None else 0
        descriptor = self.connection.fileno()
        self._poll.modify(descriptor, select.POLLOUT | reads)
        ready = self._poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)
        self._poll.modify(descriptor, select.POLLIN)
        if not ready:
            raise ChannelTimeout(f"The other end of the channel read nothing for {timeout_s:g} s.")
        if ready[0][1] & reads:
            self._read()

    def get(self, timeout_s: float) -> Any:
        """Receive the next message.

        Raises:
            ChannelClosed: the other end is closed.
            ChannelTimeout: nothing arrived for `timeout_s`; the rest of a partial message may still arrive.
        """
        while not self.arrived:
            if not self._poll.poll(timeout_s * 1000):
                raise ChannelTimeout(f"Nothing arrived on the channel within {timeout_s:g} s.")
            try:
                self._read()
            except (EOFError, ConnectionResetError, BrokenPipeError) as error:
                raise ChannelClosed("The other end of the channel is closed.") from error
        return self.arrived.popleft()

    def _read(self) -> None:
        """Read the available messages or parts of messages."""
        count = self._end.recv_into(self._part)
        if not count:
            raise EOFError
        self._begun += self._part[:count]
        while len(self._begun) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._begun)[0]
            if len(self._begun) < end:
                return
            with memoryview(self._begun) as begun:
                self.arrived.append(pickle.loads(begun[_LENGTH.size : end]))
            del self._begun[:end]

    def close(self) -> None:
        """Close this end; idempotent."""
        self._end.close()
        self.connection.close()


LOOPBACK = "127.0.0.1"
_HANDSHAKE_S = 30.0
_NONCE = 32


def open_proxy(host: str, port: int, secret: bytes) -> socket.socket:
    """Start a proxy at `host` that connects authenticated clients to a loopback port of this host."""
    return _serve(socket.create_server((host, 0)), partial(_authenticate, port, secret))


def forward_to_proxy(host: str, port: int, secret: bytes) -> socket.socket:
    """Start a loopback listener that forwards connections to an authenticated proxy."""
    return _serve(socket.create_server((LOOPBACK, 0)), partial(_connect, host, port, secret))


def _authenticate(port: int, secret: bytes, client: socket.socket) -> socket.socket:
    # A new nonce for each connection prevents replay attacks.
    nonce = secrets.token_bytes(_NONCE)
    client.settimeout(_HANDSHAKE_S)
    client.sendall(nonce)
    if not hmac.compare_digest(_receive(client), hmac.digest(secret, nonce, "sha256")):
        raise ConnectionError("wrong secret")
    return socket.create_connection((LOOPBACK, port), _HANDSHAKE_S)


def _connect(host: str, port: int, secret: bytes, _: socket.socket) -> socket.socket:
    proxy = socket.create_connection((host, port), _HANDSHAKE_S)
    proxy.sendall(hmac.digest(secret, _receive(proxy), "sha256"))
    return proxy


def _receive(peer: socket.socket) -> bytes:
    received = peer.recv(_NONCE, socket.MSG_WAITALL)
    if len(received) < _NONCE:
        raise ConnectionError("the other side closed the connection")
    return received


def _serve(listener: socket.socket, dial: Callable[[socket.socket], socket.socket]) -> socket.socket:
    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:  # listener closed
                return
            Thread(target=join, args=(peer,), daemon=True).start()

    def join(near: socket.socket) -> None:
        with near:
            try:
                far = dial(near)
            except OSError:  # the peer is notified only by the end of the connection
                return
            with far:
                back = Thread(target=_pump, args=(far, near), daemon=True)
                back.start()
                _pump(near, far)
                back.join()

    Thread(target=accept, daemon=True).start()
    return listener


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy data until one side closes; there is no idle timeout."""
    try:
        source.settimeout(None)
        while part := source.recv(1 << 16):
            sink.sendall(part)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one side closed the connection
        for side in (source, sink):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # already closed
