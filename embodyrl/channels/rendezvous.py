"""Rendezvous of the actor ranks: a torch store in the driver, and an authenticated proxy for other hosts.

The store has no authentication, so it listens on the loopback interface. A client of the proxy must answer a challenge
(HMAC-SHA256 of random bytes) before any of its data is forwarded.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from embodyrl.channels.messages import RankInfo

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rendezvous at which the actor ranks connect to each other; open while the driver runs."""

    rank_info: RankInfo
    """Connection data for all ranks."""
    store: TCPStore | None = None
    """Torch store in the driver process; None: a single rank."""
    proxy: socket.socket | None = None
    """Proxy of the store, if ranks run on other hosts."""

    def close(self) -> None:
        """Close the proxy; idempotent."""
        if self.proxy is not None and self.proxy.fileno() != -1:
            self.proxy.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for clients
            self.proxy.close()


def open_rendezvous(ranks: int, host: str, *, timeout_s: float) -> Rendezvous:
    """Open a rendezvous for `ranks` processes at `host`, an address of this host that all ranks can reach.

    The store is on the loopback interface; unless `host` is loopback, an authenticated proxy at `host` is opened, too.
    """
    if ranks == 1:
        return Rendezvous(RankInfo())
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = socket.create_server((LOOPBACK, 0))  # a store's own socket would listen on all interfaces
    port = listener.getsockname()[1]
    # Do not wait for the ranks: they start later.
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    rank_info = RankInfo(host=host, port=port, timeout_s=timeout_s)
    if host == LOOPBACK:
        return Rendezvous(rank_info, store)
    secret = secrets.token_bytes(32)
    proxy = open_proxy(host, port, secret)
    return Rendezvous(replace(rank_info, port=proxy.getsockname()[1], secret=secret), store, proxy)


_HANDSHAKE_TIMEOUT_S = 30.0
_MAX_PENDING = 128
"""Maximum number of connections in the handshake; each further connection closes the oldest connection."""
_NONCE_BYTES = 32


def open_proxy(host: str, port: int, secret: bytes) -> socket.socket:
    """Start a proxy at `host` that forwards authenticated clients to a loopback port of this host."""
    return _serve(socket.create_server((host, 0)), partial(_authenticate, port, secret))


def forward_to_proxy(host: str, port: int, secret: bytes) -> socket.socket:
    """Start a loopback listener that forwards connections to an authenticated proxy."""
    return _serve(socket.create_server((LOOPBACK, 0)), partial(_connect, host, port, secret))


def _authenticate(port: int, secret: bytes, client: socket.socket) -> socket.socket:
    # A new nonce for each connection prevents replay attacks.
    nonce = secrets.token_bytes(_NONCE_BYTES)
    client.sendall(nonce)
    if not hmac.compare_digest(_receive(client), hmac.digest(secret, nonce, "sha256")):
        raise ConnectionError("A client of the rendezvous proxy sent a wrong secret.")
    return socket.create_connection((LOOPBACK, port), _HANDSHAKE_TIMEOUT_S)


def _connect(host: str, port: int, secret: bytes, _: socket.socket) -> socket.socket:
    proxy = socket.create_connection((host, port), _HANDSHAKE_TIMEOUT_S)
    proxy.sendall(hmac.digest(secret, _receive(proxy), "sha256"))
    return proxy


def _receive(peer: socket.socket) -> bytes:
    received, deadline = b"", time.monotonic() + _HANDSHAKE_TIMEOUT_S
    while len(received) < _NONCE_BYTES:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := peer.recv(_NONCE_BYTES - len(received))):
            raise ConnectionError("The other side closed the connection during the handshake.")
        received += part
    return received


def _serve(listener: socket.socket, connect: Callable[[socket.socket], socket.socket]) -> socket.socket:
    pending: deque[socket.socket] = deque()

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:  # listener closed
                return
            pending.append(peer)
            # A legitimate client completes the handshake at once, so silent clients are the oldest.
            if len(pending) > _MAX_PENDING:
                _disconnect(pending.popleft())
            Thread(target=join, args=(peer,), daemon=True).start()

    def join(client: socket.socket) -> None:
        with client:
            try:
                server = connect(client)
            except OSError:  # the peer is notified only by the end of the connection
                return
            finally:
                with suppress(ValueError):  # disconnected above
                    pending.remove(client)
            with server:
                reverse = Thread(target=_copy_stream, args=(server, client), daemon=True)
                reverse.start()
                _copy_stream(client, server)
                reverse.join()

    Thread(target=accept, daemon=True).start()
    return listener


def _copy_stream(source: socket.socket, sink: socket.socket) -> None:
    """Copy data from `source` to `sink` until one side closes; there is no idle timeout."""
    try:
        source.settimeout(None)
        while part := source.recv(1 << 16):
            sink.sendall(part)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one side closed the connection
        _disconnect(source)
        _disconnect(sink)


def _disconnect(peer: socket.socket) -> None:
    with suppress(OSError):  # already closed
        peer.shutdown(socket.SHUT_RDWR)
