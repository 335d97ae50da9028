"""The client's side: one connection, one question per observation, a deadline on every answer."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack
from typing import Any

import numpy as np

from embodyrl.clock import RunClock
from embodyrl.errors import EmbodyError
from embodyrl.policies.remote.dialects import (
    MessageError,
    Seen,
    bytes_keyed,
    names_of,
    need,
    pack,
    text_keyed,
    unpack,
    upright,
)
from embodyrl.policies.remote.settings import RemoteSettings
from embodyrl.policies.untrained import OnlyActs
from embodyrl.types import EnvSpec, FloatArray, Observation, PolicyOutput, PolicySpec

_RETRY_S = 0.2
_MOST_BYTES = 1 << 24
"""Of an answer: a chunk of actions is small."""


class RemotePolicy(OnlyActs):
    """Asks a server for chunks and executes their first K actions; implements `Policy` but for training."""

    def __init__(self, cfg: RemoteSettings, spec: PolicySpec, env: EnvSpec) -> None:
        """Connect and hear what the server says of itself.

        Raises:
            EmbodyError: nobody listens at `model.url`, or speaks another protocol.
        """
        super().__init__(spec)
        self._cfg, self._env, self._names = cfg, env, names_of(cfg)
        self._sequence = 0
        connection = ExitStack()
        self._socket = _connect(cfg, connection)
        # Policies have no `close`: the connection ends with the object, or with the process.
        weakref.finalize(self, connection.close)
        self.server = self._greet()

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Ask for a chunk for each observation, one after the other (see `Policy.act`); all noise is the server's.

        Raises:
            EmbodyError: the server reports an error, takes too long or is gone.
        """
        images = np.ascontiguousarray(upright(obs.images, self._env.image_rotation_deg))
        rows = [
            self._ask(
                Seen(
                    images=tuple(images[row, : self.spec.num_images]),
                    state=obs.state[row] if self._env.state_dim else None,
                    prompt=obs.instructions[row],
                )
            )
            for row in range(len(obs))
        ]
        return self.output(np.stack(rows))

    def _greet(self) -> dict[str, Any]:
        """What the server says of itself, first (openpi) or when it is greeted (vla-eval)."""
        if self._cfg.protocol == "vla_eval":
            self._tell("hello", {"harness_version": "0", "protocol_version": 1})
            return self._hear("hello")
        said = self._receive()
        return said if isinstance(said, dict) else {}

    def _ask(self, seen: Seen) -> FloatArray:
        """Actions [K, A] for one observation."""
        message = self._names.write(seen)
        if self._cfg.protocol == "vla_eval":
            # Without it the server would go on with the chunk that it made for another observation.
            self._tell("episode_start", {"task": {"name": seen.prompt}})
            self._tell("observation", message)
            answer = self._hear("action")
        else:
            self._send(pack(message, bytes_keyed))
            answer = self._receive()
        return self._actions(answer)

    def _actions(self, answer: object) -> FloatArray:
        wanted, found = (self.spec.num_action_chunks, self.spec.action_dim), None
        if isinstance(answer, dict):
            found = answer.get("actions", answer.get("action"))
        actions: FloatArray
        try:
            actions = np.asarray(found, np.float32)
        except (TypeError, ValueError):
            actions = np.zeros(0, np.float32)
        # A server that gives one action at a time may leave the chunk's axis out.
        actions = actions[None] if actions.ndim == 1 and actions.size else actions
        if actions.ndim != 2 or actions.shape[1] != wanted[1]:
            raise self._error(f"its answer holds actions of shape {list(actions.shape)}, not [any, {wanted[1]}].")
        if len(actions) < wanted[0]:
            raise self._error(
                f"it gives {len(actions)} action{'s' * (len(actions) > 1)} at a time, and model.num_action_chunks="
                f"{wanted[0]} are to be executed. Fix: model.num_action_chunks={len(actions)}."
            )
        return actions[: wanted[0]]

    def _tell(self, kind: str, payload: dict[str, Any]) -> None:
        self._sequence += 1
        message = {"type": kind, "payload": payload, "seq": self._sequence, "timestamp": time.time()}
        self._send(pack(message, text_keyed))

    def _hear(self, kind: str) -> dict[str, Any]:
        """The payload of the answer to what was said last; what answers earlier messages is passed over."""
        due = time.monotonic() + self._cfg.answer_timeout_s
        while time.monotonic() < due:
            said = self._receive()
            if not isinstance(said, dict) or not isinstance(payload := said.get("payload"), dict):
                raise self._error("it does not speak vla-eval's protocol. Fix: model.protocol=openpi.")
            if said.get("type") == "error":
                raise self._error(f"it reports: {str(payload.get('error', payload))[:2000]}")
            # By number: an answer that came too late for an earlier question must not be taken for this one's.
            if said.get("type") == kind and said.get("seq") == self._sequence:
                return payload
        raise self._error(f"no {kind} has come for {self._cfg.answer_timeout_s:g} s (model.answer_timeout_s).")

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data)
        except Exception as error:  # websockets' own kinds and the system's
            raise self._error(f"the connection is gone: {error}. Its own log says why.") from error

    def _receive(self) -> Any:
        limit = self._cfg.answer_timeout_s
        try:
            data = self._socket.recv(timeout=limit)
        except TimeoutError as error:
            hint = " Fix: model.protocol=vla_eval, if it waits for a greeting." if not self._sequence else ""
            raise self._error(f"it has not answered for {limit:g} s (model.answer_timeout_s).{hint}") from error
        except Exception as error:
            raise self._error(f"the connection is gone: {error}. Its own log says why.") from error
        if isinstance(data, str):  # how openpi's servers report errors
            raise self._error(f"it reports: {data[:2000].strip()}")
        try:
            return unpack(data)
        except MessageError as error:
            raise self._error(f"it sent {error}") from error

    def _error(self, text: str) -> EmbodyError:
        return EmbodyError(f"The policy server at {self._cfg.url}: {text}")


def _connect(cfg: RemoteSettings, connection: ExitStack) -> Any:
    """Wait until somebody accepts: a server that loads a large model listens late. `connection` ends it."""
    client = need("websockets.sync.client")
    clock = RunClock()
    while True:
        # Only time in which this process ran counts: a laptop that was closed has not waited.
        left = cfg.connect_timeout_s - clock.now()
        try:
            opened = client.connect(
                cfg.url,
                compression=None,
                max_size=_MOST_BYTES,
                open_timeout=max(left, 1.0),
                ping_interval=None,  # a server that computes may not answer them; every answer has a deadline anyway
                proxy=None,
            )
            return connection.enter_context(opened)
        except ConnectionRefusedError as error:
            if left <= 0:
                raise EmbodyError(
                    f"No server answered at model.url={cfg.url} for {cfg.connect_timeout_s:g} s "
                    "(model.connect_timeout_s). Fix: start the server, for example `embodyrl serve RUN`, or correct "
                    "the address."
                ) from error
            time.sleep(_RETRY_S)
        except Exception as error:
            raise EmbodyError(
                f"model.url={cfg.url}: no websocket there ({type(error).__name__}: {error}). Fix: the address of a "
                "policy server that speaks openpi's or vla-eval's protocol."
            ) from error
