"""Sessions on an OpenEnv server: JSON messages over a WebSocket, one connection per parallel environment.

Wire format of openenv-core 0.3 and openenv 0.10: `{"type": "reset", "data": {"seed": 0}}` and `{"type": "step",
"data": ACTION}`, answered by `{"type": "observation", "data": {"observation", "reward", "done"}}` or `"error"`.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from embodyrl.clock import RunClock
from embodyrl.envs.openenv.settings import OpenEnvSettings
from embodyrl.errors import ConfigError, EnvError, MissingDependencyError
from embodyrl.files import read_stream

_RETRY_S = 0.2
_MAX_BYTES = 1 << 24
"""Maximum size of a message or of the action schema, in bytes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Observation, reward and end of episode after a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    """Reward of the step; 0 if the server sends no reward."""
    done: bool


class Session:
    """Connection to an OpenEnv server, which creates a separate environment for each connection."""

    def __init__(self, cfg: OpenEnvSettings) -> None:
        """Connect to the server; retry for up to `env.connect_timeout_s`.

        Raises:
            EnvError: no server answers at the address.
            MissingDependencyError: websockets is not installed.
        """
        self._cfg, self._socket = cfg, _connect(cfg)

    def send(self, message_type: str, data: Mapping[str, Any]) -> None:
        """Send a reset or step request; `receive` returns the result.

        Raises:
            EnvError: the connection was closed.
        """
        try:
            self._socket.send(json.dumps({"type": message_type, "data": data}))
        except Exception as error:  # an error of websockets or of the operating system
            # A server without a free session sends an error message before it closes the connection.
            self.receive()
            raise _error(self._cfg, f"the connection was closed: {error}. Check the server's log.") from error

    def receive(self) -> Turn:
        """Wait for the result of the last `send`.

        Raises:
            EnvError: the server reports an error, does not answer in time, or disconnects; or its answer is malformed.
        """
        limit = self._cfg.answer_timeout_s
        try:
            text = self._socket.recv(timeout=limit)
        except TimeoutError as error:
            raise _error(
                self._cfg, f"no reply arrived within {limit:g} s (env.answer_timeout_s). Check the server's log."
            ) from error
        except Exception as error:
            raise _error(self._cfg, f"the connection was closed: {error}. Check the server's log.") from error
        try:
            message = json.loads(text)
            message_type, data = message["type"], message["data"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _error(
                self._cfg, f"the message {text[:200]!r} is not in OpenEnv's JSON format. Check env.url."
            ) from error
        if message_type == "error":
            raise _error(self._cfg, _format_server_error(data))
        return _read_turn(self._cfg, data)

    def close(self) -> None:
        """End the session; idempotent."""
        with suppress(Exception):  # the server may be gone
            self._socket.send(json.dumps({"type": "close"}))
        with suppress(Exception):
            self._socket.close()


def read_action_key(cfg: OpenEnvSettings) -> str:
    """Return the name of the action field that contains the reply, from the settings or from the server's schema.

    Raises:
        EnvError: no server answers at the address, or the server has no schema.
        ConfigError: the schema lacks a configured field, requires other fields, or does not determine the field.
    """
    schema = _fetch_action_schema(cfg)
    fields: Mapping[str, Any] = schema.get("properties", {})
    required = [name for name in schema.get("required", ()) if name not in cfg.action]
    text_fields = [name for name in required if fields.get(name, {}).get("type") == "string"]
    field_list = ", ".join(
        f"{name}{'' if name in required else ' (optional)'}" for name in fields if name != "metadata"
    )
    if cfg.action_key is None and len(text_fields) != 1:
        raise ConfigError(
            f"env.url={cfg.url}: actions have {len(text_fields)} required text fields instead of 1. Set env.action_key "
            f"to the field of the reply. Fields: {field_list or 'none'}."
        )
    key = cfg.action_key or text_fields[0]
    unknown = [name for name in (key, *cfg.action) if name not in fields]
    missing = [name for name in required if name != key]
    if fields and (unknown or missing):
        problem = f"have no field {unknown[0]}" if unknown else f"require {missing[0]}. Set its value in env.action"
        raise ConfigError(f"env.url={cfg.url}: actions of this server {problem}. Fields: {field_list}.")
    return key


def _fetch_action_schema(cfg: OpenEnvSettings) -> Mapping[str, Any]:
    """Return the JSON schema of an action from the server."""
    address = f"{_format_address(cfg, 'http')}/schema"
    opener, clock = urllib.request.build_opener(urllib.request.ProxyHandler({})), RunClock()
    while True:
        remaining = cfg.connect_timeout_s - clock.now()
        try:
            with opener.open(address, timeout=max(remaining, 1.0)) as reply:
                return _read_action_schema(json.loads(read_stream(reply, _MAX_BYTES, max(remaining, 1.0))))
        except urllib.error.HTTPError as error:
            raise _error(cfg, f"{address} returned status {error.code}; set env.url to an OpenEnv server.") from error
        except (OSError, http.client.HTTPException) as error:
            if remaining <= 0:
                raise _no_server_error(cfg) from error
            time.sleep(_RETRY_S)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _error(
                cfg, f"{address} does not return the schema of an OpenEnv server; correct the address."
            ) from error


def _read_action_schema(reply: Any) -> Mapping[str, Any]:
    """Return the action schema in a reply of the server, after type checks.

    Raises:
        TypeError: a part of the schema has a wrong type.
        KeyError: the reply contains no action schema.
    """
    schema = reply["action"]
    if not isinstance(schema, dict) or not isinstance(fields := schema.get("properties", {}), dict):
        raise TypeError(schema)
    required = {*map(type, schema.get("required", ()))}
    if not all(isinstance(field, dict) for field in fields.values()) or not required <= {str}:
        raise TypeError(schema)
    return schema


def _connect(cfg: OpenEnvSettings) -> Any:
    try:
        client = import_module("websockets.sync.client")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("env=text/openenv needs websockets: pip install 'embodyrl[serve]'.") from error
    clock = RunClock()
    while True:
        remaining = cfg.connect_timeout_s - clock.now()
        try:
            return client.connect(
                f"{_format_address(cfg, 'ws')}/ws", max_size=_MAX_BYTES, open_timeout=max(remaining, 1.0), proxy=None
            )
        except ConnectionRefusedError as error:
            if remaining <= 0:
                raise _no_server_error(cfg) from error
            time.sleep(_RETRY_S)
        except Exception as error:
            raise _error(
                cfg, f"there is no WebSocket at /ws ({type(error).__name__}: {error}). Check env.url."
            ) from error


def _format_address(cfg: OpenEnvSettings, scheme: str) -> str:
    url_scheme, _, rest = str(cfg.url).rstrip("/").partition("://")
    return f"{scheme}{'s' if url_scheme in ('https', 'wss') else ''}://{rest}"


def _read_turn(cfg: OpenEnvSettings, data: Any) -> Turn:
    observation = data.get("observation") if isinstance(data, dict) else None
    if not isinstance(observation, dict):
        raise _error(cfg, f"a message has no observation: {data!r:.200}. Check the server's log.")
    reward = data.get("reward") or 0.0
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise _error(cfg, f"the reward {reward!r} is not a finite number. Correct the environment.")
    return Turn(observation, float(reward), bool(data.get("done")))


def _format_server_error(data: Any) -> str:
    report: Mapping[str, Any] = data if isinstance(data, dict) else {"message": data}
    text = f"the server reports: {str(report.get('message'))[:1000]}"
    if report.get("code") == "CAPACITY_REACHED":
        fix = (
            "a larger max_concurrent_envs of the server, or fewer environments (env.train.total_num_envs and env.eval)"
        )
        return f"{text}. Fix: {fix}."
    details = [
        f"{'.'.join(map(str, entry.get('loc', ())))}: {entry.get('msg')}" for entry in report.get("errors") or ()
    ]
    return f"{text} {'; '.join(details)[:1000]}".strip()


def _no_server_error(cfg: OpenEnvSettings) -> EnvError:
    return EnvError(
        f"No server answered at env.url={cfg.url} within {cfg.connect_timeout_s:g} s (env.connect_timeout_s). Start "
        "the OpenEnv server, or correct the address."
    )


def _error(cfg: OpenEnvSettings, text: str) -> EnvError:
    return EnvError(f"The OpenEnv server at {cfg.url}: {text}")
