"""Ray cluster of a run (cluster at RAY_ADDRESS, or a local cluster), and a monitor of the cluster nodes."""

from __future__ import annotations

import ipaddress
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from embodyrl.cluster.supervisor import StopRequest
from embodyrl.errors import ConfigError, Interrupted, WorkerError, one_line

_LOCAL = "local"


def _get_address() -> str:
    return os.environ.get("RAY_ADDRESS", "") or _LOCAL


if "ray" not in sys.modules:  # Ray reads these variables when it is imported
    if _get_address() == _LOCAL:
        if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # If 0, all services of Ray listen on the loopback interface, also on Linux.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    else:
        # By default, Ray ends a driver without a head node after a minute; a checkpoint may take longer.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")

try:
    import ray.exceptions  # pyright: ignore[reportMissingImports]
    import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ConfigError("launcher=ray: the package ray is not installed. Run pip install 'embodyrl[ray]'.") from error

_FAILURES = (OSError, RuntimeError, ValueError, ray.exceptions.RayError)
"""Exceptions of `ray.init`."""
_HEAD_TIMEOUT_S = 15.0
"""Maximum time for the head node to list the nodes, in seconds."""
_QUERY_INTERVAL_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of the cluster."""

    id: str
    address: str
    host: str

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"

    @property
    def order(self) -> tuple[int, int, str, str]:
        """Return the sort key of the node: its address as a number."""
        try:
            parsed = ipaddress.ip_address(self.address)
        except ValueError:
            return 9, 0, self.address, self.id
        return parsed.version, int(parsed), "", self.id


def starts_own_cluster() -> bool:
    """Return True if a run starts its own Ray cluster."""
    return not ray.is_initialized() and _get_address() == _LOCAL


def connect() -> bool:
    """Connect to the cluster unless this process is connected; return True if this call opened the connection.

    Raises:
        WorkerError: no cluster is at RAY_ADDRESS, the cluster rejects the token, or no local cluster can be started.
    """
    if ray.is_initialized():
        return False
    address = _get_address()
    if address == _LOCAL:
        _start_own_cluster()
        return True
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except _FAILURES as error:
        raise WorkerError(
            f"RAY_ADDRESS={address}: the Ray cluster cannot be joined. Check it with `ray status`, and export the same "
            f"RAY_AUTH_MODE and token on all hosts. Ray's error: {one_line(error)}"
        ) from error
    return True


def _start_own_cluster() -> None:
    """Start a local cluster; a stop signal takes effect when the cluster can be shut down.

    The agents of a node that is killed while it starts wait a minute for the head.
    """
    stop = StopRequest()
    try:
        with stop.handle_signals():
            ray.init(address=_LOCAL, log_to_driver=False, configure_logging=False, include_dashboard=False)
        stop.check()
    except Interrupted:
        ray.shutdown()
        raise
    except SystemExit as error:
        if error.code != signal.SIGTERM:  # an exit of Ray's own signal handler
            raise
        ray.shutdown()
        raise Interrupted(signal.SIGTERM) from None
    except _FAILURES as error:
        stop.check()  # the same signal may have ended a process of Ray
        raise WorkerError(f"launcher=ray: no cluster could be started on this host: {one_line(error)}") from error


def get_head_address() -> str:
    """Return the address of the head node."""
    return str(ray.get_runtime_context().gcs_address)


def list_live_nodes() -> dict[str, Node]:
    """Return the live nodes by id.

    Raises:
        WorkerError: the head does not respond.
    """
    try:
        return _parse_live_nodes(run_in_thread(ray.nodes).result(_HEAD_TIMEOUT_S))
    except TimeoutError:
        raise WorkerError(_format_no_response_error()) from None


def sort_nodes(nodes: Iterable[Node], driver: str) -> list[Node]:
    """Return the nodes in the order of their numbers: the driver's node first, then the other nodes by address."""
    return sorted(nodes, key=lambda node: (node.id != driver, node.order))


def select_usable_nodes(nodes: Sequence[Node], usable: Iterable[Node]) -> dict[int, Node]:
    """Return the usable nodes by number. A host that rejoined keeps its number, although its node id is new."""
    by_id, known_ids = {node.id: node for node in usable}, {node.id for node in nodes}
    returned = {node.address: node for name, node in by_id.items() if name not in known_ids}
    nodes_by_number = {number: by_id.get(node.id, returned.get(node.address)) for number, node in enumerate(nodes)}
    return {number: node for number, node in nodes_by_number.items() if node is not None}


def describe(nodes: Iterable[Node]) -> str:
    """Return a line of text with the cluster address and the number of each node."""
    return f"Ray cluster at {get_head_address()}: " + ", ".join(
        f"node {number} {node}" for number, node in enumerate(nodes)
    )


class RayOutputRedirect:
    """Replacement of standard output that writes the messages of Ray's threads to a file.

    Ray prints pages of text for each lost node.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._stream = file, sys.stdout
        self.ending = False
        """True while Ray shuts down and repeats its messages in this thread."""
        sys.stdout = cast("TextIO", self)

    def write(self, text: str) -> int:
        """Write messages of Ray to the file, and other text to standard output."""
        if not self.ending and not threading.current_thread().name.startswith("ray_"):
            return self._stream.write(text)
        with open(self._file, "a", encoding="utf-8") as file:
            return file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        """Restore standard output."""
        if sys.stdout is self:
            sys.stdout = self._stream


class NodeMonitor:
    """Monitor that lists the live nodes every few seconds in the background."""

    def __init__(self) -> None:
        self._query: Future[Any] | None = None
        self._query_time = time.monotonic()

    def poll(self) -> dict[str, Node] | None:
        """Return the live nodes if a new list has arrived.

        Raises:
            WorkerError: the head does not respond.
        """
        now = time.monotonic()
        if self._query is None:
            if now >= self._query_time + _QUERY_INTERVAL_S:
                self._query, self._query_time = run_in_thread(ray.nodes), now
            return None
        if not self._query.done():
            if now < self._query_time + _HEAD_TIMEOUT_S:
                return None
            raise WorkerError(_format_no_response_error())
        query, self._query = self._query, None
        return _parse_live_nodes(query.result())


def exit_without_cluster(silence_s: float) -> None:
    """Exit this process if its node is not in the cluster, or the head does not respond, for `silence_s` seconds.

    Ray ends the workers of a dead driver, but not those of a host that is cut off or whose head is frozen.
    """
    own_id = ray.get_runtime_context().get_node_id()

    def watch() -> None:
        last_response = time.monotonic()
        while time.monotonic() < last_response + silence_s:
            query, started = run_in_thread(ray.nodes), time.monotonic()
            with suppress(Exception):
                if own_id in _parse_live_nodes(query.result(silence_s)):
                    last_response = started
            time.sleep(silence_s / 10)
        print(f"no response from the cluster for {silence_s:g} s (cluster.silence_timeout_s); exiting", flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="cluster-watch", daemon=True).start()


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ray", daemon=True).start()
    return future


def _format_no_response_error() -> str:
    text = f"the Ray head at {get_head_address()} did not respond for {_HEAD_TIMEOUT_S:g} s."
    return f"{text} Check that host, and start the cluster again."


def _parse_live_nodes(nodes: list[dict[str, Any]]) -> dict[str, Node]:
    live_nodes = (Node(n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"]) for n in nodes if n["Alive"])
    return {node.id: node for node in live_nodes}
