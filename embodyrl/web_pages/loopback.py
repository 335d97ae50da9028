"""Web server on the loopback interface, for pages on this machine."""

from __future__ import annotations

import json
import secrets
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from embodyrl.errors import ConfigError, EmbodyError

T = TypeVar("T")
Answer = tuple[str, bytes]
"""Content type and body of a response."""
_MAX_REQUEST_BYTES = 1 << 20
"""Maximum size of a request in bytes."""
_MAX_CLIENTS = 64
"""Maximum number of open connections; the server closes connections above the maximum."""
_REQUEST_S = 10.0
"""Maximum time for a client to send a request, in seconds."""
_UNAUTHORIZED = b"wrong token, host or origin: open the address that the command printed, with its token"
_SIGNALS_S = 0.5
"""Maximum duration of a blocking call, in seconds, because a signal that arrives just before the call is handled only
after the call."""


class LoopbackServer(ThreadingHTTPServer):
    """Local HTTP server that reads requests in threads and answers all requests in one thread.

    The thread that calls `process_requests` answers them in order, because OpenGL and environments are not thread-safe.

    Other users of this machine and other pages in the same browser could also send requests to this server. Therefore
    each request needs the `token`, in the query of the address or in the header X-Token. Requests with another host
    name (DNS rebinding) or from another origin (cross-site requests) are rejected.
    """

    def __init__(
        self, port: int, gets: Mapping[str, Callable[[], Answer]], posts: Mapping[str, Callable[[Any], Answer]]
    ) -> None:
        """Bind the server to a port of the loopback interface.

        Args:
            port: number of the port; 0: any free port.
            gets: handler of GET requests by URL path.
            posts: handler of POST requests by URL path; the argument is the JSON object in the request body.

        Raises:
            ConfigError: the port is taken.
        """
        self.gets, self.posts, self.token = gets, posts, secrets.token_urlsafe(16)
        self._stopped = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._free_connections = threading.BoundedSemaphore(_MAX_CLIENTS)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Port {port}: {error}. Choose another port, or 0 for any free port.") from error

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def show(self, *, open_page: bool, name: str = "") -> None:
        """Print `name` and the address, open the page in a browser if `open_page`, and serve until Ctrl-C."""
        print(f"{name}{self.url}   (Ctrl-C stops the server)", flush=True)
        try:
            with tempfile.NamedTemporaryFile("w", prefix="embodyrl-", suffix=".html") as file:
                if open_page:
                    # All users can read the browser's command line, but only this user can read the file.
                    file.write(f'<meta http-equiv="refresh" content="0; url={self.url}">')
                    file.flush()
                    webbrowser.open(Path(file.name).as_uri())
                self.process_requests()
        finally:
            self.server_close()

    def process_requests(self) -> None:
        """Accept connections and answer requests until `stop`, or an exception such as Ctrl-C."""
        threading.Thread(target=self.serve_forever, name="loopback", daemon=True).start()
        try:
            while not self._stopped:
                try:
                    future, handler = self._calls.get(timeout=_SIGNALS_S)
                except Empty:
                    continue
                try:
                    future.set_result(handler())
                except Exception as error:
                    future.set_exception(error)
        finally:
            self._stopped = True
            self.shutdown()

    def stop(self) -> None:
        """End `process_requests` within half a second."""
        self._stopped = True

    def call(self, handler: Callable[[], T]) -> T:
        """Run a function in the thread of `process_requests`; return its result or raise its exception.

        Raises:
            EmbodyError: the server has stopped before the function ran.
        """
        future: Future[T] = Future()
        self._calls.put((future, handler))
        while not wait([future], _SIGNALS_S).done:
            if self._stopped:
                raise EmbodyError("The server of the page has stopped. Run the same command again.")
        return future.result()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; close the connection if the limit is reached."""
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle one connection; afterwards, reduce the number of open connections by one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of browsers that disconnect before the response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackServer
    timeout = _REQUEST_S
    """Timeout for receiving a packet and for sending the response, in seconds."""

    def setup(self) -> None:
        super().setup()
        # Unlike the socket timeout, this timer does not restart with each byte.
        self._timer = threading.Timer(_REQUEST_S, self._disconnect)
        self._timer.daemon = True
        self._timer.start()

    def finish(self) -> None:
        self._timer.cancel()
        super().finish()

    def _disconnect(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RD)
        except OSError:
            pass  # the connection has just ended

    def do_GET(self) -> None:
        if not self._is_authorized():
            self._send_reply(403, "text/plain", _UNAUTHORIZED)
        elif answer := self.server.gets.get(self.path.partition("?")[0]):
            self._answer(answer)
        else:
            self._send_reply(404, "text/plain", b"no such page")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length") or "0"
        # Python refuses to parse thousands of digits.
        size = int(length) if length.isdecimal() and len(length) < 10 else -1
        handler = self.server.posts.get(self.path.partition("?")[0])
        if not self._is_authorized():
            self._send_reply(403, "text/plain", _UNAUTHORIZED)
        elif handler is None or size < 0:
            self._send_reply(404, "text/plain", b"no such action")
        elif size > _MAX_REQUEST_BYTES:
            self._send_reply(413, "text/plain", f"the request has more than {_MAX_REQUEST_BYTES} bytes".encode())
        else:
            body = self.rfile.read(size)
            self._answer(lambda: handler(_parse_object(body or b"{}")))

    def _answer(self, handler: Callable[[], Answer]) -> None:
        self._timer.cancel()
        try:
            response = self.server.call(handler)
        except (EmbodyError, OSError, ValueError) as error:
            self._send_reply(400, "text/plain", _encode_error(error))
        except Exception as error:
            self._send_reply(500, "text/plain", _encode_error(error))
            raise
        else:
            self._send_reply(200, *response)

    def _is_authorized(self) -> bool:
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        if self.headers.get("Host") not in hosts:
            return False
        if self.headers.get("Origin") not in (None, *(f"http://{host}" for host in hosts)):
            return False
        try:
            query_token = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        except ValueError:  # too many fields, or an address that cannot be split
            return False
        token = self.headers.get("X-Token") or query_token
        return secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode())

    def _send_reply(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the request log of `http.server`, because the command uses the terminal."""


def _parse_object(body: bytes) -> dict[str, Any]:
    """Parse a request body as a JSON object; raise ValueError for any other content."""
    try:
        parsed = json.loads(body)
    except RecursionError as error:
        raise ValueError("The request body is nested too deeply.") from error
    if not isinstance(parsed, dict):
        raise ValueError("The request body must be a JSON object.")
    return parsed


def _encode_error(error: Exception) -> bytes:
    return str(error).encode(errors="backslashreplace")
