"""Start the workers of a run plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import build_bucket_layout
from embodyrl.channels.messages import RankInfo
from embodyrl.channels.rendezvous import Rendezvous, open_rendezvous
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import OnNonfinite
from embodyrl.cluster.supervisor import Callback, Supervisor
from embodyrl.cluster.timeline import Timeline
from embodyrl.devices import Devices, visible_gpus
from embodyrl.errors import ConfigError
from embodyrl.files import available_cores
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.scheduler.event_loop import EventLoop, PolicyClient
from embodyrl.scheduler.scheduler import RolloutScheduler
from embodyrl.workers.env_worker import EnvWorkerInit
from embodyrl.workers.lifecycle import PolicyHostInit, WorkerSpec

_MIN_FLOPS = 1e9
"""Minimum FLOPs of a micro-batch's forward pass for which updates use several threads."""


def build_policy_specs(
    run_plan: RunPlan, arena: Arena, start_from: Path | None, *, bucket_arena: Arena | None, rank_info: RankInfo
) -> list[WorkerSpec]:
    """Return the specs of the policy processes of a run, actor ranks first.

    `start_from` replaces the weights of `model.path`; `bucket_arena` contains the weight buckets of disaggregated mode.
    """
    ranks = run_plan.ranks
    common = replace(
        build_policy_init(run_plan, arena, start_from), bucket_arena=bucket_arena.handle if bucket_arena else None
    )
    actors = build_actor_specs(replace(common, acts=bucket_arena is None), ranks, rank_info, run_plan.devices)
    # Built like the actors, so that both compute the same function.
    request = replace(common.request, gradient_checkpointing=False)
    learner = run_plan.cfg if run_plan.cfg.is_train_command else None
    sharded = ranks > 1 or (learner is not None and learner.actor.fsdp.cpu_offload)
    count = learner.rollout.num_workers if bucket_arena and learner else 0
    rollouts = [
        _build_spec(
            f"rollout_{i}",
            "rollout",
            replace(common, rank_info=RankInfo(rank=i, world=count), trains=False, request=request, sharded=sharded),
            run_plan.devices.get_policy_gpu(ranks + i),
        )
        for i in range(count)
    ]
    return actors + rollouts


def build_actor_specs(init: PolicyHostInit, ranks: int, rank_info: RankInfo, devices: Devices) -> list[WorkerSpec]:
    """Return the specs of the actor ranks."""
    return [
        _build_spec(
            f"policy_{rank}" if rank else "policy",
            "actor",
            replace(init, rank_info=replace(rank_info, rank=rank, world=ranks)),
            devices.get_policy_gpu(rank),
        )
        for rank in range(ranks)
    ]


