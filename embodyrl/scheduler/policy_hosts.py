"""The processes that hold the policy: which ones a run has, and what each of them needs to start."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.channels.arena import Arena
from embodyrl.channels.gate import LOOPBACK, open_gate
from embodyrl.cluster import LAUNCHERS
from embodyrl.devices import Devices
from embodyrl.plan.memory import engine_share, plan_memory
from embodyrl.plan.roots import ActingConfig, SftConfig, TrainConfig
from embodyrl.plan.settings import OnNonfinite
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.workers.lifecycle import WorkerSpec
from embodyrl.workers.messages import RankInfo
from embodyrl.workers.policy_init import PolicyHostInit

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from embodyrl.plan.blueprint import Blueprint


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the actor ranks meet, as long as the driver lives."""

    rank_info: RankInfo
    """What every rank must know."""
    store: TCPStore | None = None
    gate: socket.socket | None = None
    """Listens for ranks on other hosts."""

    def close(self) -> None:
        """Listen no longer; idempotent."""
        if self.gate is not None and self.gate.fileno() != -1:
            self.gate.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for visitors
            self.gate.close()


def rendezvous(ranks: int, host: str, *, timeout_s: float) -> Rendezvous:
    """Open a store on the loopback interface and, if ranks come from other hosts, a gate to it at address `host`."""
    if ranks == 1:
        return Rendezvous(RankInfo())
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = socket.create_server((LOOPBACK, 0))  # left to itself, the store listens on all interfaces
    port = listener.getsockname()[1]
    # The ranks are started later than this, so nobody waits for them here.
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    rank_info = RankInfo(host=host, port=port, timeout_s=timeout_s)
    if host == LOOPBACK:
        return Rendezvous(rank_info, store)
    secret = secrets.token_bytes(32)
    gate = open_gate(host, port, secret)
    return Rendezvous(replace(rank_info, port=gate.getsockname()[1], secret=secret), store, gate)


def plan_hosts(
    blueprint: Blueprint, arena: Arena, start_from: Path | None, *, bucket_arena: Arena | None, rank_info: RankInfo
) -> list[WorkerSpec]:
    """Say which processes hold the policy of a run, the actor ranks first, who meet at their `rank_info`.

    `start_from` replaces the weights of `model.path`; `bucket_arena` are the buckets where rollout and actor are apart.
    """
    ranks = blueprint.ranks
    common = replace(
        policy_init(blueprint, arena, start_from), bucket_arena=bucket_arena.handle if bucket_arena else None
    )
    actors = actor_specs(replace(common, acts=bucket_arena is None), ranks, rank_info, blueprint.devices)
    # Built as the actors are, so that both compute the same function.
    request = replace(common.request, gradient_checkpointing=False)
    learner = blueprint.cfg if isinstance(blueprint.cfg, TrainConfig) else None
    sharded = ranks > 1 or (learner is not None and learner.actor.fsdp.cpu_offload)
    count = learner.rollout.num_workers if bucket_arena and learner else 0
    rollouts = [
        _spec(
            f"rollout_{i}",
            "rollout",
            replace(common, rank_info=RankInfo(rank=i, world=count), trains=False, request=request, sharded=sharded),
            blueprint.devices.of_policy(ranks + i),
        )
        for i in range(count)
    ]
    return actors + rollouts


def actor_specs(init: PolicyHostInit, ranks: int, rank_info: RankInfo, devices: Devices) -> list[WorkerSpec]:
    """The processes that train a policy together, who meet at their `rank_info`."""
    return [
        _spec(
            f"policy_{rank}" if rank else "policy",
            "actor",
            replace(init, rank_info=replace(rank_info, rank=rank, world=ranks)),
            devices.of_policy(rank),
        )
        for rank in range(ranks)
    ]


def policy_init(blueprint: Blueprint, arena: Arena, start_from: Path | None) -> PolicyHostInit:
    """What a process needs that acts and trains alone."""
    cfg = blueprint.cfg
    learner = cfg if isinstance(cfg, TrainConfig) and blueprint.algorithm is not None else None
    request = PolicyRequest(
        env=blueprint.env,
        value_dim=blueprint.policy.value_dim,
        temperature=cfg.algorithm.sampling_params.temperature,
        sampling=cfg.algorithm.sampling_params,
        backend=cfg.rollout.backend,
        engine=cfg.rollout.vllm.arguments,
        engine_share=engine_share(blueprint) if cfg.rollout.backend == "vllm" else 0.0,
        url=cfg.rollout.url,
        served_model=cfg.rollout.served_model,
        device="auto",
        seed=cfg.seed,
        trainable=learner is not None,
        gradient_checkpointing=learner is not None and learner.actor.gradient_checkpointing,
    )
    learning: dict[str, Any] = {}
    if learner is not None:
        actor = learner.actor
        if blueprint.ranks > 1:
            actor = actor.updated({"fsdp.gradient_sync": plan_memory(blueprint).gradient_sync})
        learning = {
            "algorithm": learner.algorithm,
            "actor": actor,
            "critic": learner.critic.path,
            "longest_episode": -(-learner.env.train.max_episode_steps // blueprint.policy.num_action_chunks),
            "skips_nonfinite": learner.faults.on_nonfinite is OnNonfinite.skip,
        }
    return PolicyHostInit(
        model=cfg.model,
        seed=cfg.seed,
        deterministic=cfg.runner.deterministic,
        **learning,
        request=request,
        arena=arena.handle,
        total_steps=blueprint.total_steps,
        threads=int(_threads()),
        trains=learner is not None,
        start_from=str(start_from) if start_from else None,
        shared_arena=shared_arena(cfg, arena),
    )


def _spec(name: str, component: str, init: PolicyHostInit, gpu: str | None) -> WorkerSpec:
    return WorkerSpec(
        name=name,
        entry="embodyrl.workers.policy_host:PolicyHost",
        init=init,
        environ={"OMP_NUM_THREADS": _threads()},
        component=component,
        gpu=gpu,
    )


def _threads() -> str:
    return os.environ.get("OMP_NUM_THREADS", "1")


def shared_arena(cfg: ActingConfig | SftConfig, arena: Arena) -> Arena | None:
    """The driver's own arena object, for workers that live in its process."""
    return arena if LAUNCHERS.get(cfg.launcher.name).in_process else None
