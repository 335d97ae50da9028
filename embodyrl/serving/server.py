"""WebSocket policy server with the wire formats of openpi and vla-eval, timeouts, and exit on a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from embodyrl.errors import EmbodyError, Interrupted, NonFiniteError
from embodyrl.policies.inputs import rotate_upright
from embodyrl.policies.protocol import Policy
from embodyrl.policies.remote.settings import ServeSettings
from embodyrl.policies.remote.wire_formats import (
    FieldNames,
    MessageError,
    encode_openpi_array,
    encode_vla_eval_array,
    import_optional,
    pack,
    unpack,
)
from embodyrl.specs import convert_gripper
from embodyrl.types import EnvSpec, FloatArray, Observation
from embodyrl.version import __version__


class ObservationHandler:
    """Computes greedy actions for the observations of clients, which send upright images."""

    def __init__(self, policy: Policy, env: EnvSpec, names: FieldNames) -> None:
        self._policy, self._env, self._names = policy, env, names

    def __call__(self, message: object) -> FloatArray:
        """Return the action chunk [K, A] for one observation, in the environment's units and gripper convention.

        Raises:
            MessageError: the observation lacks a field or has another shape than the policy's inputs.
            NonFiniteError: the policy returns NaN or infinity.
        """
        spec, env = self._policy.spec, self._env
        observation = self._names.read(
            message, images=spec.inputs.num_images, states=env.state_dim if spec.inputs.state else 0
        )
        height, width = observation.images[0].shape[:2] if observation.images else env.cameras.size
        images = np.zeros((1, len(observation.images), height, width, 3), np.uint8)
        for index, image in enumerate(observation.images):
            images[0, index] = rotate_upright(image, env.cameras.rotation_deg)
        state = np.zeros((1, env.state_dim), np.float32) if observation.state is None else observation.state[None]
        batch = Observation(images=images, state=state, instructions=(observation.prompt,))
        actions = np.array(self._policy.act(batch, noise=None).actions[0])
        if not np.isfinite(actions).all():
            raise NonFiniteError(
                "The policy produced a non-finite action; its weights or statistics are broken. Use another checkpoint."
            )
        convert_gripper(actions, spec.gripper, env.action.gripper)
        return actions

    def describe(self) -> dict[str, Any]:
        """Return the metadata that the server sends to a new client."""
        spec, env = self._policy.spec, self._env
        return {
            "policy": spec.name,
            "env": env.name,
            "action_horizon": spec.num_action_chunks,
            "action_dim": spec.action_dim,
            "images": list(self._names.images[: spec.inputs.num_images]),
            "state_dim": env.state_dim if spec.inputs.state else 0,
        }


class PolicyThread:
    """Daemon thread that runs calls in order; a blocked call does not prevent the process from exiting."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run_calls, name="policy", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call; return a future with its result."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def _run_calls(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue  # the client's wait has timed out
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


_CLOSING_S = 5.0
"""Maximum wait for clients to disconnect when the server stops, in seconds."""
_FIRST_MESSAGE_S = 300.0
"""Time limit in seconds for the first message of a client, unless `serve.idle_timeout_s` is shorter."""


class PolicyServer:
    """Serves one policy to several clients; requests are answered in order."""

    def __init__(self, handler: ObservationHandler, cfg: ServeSettings, log: Callable[[str], None]) -> None:
        self._handler, self._cfg, self._log = handler, cfg, log
        self._thread = PolicyThread()
        self._num_clients = self._num_open = 0

    async def run(self, ready: Callable[[str], None]) -> None:
        """Serve clients until SIGINT, SIGTERM or SIGHUP.

        Args:
            ready: called with the address once clients can connect.

        Raises:
            Interrupted: always, at the end.
            EmbodyError: the server cannot listen at the address.
        """
        cfg, loop = self._cfg, asyncio.get_running_loop()
        stopped: asyncio.Future[int] = loop.create_future()

        def stop(signum: int) -> None:
            if not stopped.done():
                stopped.set_result(signum)

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, stop, signum)
        try:
            server = await import_optional("websockets.asyncio.server").serve(
                self._handle_client,
                cfg.host,
                cfg.port,
                # Browsers send an Origin header; requests from web pages are rejected.
                origins=[None],
                compression=None,
                max_size=cfg.max_message_mib * 2**20,
                max_queue=1,  # number of messages that are received before the handler reads them
                ping_interval=None,  # a busy simulator may not answer pings
                process_request=self._process_request,
                logger=_build_silent_logger(),
            )
        except OSError as error:
            raise EmbodyError(
                f"Cannot listen at {cfg.host}:{cfg.port}: {error.strerror or error}. Fix: use another serve.port "
                "(0: any free port), or an address of this machine as serve.host."
            ) from error
        host = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
        ready(f"ws://{host}:{next(iter(server.sockets)).getsockname()[1]}")
        signum = await stopped
        server.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_closed(), _CLOSING_S)
        raise Interrupted(signum)

    def _process_request(self, connection: Any, request: Any) -> Any:
        """Answer health checks (openpi: /healthz, vla-eval: /health) over HTTP; reject clients above the limit."""
        if request.path in ("/healthz", "/health") and "Origin" not in request.headers:
            return connection.respond(200, "OK\n")
        if self._num_open < self._cfg.max_clients:
            return None
        self._log(f"a client was rejected: {self._num_open} clients are connected (serve.max_clients)")
        return connection.respond(503, f"{self._num_open} clients are connected (serve.max_clients)\n")

    async def _handle_client(self, socket: Any) -> None:
        """Serve one client from its first to its last message."""
        connection_closed = import_optional("websockets.exceptions").ConnectionClosed
        self._num_open += 1
        self._num_clients += 1
        number, num_answers = self._num_clients, 0
        self._log(f"client {number} connected")
        client = _Client(socket, self._cfg.idle_timeout_s)
        protocol = {"openpi": self._serve_openpi, "vla_eval": self._serve_vla_eval}[self._cfg.protocol]
        ending = "left"
        try:
            async for problem in protocol(client):
                num_answers += not problem
                if problem:
                    self._log(f"client {number}: answered with an error: {problem}")
        except connection_closed as error:
            ending = "disconnected" if error.rcvd else f"was lost ({error})"
        except TimeoutError:
            reason = "serve.idle_timeout_s" if client.limit_s == self._cfg.idle_timeout_s else "after connecting"
            ending = f"sent nothing for {client.limit_s:g} s ({reason})"
        finally:
            self._num_open -= 1
        self._log(f"client {number} {ending} after {num_answers} answers")

    async def _serve_openpi(self, client: _Client) -> AsyncIterator[EmbodyError | None]:
        """Serve a client with the openpi protocol: send the metadata, then a chunk or an error text per observation.

        Yields None for each chunk, and the error for each observation that was answered with an error.
        """
        await client.send(pack(self._handler.describe(), encode_openpi_array))
        while True:
            data = await client.receive()
            started = time.perf_counter()
            try:
                actions = await self._infer(await _unpack(data))
            except EmbodyError as error:
                await client.send(str(error))
                yield error
                continue
            timing = {"infer_ms": 1000 * (time.perf_counter() - started)}
            await client.send(pack({"actions": actions, "server_timing": timing}, encode_openpi_array))
            yield None

    async def _serve_vla_eval(self, client: _Client) -> AsyncIterator[EmbodyError | None]:
        """Serve a client with the vla-eval protocol: answer each observation with the next action of the current chunk.

        Yields None for each action, and the error for each message that was answered with an error.
        """
        chunk: list[FloatArray] = []
        while True:
            kind, payload, sequence, problem = "error", {}, 0, None
            try:
                envelope = _check_envelope(await _unpack(await client.receive()))
                kind, payload, sequence = envelope["type"], envelope["payload"], envelope["seq"]
                if kind == "observation":
                    chunk = chunk or list(await self._infer(payload))
                elif kind in ("episode_start", "episode_end"):
                    chunk = []
                elif kind == "hello":
                    await client.send(_pack_message("hello", self._build_handshake(), sequence))
                elif kind != "error":
                    raise MessageError(f"'{kind}' is not a message type of the vla-eval protocol.")
            except EmbodyError as error:
                problem = error
                await client.send(_pack_message("error", {"error": str(error)}, sequence))
            if kind == "observation" and problem is None:
                await client.send(_pack_message("action", {"actions": chunk.pop(0)}, sequence))
            if kind == "observation" or problem:
                yield problem

    def _build_handshake(self) -> dict[str, Any]:
        metadata = self._handler.describe()
        # vla-eval passes these to the benchmark. By default its LIBERO converts quaternions to the shorter rotation;
        # the states of the demonstrations, on which policies are trained, are not converted.
        observation_params = {
            "send_wrist_image": len(metadata["images"]) > 1,
            "send_state": bool(metadata["state_dim"]),
            "quat_no_antipodal": True,
        }
        harness = {"harness_version": f"embodyrl {__version__}", "protocol_version": 1, "model_server": "embodyrl"}
        return harness | {"capabilities": {}, "observation_params": observation_params, "embodyrl": metadata}

    async def _infer(self, message: object) -> FloatArray:
        """Return the action chunk [K, A] for one observation.

        Raises:
            EmbodyError: the observation does not match the policy's inputs, or the policy exceeds the time limit.
        """
        limit = self._cfg.answer_timeout_s
        answer = asyncio.wrap_future(self._thread.submit(partial(self._handler, message)))
        try:
            return await asyncio.wait_for(answer, limit)
        except EmbodyError:
            raise
        except TimeoutError as error:
            raise EmbodyError(f"The policy did not respond within {limit:g} s (serve.answer_timeout_s).") from error
        except Exception as error:  # any error of a network on an unsuitable image
            raise MessageError(
                f"The observation does not match the inputs of the policy: {type(error).__name__}: {error}"
            ) from error


