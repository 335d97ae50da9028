"""Client of a policy server: one connection, one request per observation, and a timeout for every reply."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack
from typing import Any

import numpy as np

from embodyrl.clock import RunClock
from embodyrl.errors import EmbodyError
from embodyrl.policies.inputs import rotate_upright
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.remote.settings import RemoteSettings
from embodyrl.policies.remote.wire_formats import (
    MessageError,
    RemoteObservation,
    encode_openpi_array,
    encode_vla_eval_array,
    get_field_names,
    import_optional,
    pack,
    unpack,
)
from embodyrl.policies.untrained.policy import InferenceOnlyPolicy
from embodyrl.types import FloatArray, Observation, PolicyOutput, PolicySpec

_RETRY_S = 0.2
_MAX_BYTES = 1 << 24
"""Maximum size of a reply in bytes; a chunk of actions is small."""


class RemotePolicy(InferenceOnlyPolicy):
    """Inference-only policy that requests chunks from a server and executes K actions; implements `Policy`."""

    def __init__(self, cfg: RemoteSettings, spec: PolicySpec, request: PolicyRequest) -> None:
        """Connect and read the server's metadata.

        Raises:
            ConfigError: training was requested.
            EmbodyError: there is no server at `model.url`, or the server uses another protocol.
        """
        super().__init__(spec, request)
        self._cfg, self._env_spec, self._names = cfg, request.env, get_field_names(cfg)
        self._sequence = 0
        connection = ExitStack()
        self._socket = _connect(cfg, connection)
        # Policies have no `close` method; the connection ends with this object or this process.
        weakref.finalize(self, connection.close)
        self.server = self._perform_handshake()

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Request a chunk for each observation, one by one (see `Policy.act`). The server samples the actions.

        Raises:
            EmbodyError: the server reports an error, times out or disconnects.
        """
        images = np.ascontiguousarray(rotate_upright(obs.images, self._env_spec.cameras.rotation_deg))
        rows = [
            self._request_actions(
                RemoteObservation(
                    images=tuple(images[row, : self.spec.inputs.num_images]),
                    state=obs.state[row] if self._env_spec.state_dim else None,
                    prompt=obs.instructions[row],
                )
            )
            for row in range(len(obs))
        ]
        return self.build_output(np.stack(rows))

    def _perform_handshake(self) -> dict[str, Any]:
        """Return the server's metadata, which openpi sends on connection and vla-eval after a first message."""
        if self._cfg.protocol == "vla_eval":
            self._send_message("hello", {"harness_version": "0", "protocol_version": 1})
            return self._receive_reply("hello")
        reply = self._receive()
        return reply if isinstance(reply, dict) else {}

    def _request_actions(self, observation: RemoteObservation) -> FloatArray:
        """Return actions [K, A] for one observation."""
        message = self._names.write(observation)
        if self._cfg.protocol == "vla_eval":
            # Without this message, the server would continue the chunk of another observation.
            self._send_message("episode_start", {"task": {"name": observation.prompt}})
            self._send_message("observation", message)
            reply = self._receive_reply("action")
        else:
            self._send(pack(message, encode_openpi_array))
            reply = self._receive()
        return self._parse_actions(reply)

    def _parse_actions(self, reply: object) -> FloatArray:
        expected_shape, raw_actions = (self.spec.num_action_chunks, self.spec.action_dim), None
        if isinstance(reply, dict):
            raw_actions = reply.get("actions", reply.get("action"))
        actions: FloatArray
        try:
            actions = np.asarray(raw_actions, np.float32)
        except (TypeError, ValueError):
            actions = np.zeros(0, np.float32)
        # A server that returns one action at a time may omit the chunk's axis.
        actions = actions[None] if actions.ndim == 1 and actions.size else actions
        if actions.ndim != 2 or actions.shape[1] != expected_shape[1]:
            raise self._build_error(
                f"the reply has actions of shape {list(actions.shape)}, expected [n, {expected_shape[1]}]."
            )
        if len(actions) < expected_shape[0]:
            raise self._build_error(
                f"the server returns {len(actions)} action{'s' * (len(actions) > 1)} per reply, but "
                f"model.num_action_chunks={expected_shape[0]}. Fix: model.num_action_chunks={len(actions)}."
            )
        return actions[: expected_shape[0]]

    def _send_message(self, kind: str, payload: dict[str, Any]) -> None:
        self._sequence += 1
        message = {"type": kind, "payload": payload, "seq": self._sequence, "timestamp": time.time()}
        self._send(pack(message, encode_vla_eval_array))

    def _receive_reply(self, kind: str) -> dict[str, Any]:
        """Return the payload of the reply to the last message; late replies to earlier messages are skipped."""
        deadline = time.monotonic() + self._cfg.answer_timeout_s
        while time.monotonic() < deadline:
            reply = self._receive()
            if not isinstance(reply, dict) or not isinstance(payload := reply.get("payload"), dict):
                raise self._build_error("the server does not support vla-eval's protocol. Fix: model.protocol=openpi.")
            if reply.get("type") == "error":
                raise self._build_error(f"the server reports: {str(payload.get('error', payload))[:2000]}")
            # A smaller sequence number marks a late reply to an earlier request.
            if reply.get("type") == kind and reply.get("seq") == self._sequence:
                return payload
        raise self._build_error(
            f"no {kind} reply arrived within {self._cfg.answer_timeout_s:g} s (model.answer_timeout_s)."
        )

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data)
        except Exception as error:  # errors of websockets or of the operating system
            raise self._build_error(f"the connection was closed: {error}. Check the server's log.") from error

    def _receive(self) -> Any:
        limit = self._cfg.answer_timeout_s
        try:
            data = self._socket.recv(timeout=limit)
        except TimeoutError as error:
            hint = " Fix: model.protocol=vla_eval, if the server expects a message first." if not self._sequence else ""
            raise self._build_error(f"no reply arrived within {limit:g} s (model.answer_timeout_s).{hint}") from error
        except Exception as error:
            raise self._build_error(f"the connection was closed: {error}. Check the server's log.") from error
        if isinstance(data, str):  # openpi's servers report errors as text
            raise self._build_error(f"the server reports: {data[:2000].strip()}")
        try:
            return unpack(data)
        except MessageError as error:
            raise self._build_error(f"the reply is invalid: {error}") from error

    def _build_error(self, text: str) -> EmbodyError:
        return EmbodyError(f"The policy server at {self._cfg.url}: {text}")


