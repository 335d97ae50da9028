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
"""What stands before a message: its number of bytes."""
_PART = 1 << 16
"""Bytes that are read at a time."""


class PipeChannel:
    """A channel between two processes of one host.

    Plain pickle and one lasting poll object: `Connection.send` makes a pickler with a dispatch table of its own and
    `Connection.poll` a selector for every message, which together take longer than the two wake-ups of a round trip.
    Nor does it read a message in parts: `Connection.recv` waits for the end of one whose writer was stopped halfway.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._end = socket.socket(fileno=os.dup(connection.fileno()))
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._part = memoryview(bytearray(_PART))
        self._begun = bytearray()
        """The beginning of a message whose rest has not come."""
        self.arrived: deque[Any] = deque()
        """Messages that came while a long one was sent; `get` returns them first."""

    def put(self, message: Any, timeout_s: float | None = None) -> None:
        """Send a message. Of both ends one gives a deadline: what the other sends before there is room has `arrived`.

        Raises:
            ChannelClosed: the other end is gone.
            ChannelTimeout: for `timeout_s` the other end took nothing, and there is no room for the message; the rest
                of it is lost, so the channel is of no more use.
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
            raise ChannelClosed(f"The other end of the channel is gone: {error}.") from error

    def _wait_for_room(self, timeout_s: float | None) -> None:
        """Wait until the other end reads on; with a deadline, take what it sends meanwhile."""
        # It may be at a long message itself and wait for us. One of both must read then, and only one: there is no
        # room for the rest of either message while both wait for the other's.
        reads = select.POLLIN if timeout_s is not None else 0
        descriptor = self.connection.fileno()
        self._poll.modify(descriptor, select.POLLOUT | reads)
        ready = self._poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)
        self._poll.modify(descriptor, select.POLLIN)
        if not ready:
            raise ChannelTimeout(f"The other end of the channel took nothing for {timeout_s:g} s.")
        if ready[0][1] & reads:
            self._read()

    def get(self, timeout_s: float) -> Any:
        """Receive the next message.

        Raises:
            ChannelClosed: the other end is gone.
            ChannelTimeout: for `timeout_s` nothing arrived; of a message that had begun to, the rest may still come.
        """
        while not self.arrived:
            if not self._poll.poll(timeout_s * 1000):
                raise ChannelTimeout(f"Nothing arrived on the channel within {timeout_s:g} s.")
            try:
                self._read()
            except (EOFError, ConnectionResetError, BrokenPipeError) as error:
                raise ChannelClosed("The other end of the channel is gone.") from error
        return self.arrived.popleft()

    def _read(self) -> None:
        """Take in what is there of one message or several."""
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
    """Listen at one address of this host and connect who knows the secret with a port of the loopback interface."""
    return _serve(socket.create_server((host, 0)), partial(_authenticate, port, secret))


def forward_to_proxy(host: str, port: int, secret: bytes) -> socket.socket:
    """Listen on this host's loopback interface and connect everybody there with what is behind the proxy."""
    return _serve(socket.create_server((LOOPBACK, 0)), partial(_connect, host, port, secret))


def _authenticate(port: int, secret: bytes, client: socket.socket) -> socket.socket:
    # A fresh question each time: an answer that somebody overheard opens nothing.
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
            except OSError:  # closed
                return
            Thread(target=join, args=(peer,), daemon=True).start()

    def join(near: socket.socket) -> None:
        with near:
            try:
                far = dial(near)
            except OSError:  # it is told by the end of the connection, and nothing else
                return
            with far:
                back = Thread(target=_pump, args=(far, near), daemon=True)
                back.start()
                _pump(near, far)
                back.join()

    Thread(target=accept, daemon=True).start()
    return listener


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until one side ends; a connection may rest for as long as it likes."""
    try:
        source.settimeout(None)
        while part := source.recv(1 << 16):
            sink.sendall(part)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one side is gone: so is the connection
        for side in (source, sink):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was gone already