class _Client:
    """Client connection with a time limit for every receive and send."""

    def __init__(self, socket: Any, limit_s: float) -> None:
        self._socket, self._idle_s = socket, limit_s
        self.limit_s = min(limit_s, _FIRST_MESSAGE_S)
        """Time limit in seconds for the next message."""

    async def receive(self) -> bytes | str:
        """Receive the next message; raise TimeoutError after the time limit."""
        data = await asyncio.wait_for(self._socket.recv(), self.limit_s)
        self.limit_s = self._idle_s
        return data

    async def send(self, data: bytes | str) -> None:
        """Send a message; raise TimeoutError if the client does not read in time."""
        await asyncio.wait_for(self._socket.send(data), self.limit_s)


async def _unpack(data: bytes | str) -> Any:
    """Decode a message in another thread, because decoding images takes time."""
    return await asyncio.to_thread(unpack, data)


def _check_envelope(message: Any) -> dict[str, Any]:
    field_types = {"type": str, "payload": dict, "seq": int}
    if not isinstance(message, dict) or any(
        not isinstance(message.get(key), kind) for key, kind in field_types.items()
    ):
        raise MessageError(
            "A message must be a mapping with type, payload and seq. For openpi clients, set serve.protocol=openpi."
        )
    return message


def _pack_message(kind: str, payload: dict[str, Any], sequence: int) -> bytes:
    return pack({"type": kind, "payload": payload, "seq": sequence, "timestamp": time.time()}, encode_vla_eval_array)


def _build_silent_logger() -> logging.Logger:
    """Return a logger without output, because websockets logs a traceback for every invalid client."""
    logger = logging.Logger("embodyrl.serve")
    logger.addHandler(logging.NullHandler())
    return logger
