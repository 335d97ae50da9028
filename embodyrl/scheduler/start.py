"""Starts the workers of a run from its blueprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from embodyrl.channels.arena import Arena
from embodyrl.channels.buckets import bucket_layout
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.supervisor import Callback, Supervisor
from embodyrl.cluster.timeline import Timeline
from embodyrl.plan.blueprint import Blueprint
from embodyrl.scheduler.policy_client import PolicyClient
from embodyrl.scheduler.policy_hosts import Rendezvous, plan_hosts, rendezvous, shared_arena
from embodyrl.scheduler.scheduler import RolloutScheduler
from embodyrl.workers.env_worker import EnvWorkerInit
from embodyrl.workers.lifecycle import WorkerSpec

# Simulators and renderers spin up a thread per core each unless told otherwise; with several worker processes these
# threads fight (measured: 5 to 15 times slower).
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The running workers of a run."""

    supervisor: Supervisor
    arena: Arena
    scheduler: RolloutScheduler
    policy: PolicyClient
    meet: Rendezvous
    """Of the actor ranks."""
    trace: Path | None = None
    """Where the timeline goes at the end."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Signals are requests, up to the end of the workers when the block is left."""
        with self.supervisor.signals():
            try:
                yield
            finally:
                self.close()

    def close(self) -> None:
        """End all workers, write the trace and free the arena."""
        self.supervisor.stop()
        if self.trace is not None:
            self.supervisor.timeline.write(self.trace)
        self.policy.close()
        self.meet.close()
        self.arena.close()


def start_workers(
    blueprint: Blueprint, log_dir: Path, say: Callable[[str], None], *, start_from: Path | None = None
) -> Workers:
    """Create the arena, start all workers and wait until they are ready."""
    cfg = blueprint.cfg
    arena = Arena.create(blueprint.layout, blueprint.capacity)
    names = [worker.name for worker in blueprint.env_workers]
    timeline = Timeline(num_slots=blueprint.num_slots, env_workers=names, arena=arena, keep=cfg.runner.trace)
    launcher = LAUNCHERS.get(cfg.launcher.name)(log_dir, getattr(cfg, "cluster", None))
    supervisor = Supervisor(launcher, cfg.faults, say, timeline)
    # One bucket is filled while the other is taken.
    bucket_arena = Arena.create(bucket_layout(), 2) if blueprint.is_disaggregated else None
    # Collectives also count the time of a freeze; the driver's own deadline for an update ends them much earlier.
    meet = rendezvous(blueprint.ranks, launcher.host, timeout_s=24 * cfg.faults.update_timeout_s)
    hosts = plan_hosts(blueprint, arena, start_from, bucket_arena=bucket_arena, rank_info=meet.rank_info)
    policy = PolicyClient(supervisor, hosts, timeout_s=cfg.faults.update_timeout_s, bucket_arena=bucket_arena)
    scheduler = RolloutScheduler(supervisor, arena, policy, blueprint)
    specs: dict[str, tuple[WorkerSpec, Callback]] = {
        spec.name: (spec, partial(policy.on_message, spec.name)) for spec in hosts
    }
    for number, worker in enumerate(blueprint.env_workers):
        specs[worker.name] = (env_spec(blueprint, arena, number), partial(scheduler.on_message, worker.name))
    workers = Workers(supervisor=supervisor, arena=arena, scheduler=scheduler, policy=policy, meet=meet)
    try:
        with supervisor.signals():
            supervisor.start(specs)
            scheduler.run_until(lambda: not supervisor.starting)
    except BaseException:
        workers.close()
        raise
    return replace(workers, trace=log_dir / "trace.json" if cfg.runner.trace else None)


def env_spec(blueprint: Blueprint, arena: Arena, number: int) -> WorkerSpec:
    """How to start an env worker."""
    cfg, worker = blueprint.cfg, blueprint.env_workers[number]
    init = EnvWorkerInit(
        env=cfg.env,
        context=replace(blueprint.context, num_slots=len(worker.slots), num_workers=len(blueprint.env_workers)),
        video=cfg.video_cfg,
        expert_noise=getattr(cfg.model, "expert_noise", 0.0),
        arena=arena.handle,
        scripted=blueprint.policy.scripted,
        labelled=blueprint.labelled,
        single_step=blueprint.single_step,
        shared_arena=shared_arena(cfg, arena),
    )
    return WorkerSpec(
        name=worker.name,
        entry="embodyrl.workers.env_worker:EnvWorker",
        init=init,
        environ=_ONE_THREAD,
        component="env",
        gpu=blueprint.devices.of_env_worker(number, on_gpu=blueprint.env.on_gpu),
    )
