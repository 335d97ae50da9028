"""Driver CPU time per action chunk, for 1 to 64 hosts and 8 to 65,536 environments.

The scheduler, supervisor and policy client are real; workers are simulated with known durations. A simulated clock
jumps to the next event when the driver waits, and advances by the driver's own time while it works. Each host has one
rollout process and, by default, up to 16 env workers. Records are kept, as in training. Requests and replies are
pickled as for a pipe; their transport is excluded.

    python benchmarks/driver.py --json driver.json
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import json
import os
import pickle
import platform
import pstats
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from embodyrl.channels.arena import Arena, RecordState, get_record_indices
from embodyrl.channels.layout import STATE, Record
from embodyrl.channels.messages import Done, EnvReport, EnvRequest, InferRequest, Reply, Request, WorkerReady
from embodyrl.cluster.protocol import Event
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.cluster.timeline import Timeline
from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import EnvSettings
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.episodes import EpisodeBatch, EpisodeList
from embodyrl.plan.run_plan import RunPlan
from embodyrl.policies.untrained.policy import UntrainedFactory
from embodyrl.scheduler import scheduler as scheduling
from embodyrl.scheduler.event_loop import PolicyClient
from embodyrl.scheduler.rollout import Rollout
from embodyrl.scheduler.scheduler import RolloutScheduler
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, EpisodeSpec
from embodyrl.workers.lifecycle import WorkerInit, WorkerSpec

STEP_S, ACT_S = 0.3, 0.6 / 64
"""Seconds of a simulated request to an env worker, and of one observation in an inference."""
EPISODE = 8
"""Chunks of an episode."""
HOSTS, NUM_ENVS = (1, 4, 16, 64), (8, 64, 512, 4096, 65536)


class NoEnv:
    """Environment without a simulator: only its spec is used."""

    settings = EnvSettings

    def validate(self, cfg: EnvSettings) -> list[str]:
        return []

    def spec(self, cfg: EnvSettings, context: EnvContext) -> EnvSpec:
        return EnvSpec(
            name="none", action=ActionSpec(dim=7), tasks=("wait",), states_per_task=(1,),
            cameras=CameraSpec(names=("front",), size=(8, 8)), max_episode_steps=10**6,
        )  # fmt: skip

    def make(self, cfg: EnvSettings, context: EnvContext) -> ChunkedEnv:
        raise AssertionError("no simulator is built")


ENV, POLICY = NoEnv(), UntrainedFactory(name="none", scripted=False)


class SimulatedClock:
    """Clock that can jump."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self._skipped

    def jump(self, seconds: float) -> None:
        """Advance, or with negative seconds exclude time that has passed."""
        self._skipped += seconds


