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
from embodyrl.launch import LAUNCHERS
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.runtime.roots import ActingConfig, TrainConfig
from embodyrl.runtime.settings import OnNonfinite, RolloutMode
from embodyrl.workers.lifecycle import WorkerSpec
from embodyrl.workers.messages import RankSeat

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from embodyrl.runtime.build import Blueprint
    from embodyrl.workers.policy_host import PolicyHostInit


def is_apart(blueprint: Blueprint) -> bool:
    """Whether rollout and actor are different processes; nothing but training has actors."""
    return blueprint.algorithm is not None and blueprint.config(TrainConfig).rollout.mode is RolloutMode.disaggregated


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the actor ranks meet, as long as the driver lives."""

    seat: RankSeat
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
        return Rendezvous(RankSeat())
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = socket.create_server((LOOPBACK, 0))  # left to itself, the store listens on all interfaces
    port = listener.getsockname()[1]
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    seat = RankSeat(host=host, port=port, timeout_s=timeout_s)
    if host == LOOPBACK:
        return Rendezvous(seat, store)
    secret = secrets.token_bytes(32)
    gate = open_gate(host, port, secret)
    return Rendezvous(replace(seat, port=gate.getsockname()[1], secret=secret), store, gate)


def plan_hosts(
    blueprint: Blueprint, arena: Arena, start_from: Path | None, *, mail: Arena | None, seat: RankSeat
) -> list[WorkerSpec]:
    """Say which processes hold the policy of a run, the actor ranks first, who meet at their `seat`.

    `start_from` replaces the weights of `model.path`; `mail` are the buckets where rollout and actor are apart.
    """
    ranks = blueprint.ranks
    common = replace(policy_init(blueprint, arena, start_from), mail=mail.handle if mail else None)
    actors = [
        _spec(
            f"policy_{rank}" if rank else "policy",
            "actor",
            replace(common, seat=replace(seat, rank=rank, world=ranks), acts=mail is None),
            blueprint.devices.of_policy(rank),
        )
        for rank in range(ranks)
    ]
    # Built as the actors are, so that both compute the same function.
    request = replace(common.request, gradient_checkpointing=False)
    learner = blueprint.cfg if isinstance(blueprint.cfg, TrainConfig) else None
    sharded = ranks > 1 or (learner is not None and learner.actor.fsdp.cpu_offload)
    count = learner.rollout.num_workers if mail and learner else 0
    rollouts = [
        _spec(
            f"rollout_{i}",
            "rollout",
            replace(common, seat=RankSeat(rank=i, world=count), trains=False, request=request, sharded=sharded),
            blueprint.devices.of_policy(ranks + i),
        )
        for i in range(count)
    ]
    return actors + rollouts


def policy_init(blueprint: Blueprint, arena: Arena, start_from: Path | None) -> PolicyHostInit:
    """What a process needs that acts and trains alone."""
    # Imports torch, which nothing before this point needs.
    from embodyrl.workers.policy_host import PolicyHostInit

    cfg = blueprint.cfg
    learner = cfg if isinstance(cfg, TrainConfig) and blueprint.algorithm is not None else None
    request = PolicyRequest(
        env=blueprint.env,
        value_dim=blueprint.policy.value_dim,
        temperature=cfg.algorithm.sampling_params.temperature,
        sampling=cfg.algorithm.sampling_params,
        backend=cfg.rollout.backend,
        device="auto",
        seed=cfg.seed,
        trainable=learner is not None,
        gradient_checkpointing=learner is not None and learner.actor.gradient_checkpointing,
    )
    learning: dict[str, Any] = {}
    if learner is not None:
        learning = {
            "algorithm": learner.algorithm,
            "actor": learner.actor,
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


def shared_arena(cfg: ActingConfig, arena: Arena) -> Arena | None:
    """The driver's own arena object, for workers that live in its process."""
    return arena if LAUNCHERS.get(cfg.launcher.name).in_process else None
