"""Launcher of workers as Ray actors, on the hosts of a cluster."""

import faulthandler
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import LoadWeightsRequest, Reply, Request, WorkerFailed
from embodyrl.channels.rendezvous import LOOPBACK
from embodyrl.cluster.protocol import ClusterSettings, Event, Handle, ProcessLauncher, place_rank
from embodyrl.cluster.ray_cluster import nodes as ray_nodes
from embodyrl.cluster.ray_cluster.nodes import Node, ray
from embodyrl.cluster.ray_cluster.placement import parse_placement
from embodyrl.cluster.ray_cluster.rows import Pools, Rows, copy_in, copy_out, mark_unwritten, write_rows
from embodyrl.devices import visible_gpus
from embodyrl.errors import WorkerError
from embodyrl.files import cap_log
from embodyrl.workers.lifecycle import PolicyHostInit, Worker, WorkerSpec, describe_failure

_GET_S = 60.0
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class _RemoteReply:
    """Reply of a remote worker: the result or the error of one request."""

    replies: tuple[Reply, ...]
    rows: list[Rows]
    log: bytes


class RemoteWorker:
    """Worker in a Ray actor; on hosts other than the driver's host, a mirror replaces the shared arena."""

    def __init__(self, spec: WorkerSpec, driver_node: str, index_on_node: int, silence_s: float) -> None:
        os.environ.update(spec.environ)
        if spec.component == "env":
            gpus = () if spec.gpu == "" else visible_gpus()
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index_on_node % len(gpus)] if gpus else ""
        # The log is in the folder of Ray's logs of this node, which keeps the last output of a dead worker.
        own = os.path.realpath("/proc/self/fd/1")
        folder = os.path.dirname(own) if os.path.isfile(own) else tempfile.gettempdir()
        job = ray.get_runtime_context().get_job_id()
        self._log = open(os.path.join(folder, f"embodyrl-{job}-{spec.name}.log"), "ab+")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(self._log.fileno(), stream.fileno())
        faulthandler.enable(self._log)
        self._log_position = self._log.seek(0, os.SEEK_END)
        self._spec = spec
        self._on_driver_node = ray.get_runtime_context().get_node_id() == driver_node
        self._pools: Pools | None = None
        self._worker: Worker | None = None
        if not self._on_driver_node:
            ray_nodes.exit_without_cluster(silence_s)

    def log(self) -> tuple[str, int]:
        """Return the path of the worker's log on its host, and the size of the log before this worker started."""
        return self._log.name, self._log_position

    def start(self) -> _RemoteReply:
        """Build the worker in this process; return its ready message or an error."""
        self._pools = pools = _open_pools(self._spec, mirror=not self._on_driver_node)
        init = replace(self._spec.init, shared_arena=pools[0])
        if len(pools) > 1:
            init = replace(init, bucket_arena=pools[1].handle)
        try:
            self._worker = replace(self._spec, init=init).build()
        except Exception as error:
            return self._build_reply(describe_failure(error))
        return self._build_reply(self._worker.ready())

    def handle(self, request: Request, rows: list[Rows]) -> _RemoteReply:
        """Execute a request; return the reply and the record fields that the worker wrote."""
        assert self._worker is not None and self._pools is not None, "not started"
        if not self._on_driver_node:
            write_rows(self._pools, rows)
            mark_unwritten(self._pools, request)
        try:
            replies = tuple(self._worker.handle(request))
        except Exception as error:
            return self._build_reply(describe_failure(error))
        return self._build_reply(*replies, rows=[] if self._on_driver_node else copy_out(self._pools, request))

    def _build_reply(self, *replies: Reply, rows: list[Rows] | None = None) -> _RemoteReply:
        sys.stdout.flush()
        sys.stderr.flush()
        size = self._log.seek(0, os.SEEK_END)
        log = os.pread(self._log.fileno(), size - self._log_position, self._log_position)
        self._log_position = size
        return _RemoteReply(replies, rows or [], log)