class SimulatedLauncher:
    """`Launcher` whose workers reply at a simulated time."""

    where = lost = host = ""

    def __init__(self, arena: Arena, clock: SimulatedClock) -> None:
        self._arena, self._clock = arena, clock
        self._queue: list[tuple[float, int, str, bytes]] = []
        self._free: dict[str, float] = {}
        self._count = 0
        self._sent: list[tuple[str, Request]] = []
        self.messages = 0
        self.busy_s = 0.0
        """CPU seconds of the simulation, which are not part of the driver's work."""
        self.observations: Counter[str] = Counter()
        """Observations of each rollout process."""

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        self._reply(spec.name, WorkerReady(), 0.0)

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        self._sent.append((worker, request))

    def wait(self, timeout_s: float) -> list[Event]:
        # Together, because reading the CPU time is slow.
        cpu, begun = time.thread_time(), time.perf_counter()
        for worker, request in self._sent:
            self._reply(worker, *self._work(worker, request))
        self.messages += len(self._sent)
        self._sent.clear()
        now = self._clock()
        if not self._queue or self._queue[0][0] > now:
            due = min(now + timeout_s, self._queue[0][0] if self._queue else np.inf)
            self._clock.jump(due - now)
            now = due
        ready: list[tuple[str, bytes]] = []
        while self._queue and self._queue[0][0] <= now:
            ready.append(heapq.heappop(self._queue)[2:])
        self._clock.jump(begun - time.perf_counter())
        self.busy_s += time.thread_time() - cpu
        return [Event(worker=worker, message=pickle.loads(reply)) for worker, reply in ready]

    def interrupt(self) -> None:
        """Do nothing."""

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Do nothing."""

    def _work(self, worker: str, request: Request) -> tuple[Reply, float]:
        arena = self._arena
        if isinstance(request, EnvRequest):
            records = get_record_indices(request.sources)
            for name in (Record.terminated, Record.truncated, Record.success):
                arena[name][records] = False
            arena[Record.valid][records] = True
            arena[STATE][get_record_indices(request.observed)] = RecordState.READY
            report = EnvReport(sequence=request.sequence, stage=request.stage, sim_s=0.0, render_s=0.0, reset_s=0.0)
            return report, STEP_S
        assert isinstance(request, InferRequest)
        self.observations[worker] += len(request.record_refs)
        return Done(sequence=request.sequence, seconds=0.0, metrics={}), ACT_S * len(request.record_refs)

    def _reply(self, worker: str, reply: Reply, seconds: float) -> None:
        self._count += 1
        due = self._free[worker] = max(self._clock(), self._free.get(worker, 0.0)) + seconds
        heapq.heappush(self._queue, (due, self._count, worker, pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)))


@dataclass(frozen=True)
class Cost:
    """Result of one run."""

    hosts: int
    num_envs: int
    workers: int
    chunks: int
    us_per_chunk: float
    """Microseconds of the driver."""
    chunks_per_s: float
    """In simulated time."""
    messages_per_chunk: float
    driver_busy: float
    """Share of simulated time in which the driver worked."""
    largest_share: float
    """Observations of the busiest rollout process, relative to the mean."""


def plan(num_envs: int, workers: int) -> RunPlan:
    """Return the run plan of an evaluation with simulated workers."""
    words = [
        "env=libero_10", "launcher=local", f"launcher.env_workers={workers}", f"env.eval.total_num_envs={num_envs}",
        f"eval.episodes={num_envs}", "env.env_type=driver:ENV", "env.eval.state_ids=null", "model=random",
        "model.model_type=driver:POLICY", "model.num_action_chunks=1", f"env.eval.max_episode_steps={EPISODE}",
    ]  # fmt: skip
    return build_run_plan(load_config("eval", words), training=False)


def measure(hosts: int, num_envs: int, rounds: int, per_host: int) -> Cost:
    """Run every environment for `rounds` chunks with up to `per_host` env workers per host."""
    workers = min(num_envs, hosts * per_host, 4096)
    run_plan = plan(num_envs, workers)
    arena, clock = Arena.create(run_plan.layout, num_envs * (rounds + 3)), SimulatedClock()
    scheduling.time = SimpleNamespace(monotonic=clock, perf_counter=clock)  # pyright: ignore[reportAttributeAccessIssue]
    launcher = SimulatedLauncher(arena, clock)
    names = [worker.name for worker in run_plan.env_workers]
    timeline = Timeline(num_envs=num_envs, env_workers=names, arena=arena, clock=clock)
    supervisor = Supervisor(launcher, run_plan.cfg.faults, print, timeline)  # pyright: ignore[reportArgumentType]
    init = WorkerInit(arena=arena.handle)
    acting = [WorkerSpec(name=f"rollout_{n}", entry="", init=init, component="rollout") for n in range(hosts)]
    policy = PolicyClient(supervisor, acting, timeout_s=60.0)
    rollouts = RolloutScheduler(supervisor, arena, policy, run_plan)
    specs = {spec.name: (spec, partial(policy.on_message, spec.name)) for spec in acting}
    for name in names:
        spec = WorkerSpec(name=name, entry="", init=init, component="env")
        specs[name] = spec, partial(rollouts.on_message, name)
    supervisor.start(specs)
    rollouts.run_until(lambda: not supervisor.starting)
    episodes = [
        tuple(
            EpisodeSpec(
                episode_id=k * num_envs + env_index, reset_id=0, task_id=0, group_id=0, member=0, seed=0, noise_seed=k
            )
            for k in range(-(-rounds // EPISODE))
        )
        for env_index in range(num_envs)
    ]
    wave = EpisodeBatch(queues=tuple(episodes), quota_chunks=rounds)
    listed = EpisodeList(
        num_envs=num_envs, max_episode_steps=EPISODE, max_chunks=EPISODE, ignore_terminations=True, waves=(wave,)
    )
    launcher.busy_s = 0.0
    launcher.messages = 0
    begun, started = time.thread_time(), clock()
    out = rollouts.collect(Rollout(listed))
    spent, simulated = time.thread_time() - begun - launcher.busy_s, clock() - started
    chunks = sum(episode.length for episode in out.episodes)
    arena.close()
    return Cost(
        hosts=hosts,
        num_envs=num_envs,
        workers=workers,
        chunks=chunks,
        us_per_chunk=round(spent / chunks * 1e6, 1),
        chunks_per_s=round(chunks / simulated, 1),
        messages_per_chunk=round(launcher.messages / chunks, 3),
        driver_busy=round(spent / simulated, 3),
        largest_share=round(max(launcher.observations.values()) * hosts / launcher.observations.total(), 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--envs", type=int, nargs="+", default=NUM_ENVS)
    parser.add_argument(
        "--rounds", type=int, default=16, help="chunks of each environment; up to 8 times as many with few environments"
    )
    parser.add_argument("--workers", type=int, default=16, help="maximum number of env workers per host")
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time")
    args = parser.parse_args()
    rows: list[Cost] = []
    profile = cProfile.Profile()
    for num_envs in args.envs:
        for hosts in (one for one in args.hosts if one <= num_envs):
            if args.profile:
                profile.enable()
            cost = measure(hosts, num_envs, args.rounds * max(1, min(8, 4096 // num_envs)), args.workers)
            profile.disable()
            rows.append(cost)
            print(
                f"{hosts:3} hosts {num_envs:6} environments {cost.workers:5} workers {cost.us_per_chunk:8.1f} us/chunk "
                f"{cost.chunks_per_s:9.1f} chunks/s {cost.messages_per_chunk:6.3f} messages/chunk "
                f"{cost.driver_busy:6.1%} busy",
                flush=True,
            )
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    if args.json:
        machine = {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"rows": [vars(row) for row in rows], "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
