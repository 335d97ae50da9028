"""HTTP server that sends given bytes instead of a correct response."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

Parts = Callable[[], Iterable[bytes]]
"""Function that returns the parts of one response; the connection is closed after the last part."""


def json_reply(body: bytes) -> list[bytes]:
    """Return a complete response."""
    return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body]


def endless() -> Iterator[bytes]:
    """Yield a response of unlimited length."""
    return itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n["], itertools.repeat(b" " * (1 << 16)))


HOSTILE: dict[str, Parts] = {
    "not HTTP": lambda: [b"\x00\xff" * 100],
    "closed without a response": lambda: [],
    "closed in the headers": lambda: [b"HTTP/1.1 200 OK\r\nContent-Len"],
    "closed in the body": lambda: [b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"data": ['],
    "broken chunk": lambda: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}"],
    "endless body": endless,
    "endless header": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"a" * 4096)),
    "nested JSON": lambda: json_reply(b"[" * 100_000 + b"]" * 100_000),
    "text": lambda: json_reply(b"hello"),
    "bytes": lambda: json_reply(b"\xff\xfe\xfd"),
    "null": lambda: json_reply(b"null"),
    "list": lambda: json_reply(b"[]"),
    "wrong types": lambda: json_reply(b'{"data": 7, "choices": [7], "action": 7}'),
}
"""Responses that a client must reject, by name."""


@contextmanager
def hostile_server(parts: Parts) -> Iterator[str]:
    """Serve the response to every request; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, parts), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def _serve(listener: socket.socket, parts: Parts) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # closed
            return
        with client, suppress(OSError):  # the client may close first
            client.settimeout(10)
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(1 << 16)
            for part in parts():
                client.sendall(part)
