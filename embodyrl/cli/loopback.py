"""A page for the person at this machine: a server on the loopback interface that answers nobody else."""

from __future__ import annotations

import json
import secrets
import sys
import webbrowser
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from embodyrl.errors import ConfigError, EmbodyError

Answer = tuple[str, bytes]
"""Content type and body."""
_LONGEST = 1 << 16
"""Bytes of a request."""


class Loopback(HTTPServer):
    """Answers GET and POST requests one after the other, in the thread that calls `serve_forever`.

    Other pages in the same browser could send requests here too: those by another name of this machine than the page's
    own are refused (DNS rebinding), and POST wants the page's `token` (cross-site requests).
    """

    def __init__(
        self, port: int, gets: Mapping[str, Callable[[], Answer]], posts: Mapping[str, Callable[[Any], Answer]]
    ) -> None:
        """Bind; port 0: any free one.

        Raises:
            ConfigError: the port is taken.
        """
        self.gets, self.posts, self.token = gets, posts, secrets.token_urlsafe(16)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}. Fix: another --port, or 0 for any free one.") from error

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def show(self, *, open_page: bool, name: str = "") -> None:
        """Say the address after `name`, open it in a browser if asked, and answer until Ctrl-C."""
        print(f"{name}{self.url}   (Ctrl-C ends)", flush=True)
        try:
            if open_page:
                webbrowser.open(self.url)
            self.serve_forever()
        finally:
            self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that left before its answer was there."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Loopback
    timeout = 10.0
    """Seconds that a client may be silent; the server has one thread."""

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if self._is_ours() and (answer := self.server.gets.get(name)):
            self._answer(answer)
        else:
            self._reply(404, "text/plain", b"no such page")

    def do_POST(self) -> None:
        size = int(said) if (said := self.headers.get("Content-Length") or "0").isdecimal() else -1
        token = (self.headers.get("X-Token") or "").encode()
        act = self.server.posts.get(self.path)
        if not self._is_ours() or not secrets.compare_digest(token, self.server.token.encode()):
            self._reply(403, "text/plain", b"not from this page")
        elif act is None or not 0 <= size <= _LONGEST:
            self._reply(404, "text/plain", b"no such action")
        else:
            body = self.rfile.read(size) or b"{}"
            self._answer(lambda: act(json.loads(body)))

    def _answer(self, act: Callable[[], Answer]) -> None:
        try:
            found = act()
        except (EmbodyError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            self._reply(400, "text/plain", str(error).encode())
        else:
            self._reply(200, *found)

    def _is_ours(self) -> bool:
        port = self.server.server_port
        return self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _reply(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the command."""