def build_policy_init(run_plan: RunPlan, arena: Arena, start_from: Path | None) -> PolicyHostInit:
    """Return the init settings of a single policy process, which runs both inference and training."""
    cfg = run_plan.cfg
    learner = cfg if cfg.is_train_command and run_plan.algorithm is not None else None
    memory = run_plan.memory
    request = PolicyRequest(
        env=run_plan.env,
        value_dim=run_plan.policy.value_dim,
        temperature=cfg.algorithm.sampling_params.temperature,
        sampling=cfg.algorithm.sampling_params,
        backend=cfg.rollout.backend,
        engine=cfg.rollout.vllm.arguments | ({"enable_sleep_mode": True} if memory.sleeps else {}),
        engine_memory_fraction=memory.engine_memory_fraction,
        url=cfg.rollout.url,
        critic=None if learner is None else learner.critic.path,
        served_model=cfg.rollout.served_model,
        top=cfg.rollout.logprobs,
        device="auto",
        seed=cfg.seed,
        trainable=learner is not None,
        fresh_heads=start_from is not None,  # which contains the heads
        gradient_checkpointing=learner is not None and learner.actor.gradient_checkpointing,
    )
    learning: dict[str, Any] = {}
    threads = get_num_threads(1)
    if learner is not None:
        if learner.actor.fsdp.cpu_offload and visible_gpus():
            threads = max(threads, available_cores() // run_plan.ranks)  # then optimizer steps run on the host
        if run_plan.ranks > 1:
            # Chosen by the driver, which can list all GPUs: ranks might choose differently.
            learning["gradient_sync"] = memory.gradient_sync
        learning |= {
            "algorithm": learner.algorithm,
            "env": run_plan.env_settings
            if run_plan.algorithm and run_plan.algorithm.settings.needs_terminal_observations
            else None,
            "actor": learner.actor,
            "longest_episode": -(-learner.env.train.max_episode_steps // learner.chunk_steps),
            "skips_nonfinite": learner.faults.on_nonfinite is OnNonfinite.skip,
        }
    return PolicyHostInit(
        model=cfg.model,
        seed=cfg.seed,
        deterministic=cfg.runner.deterministic,
        **learning,
        request=request,
        arena=arena.handle,
        total_steps=run_plan.total_steps,
        threads=threads,
        update_threads=max(threads, _count_update_threads(run_plan) if learner else 1),
        # If the expert labels each step (DAgger), the policy computes a chunk at each step, too.
        single_step=run_plan.single_step and not run_plan.labeled,
        trains=learner is not None,
        start_from=str(start_from) if start_from else None,
        shared_arena=get_shared_arena(cfg, arena),
    )


def _build_spec(name: str, component: str, init: PolicyHostInit, gpu: str | None) -> WorkerSpec:
    return WorkerSpec(
        name=name,
        entry="embodyrl.workers.policy_host:PolicyHost",
        init=init,
        environ={"OMP_NUM_THREADS": str(get_num_threads(1))} | _get_allocator_options(init),
        component=component,
        gpu=gpu,
    )


def _get_allocator_options(init: PolicyHostInit) -> dict[str, str]:
    """Return the environment variable with options of torch's GPU allocator; empty if the user has set it."""
    if not visible_gpus() or any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return {}
    options = []
    if not init.request.engine.get("enable_sleep_mode"):  # its memory pool does not support expandable segments
        # Without them, freed blocks of other sizes stay reserved: a tenth to a fifth more memory, measured on an H100.
        options.append("expandable_segments:True")
    if init.actor.fsdp.cpu_offload:
        options.append("pinned_max_round_threshold_mb:8")  # not rounded up to powers of two
    return {"PYTORCH_ALLOC_CONF": ",".join(options)} if options else {}


def _count_update_threads(run_plan: RunPlan) -> int:
    """Return the number of threads of an update: the cores of this host that env workers leave idle during updates.

    The result is 1 in deterministic mode, because the number of threads changes the rounding, and for tiny networks,
    which are not faster with several threads.
    """
    cfg, flops = run_plan.cfg, run_plan.policy_costs.forward_flops
    has_idle_cores = run_plan.ranks == 1 and not run_plan.is_disaggregated and not cfg.algorithm.max_staleness
    is_local = not visible_gpus() and not LAUNCHERS.get(cfg.launcher.name).spans_hosts
    is_large = flops * getattr(cfg.actor, "micro_batch_size", 1) >= _MIN_FLOPS
    if os.environ.get("OMP_NUM_THREADS") or cfg.runner.deterministic or not (has_idle_cores and is_local and is_large):
        return 1
    return available_cores()


def get_num_threads(default: int) -> int:
    """Return the number of threads in OMP_NUM_THREADS: the first one of a list; `default`: the variable is not set.

    Raises:
        ConfigError: the variable is not a positive number or a list of them.
    """
    text = os.environ.get("OMP_NUM_THREADS", "")
    first = text.partition(",")[0].strip()
    if not text:
        return default
    if not first.isdecimal() or not int(first):
        raise ConfigError(f"OMP_NUM_THREADS={text!r} is not a number of threads. Set it to 1 or more, or unset it.")
    return int(first)


def get_shared_arena(cfg: Config, arena: Arena) -> Arena | None:
    """Return the arena object if workers run in the driver's process; None: workers map the shared memory."""
    return arena if LAUNCHERS.get(cfg.launcher.name).in_process else None


# By default, each simulator and renderer starts one thread per core; the threads of several worker processes
# compete (measured: 5 to 15 times slower).
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")}


Progress = Callable[[int, int, str], None]
"""Callback with the number of finished units, the number of all units, and the name of a phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorkers:
    """Running workers and their shared memory."""

    supervisor: Supervisor
    arena: Arena
    policy: PolicyClient
    rendezvous: Rendezvous
    """Rendezvous of the actor ranks."""

    def wait_until_ready(
        self,
        loop: EventLoop,
        specs: list[WorkerSpec],
        envs: dict[str, tuple[WorkerSpec, Callback]],
        progress: Progress | None,
    ) -> None:
        """Wait until all workers are ready; after an error, stop all workers."""

        def is_ready() -> bool:
            waiting, total = len(self.supervisor.starting), len(policies) + len(envs)
            if progress is not None:
                progress(total - waiting, total, "starting processes (simulators, policy)")
            return not waiting

        policies = {spec.name: (spec, partial(self.policy.on_message, spec.name)) for spec in specs}
        try:
            with self.supervisor.handle_signals():
                self.supervisor.start(policies | envs)
                loop.run_until(is_ready)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def running(self) -> Iterator[None]:
        """Handle signals as stop requests inside the block; stop the workers at its end."""
        with self.supervisor.handle_signals():
            try:
                yield
            finally:
                self.close()

    def close(self) -> None:
        """Stop all workers and free the arena."""
        # Workers first: no process may write into freed memory.
        self.supervisor.stop()
        self.policy.close()
        self.rendezvous.close()
        self.arena.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorkers(RunningWorkers):
    """Running worker processes of a run that executes episodes, and their scheduler."""

    scheduler: RolloutScheduler
    timeline: Timeline


def start_workers(
    run_plan: RunPlan,
    log_dir: Path,
    log: Callable[[str], None],
    *,
    start_from: Path | None = None,
    progress: Progress | None = None,
) -> RolloutWorkers:
    """Create the arena, start all workers and wait until they are ready; `progress` is called while waiting."""
    cfg = run_plan.cfg
    arena = Arena.create(run_plan.layout, run_plan.capacity, suggest_fewer_records(run_plan))
    timeline = Timeline(
        num_envs=run_plan.num_envs,
        env_workers=[worker.name for worker in run_plan.env_workers],
        arena=arena,
        trace=log_dir / "trace.json" if cfg.runner.trace or cfg.runner.profile else None,
        profiled_step=cfg.runner.profile,
    )
    launcher = LAUNCHERS.get(cfg.launcher.name)(log_dir, cfg.cluster)
    supervisor = Supervisor(launcher, cfg.faults, log, timeline)
    # One bucket is filled while the other is read.
    bucket_arena = Arena.create(build_bucket_layout(), 2) if run_plan.is_disaggregated else None
    # Timeouts of collectives include suspended time; the driver's deadline for an update is much shorter.
    rendezvous = open_rendezvous(run_plan.ranks, launcher.host, timeout_s=24 * cfg.faults.update_timeout_s)
    specs = build_policy_specs(run_plan, arena, start_from, bucket_arena=bucket_arena, rank_info=rendezvous.rank_info)
    policy = PolicyClient(supervisor, specs, timeout_s=cfg.faults.update_timeout_s, bucket_arena=bucket_arena)
    scheduler = RolloutScheduler(supervisor, arena, policy, run_plan)
    workers = RolloutWorkers(
        supervisor=supervisor,
        arena=arena,
        scheduler=scheduler,
        policy=policy,
        rendezvous=rendezvous,
        timeline=timeline,
    )
    envs = [build_env_spec(run_plan, arena, number) for number in range(len(run_plan.env_workers))]
    callbacks = {spec.name: (spec, partial(scheduler.on_message, spec.name)) for spec in envs}
    workers.wait_until_ready(scheduler, specs, callbacks, progress)
    return workers


def suggest_fewer_records(run_plan: RunPlan) -> str:
    """Return a sentence that names the settings to lower for a smaller arena, without settings at their minimum."""
    cfg, trains = run_plan.cfg, run_plan.algorithm is not None
    keys = []
    if run_plan.num_envs > (cfg.algorithm.group_size if trains else 1):
        keys.append(f"env.{'train' if trains else 'eval'}.total_num_envs")
    if trains and cfg.algorithm.rollout_epoch > 1:
        keys.append("algorithm.rollout_epoch")
    if run_plan.env.cameras.names:
        keys.append("the camera resolution")
    return f"Lower {' or '.join(keys)}." if keys else "Free memory on this host."


def build_env_spec(run_plan: RunPlan, arena: Arena, number: int) -> WorkerSpec:
    """Return the spec of env worker `number`."""
    cfg, worker = run_plan.cfg, run_plan.env_workers[number]
    init = EnvWorkerInit(
        env=run_plan.env_settings,
        context=replace(run_plan.context, num_envs=len(worker.env_indices), num_workers=run_plan.env_workers_per_node),
        video=cfg.video_cfg,
        expert_noise=getattr(cfg.model, "expert_noise", 0.0),
        arena=arena.handle,
        scripted=run_plan.policy.scripted,
        labeled=run_plan.labeled,
        single_step=run_plan.single_step,
        shared_arena=get_shared_arena(cfg, arena),
    )
    return WorkerSpec(
        name=worker.name,
        entry="embodyrl.workers.env_worker:EnvWorker",
        init=init,
        environ=_ONE_THREAD,
        component="env",
        gpu=run_plan.devices.get_env_worker_gpu(number, on_gpu=run_plan.env.simulator.on_gpu),
    )
