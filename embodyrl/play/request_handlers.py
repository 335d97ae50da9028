"""Page and request handlers of `embodyrl play`: one browser controls the episode, all other browsers only show it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from embodyrl.play.scene import Scene
from embodyrl.web_pages.loopback import Answer

_MAX_ID_LENGTH = 64


def get_page() -> Answer:
    """Return the content type and the HTML of the page."""
    text = files("embodyrl.play").joinpath("page.html").read_bytes()
    return "text/html; charset=utf-8", text


class RequestHandlers:
    """Request handlers of the web page of `embodyrl play`.

    `POST /act` executes a request of a client. If the client has control, the sequence number `seq` must follow its
    last request, and a repeated request, for example after a lost connection, returns the stored answer. A rejected
    request does not change the sequence number.

    The simulator advances only on a request `tick` of the client that has control: if the connection is lost or the
    client's computer sleeps, the episode pauses. Each answer contains the image after the step, so no frame is lost
    on a slow connection.
    """

    def __init__(self, name: str, scene: Scene | None = None) -> None:
        self.name, self.scene = name, scene
        self.status_text = ""
        """Line of text above the image, for example the progress of the training."""
        self.num_executed = 0
        """Number of executed requests of all clients."""
        self._controlling_client = ""
        """Id of the client that has control; empty: no client."""
        self._seq, self._request = 0, ""
        """Sequence number and content of the last executed request of this client."""
        self._answer: Answer = ("", b"")
        """Answer to the last executed request."""
        self._actions: dict[str, Callable[[Scene, dict[str, Any]], None]] = {
            "take": lambda scene, body: None,
            "tick": lambda scene, body: scene.advance(_get_amounts(body, len(scene.controls))),
            "next": lambda scene, body: scene.start_episode(_get_integer(body, "task", -1, -1)),
            "restart": lambda scene, body: scene.restart(),
            "rewind": lambda scene, body: scene.rewind(_get_integer(body, "steps", 1)),
            "say": lambda scene, body: scene.set_instruction(_get_text(body, "instruction")),
        }

    @property
    def posts(self) -> dict[str, Callable[[dict[str, Any]], Answer]]:
        """Handlers of POST requests by URL path."""
        return {"/hello": self.get_page_state, "/view": self.get_view, "/act": self.execute}

    def get_page_state(self, body: dict[str, Any]) -> Answer:
        """Return the properties of the scene, and the sequence number of the client's last request.

        The number is 0 for a client without control.
        """
        client_id, scene = _get_client_id(body), self.scene
        content: dict[str, Any] = {
            "name": self.name,
            "seq": self._seq if client_id == self._controlling_client else 0,
        }
        if scene is not None:
            content |= {
                "tasks": scene.env.layout.tasks,
                "controls": [asdict(control) for control in scene.controls],
                "rewinds": scene.can_rewind,
                "recorded": scene.is_recorded,
                "speaks": not scene.is_recorded and scene.env.layout.text.instructed,
            }
        return self._build_answer(client_id, content, image=True)

    def get_view(self, body: dict[str, Any]) -> Answer:
        """Return the state of the scene, and the current image unless its number equals `after` in the request."""
        frame_number = self.scene.frame_number if self.scene else 0
        return self._build_answer(_get_client_id(body), {}, image=_get_integer(body, "after", -1, -1) != frame_number)

    def execute(self, body: dict[str, Any]) -> Answer:
        """Execute a request of the client that has control.

        Raises:
            ValueError: the request is malformed or out of order, or the client does not have control.
        """
        client_id, seq, request = _get_client_id(body), _get_integer(body, "seq", 1), json.dumps(body, sort_keys=True)
        if client_id == self._controlling_client:
            if seq == self._seq and request == self._request:
                return self._answer
            if seq != self._seq + 1:
                raise ValueError(f"'seq' must be {self._seq + 1}, the sequence number of this client's next request")
        action_name = _get_text(body, "do")
        if action_name not in self._actions:
            raise ValueError(f"'do' must be one of {', '.join(self._actions)}")
        if self.scene is None:
            raise ValueError("no episode is running; wait for the next episode")
        if self._controlling_client not in ("", client_id) and action_name != "take":
            raise ValueError("another browser window controls the episode; press `take the controls` first")
        self._actions[action_name](self.scene, body)
        self.num_executed += 1
        self._controlling_client, self._seq, self._request = client_id, seq, request
        self._answer = self._build_answer(client_id, {}, image=True)
        return self._answer

    def _build_answer(self, client_id: str, content: dict[str, Any], *, image: bool) -> Answer:
        """Return the content type and the body: JSON length (4 bytes, big-endian), state as JSON, and JPEG image."""
        scene, controller = self.scene, self._controlling_client
        content |= {"note": self.status_text, "drives": client_id == controller, "free": not controller}
        content["live"] = scene is not None
        if scene is not None:
            content |= {"moment": scene.frame_number, **scene.get_state()}
        text = json.dumps(content).encode()
        frame = scene.frame_jpeg if scene is not None and image else b""
        return "application/octet-stream", len(text).to_bytes(4, "big") + text + frame


def _get_client_id(body: dict[str, Any]) -> str:
    client_id = _get_text(body, "client")
    if not 0 < len(client_id) <= _MAX_ID_LENGTH:
        raise ValueError(f"'client' must have 1 to {_MAX_ID_LENGTH} characters")
    return client_id


def _get_text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"'{name}' must be a valid Unicode string")
    return value


def _get_integer(body: dict[str, Any], name: str, minimum: int, default: int | None = None) -> int:
    value = body.get(name, default)
    if type(value) is not int or not minimum <= value < 2**53:
        raise ValueError(f"'{name}' must be an integer of at least {minimum}")
    return value


def _get_amounts(body: dict[str, Any], count: int) -> dict[int, float] | None:
    """Return the pressed fraction (0 to 1) of each input, by input index; None: the policy acts."""
    inputs = body.get("inputs")
    if inputs is None:
        return None
    if not count:
        raise ValueError("a person cannot control this environment, because it declares no keyboard or gamepad inputs")
    if not isinstance(inputs, dict) or len(inputs) > count:
        raise ValueError("'inputs' must be null, or an object that maps input indices to values")
    amounts: dict[int, float] = {}
    for name, amount in inputs.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 5 and int(name) < count):
            raise ValueError(f"'inputs' contains the index {name!r:.20}, expected integers from 0 to {count - 1}")
        if type(amount) not in (int, float) or not math.isfinite(amount) or not 0 <= amount <= 1:
            raise ValueError(f"'inputs' has the value {amount!r:.20} for input {name}, expected a number from 0 to 1")
        amounts[int(name)] = float(amount)
    return amounts