def _connect(cfg: RemoteSettings, connection: ExitStack) -> Any:
    """Connect with retries, because a server with a large model starts slowly; `connection` closes the socket."""
    client = import_optional("websockets.sync.client")
    clock = RunClock()
    while True:
        # Only time in which this process runs counts, so that a suspended laptop does not time out.
        remaining = cfg.connect_timeout_s - clock.now()
        try:
            websocket = client.connect(
                cfg.url,
                compression=None,
                max_size=_MAX_BYTES,
                open_timeout=max(remaining, 1.0),
                ping_interval=None,  # a busy server may not answer pings; every reply has a deadline anyway
                proxy=None,
            )
            return connection.enter_context(websocket)
        except ConnectionRefusedError as error:
            if remaining <= 0:
                raise EmbodyError(
                    f"No server answered at model.url={cfg.url} within {cfg.connect_timeout_s:g} s "
                    "(model.connect_timeout_s). Fix: start the server, for example `embodyrl serve RUN`, or correct "
                    "the address."
                ) from error
            time.sleep(_RETRY_S)
        except Exception as error:
            raise EmbodyError(
                f"model.url={cfg.url}: no WebSocket server responds ({type(error).__name__}: {error}). Fix: use the "
                f"address of a policy server with openpi's or vla-eval's protocol."
            ) from error