@dataclass(kw_only=True)
class _Handle(Handle):
    actor: Any
    node: Node
    pools: Pools
    on_driver_node: bool
    open: deque[Any] = field(default_factory=deque)
    """Ray object references of unanswered requests, oldest first."""
    output: Any
    """Ray object reference to the path and initial size of the worker's log file on its host."""
    received: int = 0
    """Number of bytes of the worker's log that the driver has received."""


class RayLauncher(ProcessLauncher[_Handle]):
    """Launcher that joins the cluster at RAY_ADDRESS or starts a local cluster."""

    spans_hosts = True

    def __init__(self, log_dir: Path, cluster: ClusterSettings | None = None) -> None:
        super().__init__(log_dir)
        cluster = cluster or ClusterSettings()
        self._owns_cluster = ray_nodes.connect()
        self._driver_node = ray.get_runtime_context().get_node_id()
        self._live_nodes = ray_nodes.list_live_nodes()
        self._nodes = self._select_nodes(cluster.num_nodes)
        self._min_nodes, self._silence_s = cluster.min_nodes, cluster.silence_timeout_s
        hosts = {name: n for n, node in reversed([*enumerate(self._nodes)]) for name in (node.host, node.address)}
        self._placement = parse_placement(cluster.component_placement, cluster.num_nodes, hosts=hosts)
        self._has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._node_monitor = ray_nodes.NodeMonitor()
        self._bucket: tuple[int, Any] = (0, None)
        """Record reference of the last weight bucket sent, and the Ray object reference to its content."""
        self._lost: set[str] = set()
        """Ids of unreachable nodes, which are not used again."""
        self.where = ray_nodes.describe(self._nodes)
        # Last, because this object redirects standard output until `stop`, which is not called after an error here.
        self._messages = ray_nodes.RayOutputRedirect(log_dir / "ray.log")

    @classmethod
    def describe_hosts(cls, cluster: ClusterSettings | None) -> str:
        """Describe the hosts of a run without starting workers (see `Launcher.describe_hosts`)."""
        if ray_nodes.starts_own_cluster():
            return "this host, with a local Ray cluster of the run (RAY_ADDRESS is not set)"
        launcher = cls(Path(), cluster)
        launcher.stop()
        return launcher.where

    @classmethod
    def nodes(cls, cluster: ClusterSettings | None, *, disaggregated: bool = True) -> Mapping[str, tuple[int, ...]]:
        """Return the host numbers of each component (see `Launcher.nodes`).

        The cluster is not connected yet, so hosts given by name are assumed to have the highest numbers.
        """
        cluster = cluster or ClusterSettings()
        return parse_placement(cluster.component_placement, cluster.num_nodes, disaggregated=disaggregated)

    def _select_nodes(self, num_nodes: int) -> list[Node]:
        """Return the nodes of the run, in the order of their numbers."""
        nodes = ray_nodes.sort_nodes(self._live_nodes.values(), self._driver_node)
        if len(nodes) < num_nodes:
            raise WorkerError(
                f"cluster.num_nodes={num_nodes}, but the Ray cluster at {ray_nodes.get_head_address()} has "
                f"{len(nodes)} live nodes: {', '.join(map(str, nodes))}. Start more nodes with "
                "`ray start --address=HEAD:PORT`, or lower cluster.num_nodes."
            )
        return nodes[:num_nodes]

    @property
    def host(self) -> str:
        """Return the address at which workers reach the driver; loopback if all actor ranks run on this host."""
        other_nodes = {self._nodes[i].id for i in self._placement["actor"]} - {self._driver_node}
        return ray.util.get_node_ip_address() if other_nodes else LOOPBACK

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        """Start a worker as a Ray actor (see `Launcher.start`)."""
        assert spec.name not in self._handles, f"worker {spec.name} is already running"
        number = int(tail) if (tail := spec.name.rpartition("_")[2]).isdecimal() else 0
        node_numbers = self._placement[spec.component]
        self._update_live_nodes(ray_nodes.list_live_nodes)
        if self.lost:
            return
        usable = self._get_usable_nodes()
        candidates = [usable[n] for n in node_numbers if n in usable] or [*usable.values()] or self._nodes[:1]
        if spec.component == "actor" and isinstance(spec.init, PolicyHostInit):
            node = place_rank(number, spec.init.rank_info.world, candidates)
        else:
            node = candidates[number % len(candidates)]
        gpus = 1 if spec.component != "env" and self._has_gpus else 0
        environ = {**spec.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        if spec.component == "env":
            # Ray hides all GPUs from actors without reserved GPUs, but simulators share the GPUs of their host.
            environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        options = {
            "num_cpus": 0,  # the placement decides where workers run; Ray's count of cores must not make them wait
            "num_gpus": gpus,
            "max_restarts": 0,
            "scheduling_strategy": affinity,
            "runtime_env": {"env_vars": environ},
        }
        remote_spec = replace(spec, init=replace(spec.init, shared_arena=None))
        actor = (
            ray.remote(RemoteWorker)
            .options(**options)
            .remote(remote_spec, self._driver_node, number // len(candidates), self._silence_s)
        )
        handle = _Handle(
            actor=actor,
            node=node,
            pools=_open_pools(spec, mirror=False),
            on_driver_node=node.id == self._driver_node,
            output=actor.log.remote(),
            log=self._log_dir / f"{spec.name}.log",
            since=self._clock.now(),
            limits=deque([timeout_s]),
        )
        handle.open.append(actor.start.remote())
        self._handles[spec.name] = handle

    def _get_usable_nodes(self) -> dict[int, Node]:
        """Return the usable nodes of the run by number, including nodes that rejoined."""
        usable = [node for name, node in self._live_nodes.items() if name not in self._lost]
        return ray_nodes.select_usable_nodes(self._nodes, usable)

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """Send a request to a worker (see `Launcher.send`)."""
        handle = self._add_request(worker, timeout_s)
        rows = [] if handle.on_driver_node else self._get_rows(handle, request)
        handle.open.append(handle.actor.handle.remote(request, rows))

    def _get_rows(self, handle: _Handle, request: Request) -> Any:
        """Return the record fields that a request reads, or a Ray object reference if the request loads weights.

        Ray transfers the object of a reference only once to each host.
        """
        if not isinstance(request, LoadWeightsRequest):
            return copy_in(handle.pools, request)
        if request.record_ref != self._bucket[0]:
            self._bucket = request.record_ref, ray.put(copy_in(handle.pools, request))
        return self._bucket[1]

    def wait(self, timeout_s: float) -> list[Event]:
        """Return new replies and deaths of workers (see `Launcher.wait`)."""
        oldest = {handle.open[0]: name for name, handle in self._handles.items() if handle.open}
        if oldest and not self._events:
            # The first reply wakes this process; further replies are taken at once.
            ready, _ = ray.wait(list(oldest), num_returns=1, timeout=self._poll_timeout(timeout_s))
            if ready:
                ready, _ = ray.wait(list(oldest), num_returns=len(oldest), timeout=0)
            for reference in ready:
                self._receive_reply(oldest[reference], reference)
        elif not self._events:
            time.sleep(min(timeout_s, 0.01))
        self._update_live_nodes(self._node_monitor.poll)
        for name in self._find_late_workers():
            late = self._handles[name]
            self._remove_worker(
                name, f"did not respond for {late.limits[0]:g} s on {late.node}{self._collect_last_output(late)}"
            )
        return self._pop_events()

    def _update_live_nodes(self, list_nodes: Callable[[], dict[str, Node] | None]) -> None:
        """Update the live nodes if `list_nodes` returns a new list, and report the workers of lost hosts as dead.

        Ray does not always report lost actors.
        """
        try:
            live = None if self.lost else list_nodes()
        except WorkerError as error:
            self.lost = str(error)
            return
        if live is None:
            return
        self._live_nodes = live
        if len(usable := self._get_usable_nodes()) < self._min_nodes:
            self.lost = f"only {len(usable)} of {len(self._nodes)} hosts are left (cluster.min_nodes={self._min_nodes})"
        for name in [name for name, handle in self._handles.items() if handle.node.id not in live]:
            self._remove_worker_of_lost_host(name)

    def _remove_worker_of_lost_host(self, name: str, log: str = "") -> None:
        node = self._handles[name].node
        self._lost.add(node.id)
        self._remove_worker(name, f"was lost with its host {node}", log=log)

    def _receive_reply(self, name: str, reference: Any) -> None:
        handle = self._handles[name]
        try:
            result: _RemoteReply = ray.get(reference, timeout=_GET_S)
        except ray.exceptions.RayTaskError as error:
            self._remove_worker(name, f"raised {error.cause!r}", traceback=str(error))
            return
        except ray.exceptions.RayError as error:  # the worker died, or its reply is lost or late
            if isinstance(error, ray.exceptions.ActorUnavailableError) and not handle.on_driver_node:
                # Ray detects a lost host many seconds later, and would place the new worker on that host.
                self._remove_worker_of_lost_host(name, log=str(error))
                return
            cause = "died" if isinstance(error, ray.exceptions.RayActorError) else "lost its reply"
            self._remove_worker(name, f"{cause} on {handle.node}{self._collect_last_output(handle)}", log=str(error))
            return
        # Not earlier: the request of a dead worker must stay open until `_remove_worker` drops it.
        handle.open.popleft()
        self._on_reply(handle)
        if result.log:
            handle.received += len(result.log)
            _append(handle.log, result.log)
        write_rows(handle.pools, result.rows)
        for reply in result.replies:
            if isinstance(reply, WorkerFailed):
                self._remove_worker(name, f"raised {reply.error}", traceback=reply.traceback, exit_code=reply.exit_code)
                return
            self._events.append(Event(worker=name, message=reply))

    def _collect_last_output(self, handle: _Handle) -> str:
        """Append the remaining output of a dead worker to its log; return an error suffix with the output's path."""
        try:
            path, size = ray.get(handle.output, timeout=1.0)
        except ray.exceptions.RayError:
            return ""
        if handle.on_driver_node and os.path.exists(path):
            with open(path, "rb") as file:
                file.seek(size + handle.received)
                _append(handle.log, file.read())
        return f"; its output on that host: {path}"

    def _remove_worker(self, name: str, reason: str, traceback: str = "", exit_code: int = 1, log: str = "") -> None:
        """End a worker, report its death, and append `log` (such as Ray's error message) to the worker's log."""
        handle = self._handles.pop(name)
        _close(handle.pools)
        ray_nodes.run_in_thread(partial(ray.kill, handle.actor, no_restart=True))
        self._report_death(name, handle, reason, traceback, exit_code)
        _append(handle.log, log.encode())

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Stop all workers, and the cluster if this launcher started it (see `Launcher.stop`)."""
        actors = [handle.actor for handle in self._handles.values()]
        for handle in self._handles.values():
            _close(handle.pools)
        self._handles.clear()
        self._events.clear()

        self._messages.ending = True

        def end() -> None:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if self._owns_cluster and ray.is_initialized():
                ray.shutdown()

        with suppress(TimeoutError):  # without its head Ray may wait for a minute
            ray_nodes.run_in_thread(end).result(_STOP_S) if self.lost else end()
        self._messages.close()


def _append(log: Path, text: bytes) -> None:
    if text:
        with open(log, "ab") as file:
            file.write(text)
        cap_log(log)


def _open_pools(spec: WorkerSpec, *, mirror: bool) -> Pools:
    """Attach the memory pools of the driver, or create mirrors of the pools on another host."""
    handles = [handle for handle in (spec.init.arena, spec.init.bucket_arena) if handle]
    return tuple(Arena.create(h.layout, h.capacity) if mirror else Arena.attach(h) for h in handles)


def _close(pools: Pools) -> None:
    for pool in pools:
        pool.close()
