"""Small server with OpenEnv's wire format, for errors that a real server does not produce on request.

The reply of an episode controls the server: `wait` is never answered, `die` closes the connection, `fail` is an error,
`odd` a malformed message, `deep` JSON nested 100,000 times, `win` ends the episode with reward 2; every other reply is
echoed with reward 0.5.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import Server, ServerConnection, serve

ACTION = {
    "properties": {"message": {"type": "string"}, "tone": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["message"],
}


class OpenEnvServer:
    """Server in threads of this process; `seeds` are those of the resets, `actions` those of the steps."""

    def __init__(self, action: dict[str, Any], sessions: int) -> None:
        self.seeds: list[int] = []
        self.actions: list[dict[str, Any]] = []
        self._action, self._free = action, threading.Semaphore(sessions)
        self._server: Server = serve(self._session, "127.0.0.1", 0, process_request=self._page)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _page(self, connection: ServerConnection, request: Any) -> Response | None:
        if request.path != "/schema":
            return None
        return Response(200, "OK", Headers(), json.dumps({"action": self._action}).encode())

    def _session(self, connection: ServerConnection) -> None:
        if not self._free.acquire(blocking=False):
            self._say(connection, "error", {"message": "Server at capacity: 1/1", "code": "CAPACITY_REACHED"})
            return
        try:
            for text in connection:
                if not self._answer(connection, json.loads(text)):
                    return
        finally:
            self._free.release()

    def _answer(self, connection: ServerConnection, asked: dict[str, Any]) -> bool:
        if asked["type"] == "close":
            return False
        if asked["type"] == "reset":
            self.seeds.append(asked["data"]["seed"])
            self._turn(connection, f"say {asked['data']['seed']}", None, False)
            return True
        self.actions.append(asked["data"])
        reply = asked["data"]["message"]
        if reply == "odd":
            connection.send("<html>")
        elif reply == "deep":
            connection.send("[" * 100_000)
        elif reply == "fail":
            errors = [{"loc": ["message"], "msg": "too loud"}]
            self._say(connection, "error", {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors})
        elif reply not in ("wait", "die"):
            self._turn(connection, reply, 2.0 if reply == "win" else 0.5, reply == "win")
        return reply != "die"

    def _turn(self, connection: ServerConnection, text: str, reward: float | None, done: bool) -> None:
        observation = {"echo": text, "inner": {"size": len(text)}, "metadata": {"step": 1}}
        self._say(connection, "observation", {"observation": observation, "reward": reward, "done": done})

    def _say(self, connection: ServerConnection, kind: str, data: dict[str, Any]) -> None:
        connection.send(json.dumps({"type": kind, "data": data}))


@contextmanager
def server(action: dict[str, Any] | None = None, sessions: int = 8) -> Iterator[OpenEnvServer]:
    """Run a server for the duration of a block."""
    found = OpenEnvServer(action or ACTION, sessions)
    try:
        yield found
    finally:
        found.close()
