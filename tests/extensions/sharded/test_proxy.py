"""The proxy between hosts connects clients with the secret and disconnects all others."""

import os
import socket

import pytest
from processes import listening, wait_until
from torch.distributed import TCPStore

from embodyrl.extensions.sharded.rendezvous import forward_to_proxy, open_store


def test_proxy_connects_clients_with_the_secret():
    meeting = open_store("127.0.0.2", timeout_s=60)
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
    meeting = open_store("127.0.0.2", timeout_s=60)
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
