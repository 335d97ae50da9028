"""The proxy between hosts connects clients with the secret and disconnects all others."""

import hmac
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from processes import listening, wait_until
from torch.distributed import TCPStore

from embodyrl.channels.rendezvous import Rendezvous, forward_to_proxy, open_proxy, open_rendezvous


def test_proxy_connects_clients_that_send_the_secret():
    meeting = open_rendezvous(2, "127.0.0.2", timeout_s=60)
    way = forward_to_proxy("127.0.0.2", meeting.rank_info.port, meeting.rank_info.secret)
    client = TCPStore(*way.getsockname(), is_master=False)
    client.set("key", b"x" * 100_000)
    assert meeting.store.get("key") == b"x" * 100_000
    assert listening([os.getpid()]) == {"127.0.0.1", "127.0.0.2"}
    way.shutdown(socket.SHUT_RDWR)
    way.close()
    meeting.close()
    assert wait_until(lambda: "127.0.0.2" not in listening([os.getpid()]), 10)


@pytest.mark.parametrize("said", [b"\0" * 32, b"x" * 100_000, b"short"])
def test_client_without_the_secret_is_disconnected(said: bytes):
    meeting = open_rendezvous(2, "127.0.0.2", timeout_s=60)
    with socket.create_connection(("127.0.0.2", meeting.rank_info.port), 10) as stranger:
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            heard = stranger.recv(1)
        except OSError:
            heard = b""
        assert heard == b""
    meeting.close()


@pytest.fixture
def meeting() -> Iterator[Rendezvous]:
    made = open_rendezvous(2, "127.0.0.2", timeout_s=60)
    yield made
    made.close()


def greet(meeting: Rendezvous) -> tuple[socket.socket, bytes]:
    """Connect to the proxy; return the connection and the nonce."""
    peer = socket.create_connection(("127.0.0.2", meeting.rank_info.port), 10)
    return peer, peer.recv(32, socket.MSG_WAITALL)


def is_closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


def test_replayed_response_is_rejected(meeting):
    """A peer that recorded a valid handshake cannot connect with it."""
    first, nonce = greet(meeting)
    response = hmac.digest(meeting.rank_info.secret, nonce, "sha256")
    first.sendall(response)
    second, other_nonce = greet(meeting)
    assert other_nonce != nonce
    second.sendall(response)
    assert is_closed(second)
    for peer in (first, second):
        peer.close()


def test_fragmented_response_is_accepted():
    secret = b"secret"
    with (
        socket.create_server(("127.0.0.1", 0)) as store,
        open_proxy("127.0.0.2", store.getsockname()[1], secret) as proxy,
        socket.create_connection(proxy.getsockname(), 10) as peer,
    ):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in hmac.digest(secret, peer.recv(32, socket.MSG_WAITALL), "sha256"):
            peer.sendall(bytes([byte]))
        store.settimeout(10)
        with store.accept()[0] as connected:
            connected.sendall(b"hello")
        assert peer.recv(5, socket.MSG_WAITALL) == b"hello"
        proxy.shutdown(socket.SHUT_RDWR)


def test_idle_connections_use_few_threads_and_do_not_block_clients(meeting):
    before = threading.active_count()
    silent = [greet(meeting)[0] for _ in range(400)]
    assert wait_until(lambda: threading.active_count() - before < 140, 10)
    way = forward_to_proxy("127.0.0.2", meeting.rank_info.port, meeting.rank_info.secret)
    client = TCPStore(*way.getsockname(), is_master=False)
    client.set("key", b"value")
    assert meeting.store.get("key") == b"value"
    assert is_closed(silent[0])
    for peer in silent:
        peer.close()
    way.shutdown(socket.SHUT_RDWR)
    way.close()
