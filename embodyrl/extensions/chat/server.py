"""OpenAI-compatible HTTP server for one language model."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from embodyrl.cluster.supervisor import StopRequest
from embodyrl.errors import EmbodyError
from embodyrl.extensions.chat.replies import Completion, Served
from embodyrl.extensions.chat.requests import ApiError, ChatRequest
from embodyrl.extensions.pages.limited import LimitedServer
from embodyrl.extensions.serving.server import PolicyThread
from embodyrl.policies.causal_lm.stream import Piece
from embodyrl.policies.remote.settings import ServeSettings

_REQUEST_S = 30.0
"""Maximum time for a client to send a request, in seconds."""
_CONNECTIONS = 4
"""Maximum number of open connections as a multiple of `serve.max_clients`; the server closes further connections."""
_DIGITS = 20
"""Maximum number of digits of a Content-Length header; `int` raises an error for thousands of digits."""
_POLL_S = 0.5
"""Interval at which the main thread checks for signals, in seconds."""
_CHAT = "/v1/chat/completions"


class ChatServer(LimitedServer):
    """HTTP server with one thread per connection, and one thread that generates tokens for all requests in turn."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, served: Served, cfg: ServeSettings, say: Callable[[str], None]) -> None:
        """Bind the server to the configured address.

        Raises:
            EmbodyError: the server cannot listen at the address.
        """
        self.served, self.cfg, self.say = served, cfg, say
        self.thread = PolicyThread()
        self.places = threading.BoundedSemaphore(cfg.max_clients)
        self.address_family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
        try:
            super().__init__((cfg.host, cfg.port), _Handler, _CONNECTIONS * cfg.max_clients)
        except OSError as error:
            raise EmbodyError(
                f"Cannot listen on {cfg.host}:{cfg.port}: {error.strerror or error}. Set another serve.port (0: "
                "any free port), or set serve.host to an address of this machine."
            ) from error

    def run(self, ready: Callable[[str], None]) -> None:
        """Serve until SIGINT, SIGTERM or SIGHUP; call `ready` with the base URL, which ends in /v1.

        Raises:
            Interrupted: always, at the end.
        """
        stop, never = StopRequest(), threading.Event()
        host = f"[{self.cfg.host}]" if ":" in self.cfg.host else self.cfg.host
        with self, stop.listening():
            threading.Thread(target=self.serve_forever, name="chat", daemon=True).start()
            try:
                ready(f"http://{host}:{self.server_address[1]}/v1")
                while True:
                    stop.check()
                    never.wait(_POLL_S)
            finally:
                self.shutdown()

    def server_close(self) -> None:
        """Close the socket without waiting for replies in progress."""
        self.socket.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an exception of a request handler, unless the connection was lost."""
        if not isinstance(error := sys.exception(), ConnectionError | TimeoutError):
            self.say(f"a request failed: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    server_version, sys_version = "embodyrl", ""

    def setup(self) -> None:
        limit = self.server.cfg.idle_timeout_s
        super().setup()
        self.connection.settimeout(limit)
        # The timeout of the socket restarts with each byte; this timer does not.
        self._late = threading.Timer(min(_REQUEST_S, limit), self._hang_up)
        self._late.daemon = True
        self._late.start()

    def finish(self) -> None:
        self._late.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        card, path = self.server.served.card, self.path.partition("?")[0]
        found = {
            "/v1/models": {"object": "list", "data": [card]},
            f"/v1/models/{card['id']}": card,
            "/health": {},
            "/healthz": {},
        }
        if self._refused():
            return
        if path.startswith("/v1/models/") and path not in found:
            self._fail(ApiError(404, f"The model '{path[11:]}' does not exist.", param="model", code="model_not_found"))
        elif path in found:
            self._reply(200, found[path])
        else:
            self._fail(ApiError(404, f"Unknown path {path}. Use GET /v1/models or POST {_CHAT}."))

    def do_POST(self) -> None:
        if self._refused():
            return
        try:
            if self.path.partition("?")[0] != _CHAT:
                raise ApiError(404, f"Unknown path {self.path}. Use GET /v1/models or POST {_CHAT}.")
            body = self._body()
            self._late.cancel()
            if not self.server.places.acquire(blocking=False):
                limit = self.server.cfg.max_clients
                raise ApiError(
                    503, f"The server is already generating {limit} replies (serve.max_clients). Retry later."
                )
            try:
                self._complete(ChatRequest.read(body))
            finally:
                self.server.places.release()
        except ApiError as error:
            self._fail(error)

    def _refused(self) -> bool:
        """Reject a request with an Origin header; return True if rejected.

        Browsers set this header: any web page could send requests on behalf of the user.
        """
        if self.headers.get("Origin") is None:
            return False
        self._fail(ApiError(403, "Requests from web pages are rejected."))
        return True

    def _body(self) -> bytes:
        size, most = self.headers.get("Content-Length") or "", self.server.cfg.max_message_mib * 2**20
        if not size.isdecimal() or self.headers.get("Transfer-Encoding"):
            raise ApiError(411, "The request must have a Content-Length header, and no Transfer-Encoding header.")
        if len(size) > _DIGITS or int(size) > most:
            raise ApiError(
                413, f"The request body has {size:.{_DIGITS}} bytes; the limit is {most} (serve.max_message_mib)."
            )
        if len(body := self.rfile.read(int(size))) < int(size):
            raise ApiError(408, "The request body is incomplete. Send the request again.")
        return body

    def _complete(self, request: ChatRequest) -> None:
        completion = self._call(lambda: Completion.begin(self.server.served, request))
        with closing(self._pieces(completion)) as pieces:
            if not request.stream:
                self._reply(200, completion.whole([*pieces]))
                return
            self._head(200, "text/event-stream")
            try:
                for chunk in completion.chunks(pieces):
                    self._event(json.dumps(chunk))
            except ApiError as error:  # the status line was already sent
                self._event(json.dumps(error.body))
            self._event("[DONE]")

    def _pieces(self, completion: Completion) -> Generator[tuple[int, Piece]]:
        """Yield the tokens of a completion; the model alternates between requests after each token.

        Raises:
            ApiError: the model takes too long, or fails.
        """
        pieces = completion.pieces()
        while (found := self._call(lambda: next(pieces, None))) is not None:
            if self._is_gone():
                raise ConnectionAbortedError
            yield found

    def _call(self, act: Callable[[], Any]) -> Any:
        limit = self.server.cfg.answer_timeout_s
        future = self.server.thread.submit(act)
        try:
            return future.result(limit)
        except ApiError:
            raise
        except TimeoutError as error:
            future.cancel()
            raise ApiError(503, f"The model did not respond within {limit:g} s (serve.answer_timeout_s).") from error
        except Exception as error:
            self.server.say(f"a request failed: {type(error).__name__}: {error}")
            raise ApiError(500, f"The model failed with {type(error).__name__}; see the log of the server.") from error

    def _is_gone(self) -> bool:
        """Return True if the client closed the connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _fail(self, error: ApiError) -> None:
        self.server.say(f"answered with {error.status}: {error.message}")
        self._reply(error.status, error.body)

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self._head(status, "application/json", len(data))
        self.wfile.write(data)

    def _head(self, status: int, kind: str, size: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error of `http.server` in OpenAI's format."""
        self._fail(ApiError(code, message or "The request is malformed."))

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the request log of `http.server`; errors are reported by `say`."""
