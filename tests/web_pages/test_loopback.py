"""The local web server answers any request, and slow clients do not delay others."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from fuzzing import bodies

import embodyrl
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.web_pages import loopback
from embodyrl.web_pages.loopback import Answer, LoopbackServer

CHECKPOINT = "assets/openvla_oft_tabletop"
BODIES = [
    *(b"[]", b"7", b"null", b"true", b'"x"', b"", b"{}", b"{", b"\xff\xfe", b"\x00" * 9, b"[" * 20_000),
    *(b'{"task":1e999}', b'{"seq":-1e999}', b'{"after":NaN}', b'{"seq":1.5}', b'{"seq":null}', b'{"client":[]}'),
    *(b'{"task":true}', b'{"task":"1"}', b'{"task":99}', b'{"task":-99}', b'{"task":1' + b"0" * 400 + b"}"),
    *(b'{"instruction":"\\ud800"}', b'{"instruction":"\xed\xa0\x80"}', b'{"instruction":null}', b'{"instruction":{}}'),
    *(
        b'{"instruction":"' + b"a" * 60_000 + b'"}',
        b'{"instruction":"\\u0000\\u001b"}',
        b'{"task":1' + b"0" * 5000 + b"}",
    ),
]


@contextmanager
def answering(gets: dict, posts: dict) -> Iterator[LoopbackServer]:
    def end() -> Answer:
        raise KeyboardInterrupt

    server = LoopbackServer(0, gets, posts)

    def stop() -> None:
        with suppress(EmbodyError):
            server.call(end)

    def answer() -> None:
        with suppress(KeyboardInterrupt):
            server.process_requests()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield server
    finally:
        threading.Thread(target=stop, daemon=True).start()
        thread.join()
        server.server_close()


def post(server: LoopbackServer, name: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", name, body, {"X-Token": server.token})
    answer = connection.getresponse()
    read = answer.status, answer.read()
    connection.close()
    return read


def test_taken_port_is_reported_without_a_flag_of_one_command() -> None:
    with answering({}, {}) as server, pytest.raises(ConfigError, match=rf"^Port {server.server_port}: .* or 0 for any"):
        LoopbackServer(server.server_port, {}, {})


def test_requests_up_to_one_mebibyte_are_accepted() -> None:
    with answering({}, {"/size": lambda body: ("text/plain", str(len(body["text"])).encode())}) as server:
        assert post(server, "/size", b'{"text": "%s"}' % (b"a" * 900_000)) == (200, b"900000")
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("POST", "/size", headers={"X-Token": server.token, "Content-Length": "1100000"})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (413, b"the request has more than 1048576 bytes")
        connection.close()


def test_every_request_body_gets_a_response_without_traceback(capfd) -> None:
    from embodyrl.play.request_handlers import RequestHandlers
    from embodyrl.play.scene import Scene

    policy = embodyrl.load_policy(CHECKPOINT, device="cpu")
    scene = Scene(policy, policy.make_env())
    desk = RequestHandlers("run", scene)
    rng = random.Random(0)
    fuzzed = [bytearray(rng.choice(BODIES[10:])[:200]) for _ in range(500)]
    for body in fuzzed:
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
    with answering({}, desk.posts) as server:
        for number, body in enumerate([*BODIES, *map(bytes, fuzzed)]):
            name = ("/hello", "/view", "/act")[number % 3]
            code, text = post(server, name, body)
            assert code in (200, 400), (name, body[:80], code, text)
        for seq in (1, 2):
            good = json.dumps({"client": "a", "seq": seq, "do": "tick", "inputs": None}).encode()
            assert post(server, "/act", good)[0] == 200
        said = '{"client":"a","seq":3,"do":"say","instruction":"touch it, é"}'.encode()
        assert b"touch it, \\u00e9" in post(server, "/act", said)[1]
    scene.env.close()
    assert "Traceback" not in capfd.readouterr().err


def test_every_request_body_gets_a_response_without_an_active_episode(capfd) -> None:
    """The page of `dagger.expert=human` between two rounds."""
    from embodyrl.play.request_handlers import RequestHandlers

    valid = {"client": "a", "seq": 1, "do": "tick", "after": 0, "inputs": {"0": 1.0}, "task": 0, "steps": 1}
    with answering({}, RequestHandlers("dagger").posts) as server:
        for number, body in enumerate(bodies(valid, 500, seed=2)):
            code, text = post(server, ("/hello", "/view", "/act")[number % 3], body)
            assert code in (200, 400), (body[:80], code, text)
    assert "Traceback" not in capfd.readouterr().err


def test_arbitrary_bytes_do_not_stop_the_server(capfd) -> None:
    rng = random.Random(1)
    with answering({"/": lambda: ("text/plain", b"page")}, {}) as server:
        address = ("127.0.0.1", server.server_port)
        start = b"GET /?token=%s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (server.token.encode(), server.server_port)
        for _ in range(500):
            raw = bytearray(start)
            for _ in range(rng.randrange(1, 6)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            with socket.create_connection(address, timeout=60) as client, suppress(ConnectionError):
                client.sendall(raw)
                client.shutdown(socket.SHUT_WR)
                while client.recv(4096):
                    pass
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(start)
            assert b"page" in client.makefile("rb").read()
    assert "Traceback" not in capfd.readouterr().err


def test_silent_connections_do_not_delay_other_clients() -> None:
    with answering({}, {"/step": lambda body: ("text/plain", b"done")}) as server:
        silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(8)]
        assert post(server, "/step", b"{}") == (200, b"done")
        for client in silent:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
            client.close()


def test_slow_request_is_aborted(monkeypatch) -> None:
    monkeypatch.setattr(loopback, "_REQUEST_S", 0.3)
    with answering({}, {}) as server, socket.create_connection(("127.0.0.1", server.server_port)) as client:
        client.settimeout(0.05)
        for _ in range(2000):  # a hundred seconds of it
            with suppress(TimeoutError):
                client.sendall(b"G")
                client.recv(1)  # an answer, or the end
                return
        raise AssertionError("still connected")


def test_call_of_a_stopped_server_is_an_error() -> None:
    with answering({}, {}) as server:
        assert server.call(lambda: ("text/plain", b"done")) == ("text/plain", b"done")
    with pytest.raises(EmbodyError, match="has stopped"):
        server.call(lambda: ("text/plain", b"done"))


def test_clients_beyond_the_limit_are_disconnected(monkeypatch) -> None:
    monkeypatch.setattr(loopback, "_MAX_CLIENTS", 2)
    with answering({}, {}) as server:
        clients = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3)]
        assert clients[2].recv(1) == b""
        for client in clients:
            client.close()
