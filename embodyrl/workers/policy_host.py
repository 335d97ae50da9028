"""One process that holds one copy of the weights: a rollout worker and an actor worker on the same module."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl.algorithms.protocol import build_algorithm
from embodyrl.channels.arena import Arena, ArenaHandle
from embodyrl.checkpoint.tensors import load_state, rng_state, save_state, set_rng_state
from embodyrl.config.schema import ActorConfig, AlgorithmConfig, ModelConfig, OnNonfinite
from embodyrl.policies.protocol import POLICIES, PolicyRequest
from embodyrl.types import GripperConvention
from embodyrl.workers.actor_worker import ActorWorker
from embodyrl.workers.messages import (
    POLICY_FOLDER,
    Done,
    InferOrder,
    LoadOrder,
    SaveOrder,
    ScoreOrder,
    UpdateOrder,
    ValueOrder,
    WorkerReady,
)
from embodyrl.workers.rollout_worker import RolloutWorker

TRAINING_STATE = "training_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHostInit:
    """What the process that holds the policy needs to start."""

    model: ModelConfig
    request: PolicyRequest
    arena: ArenaHandle
    gripper: GripperConvention | None
    """The environment's gripper convention."""
    algorithm: AlgorithmConfig | None
    """None: evaluation only, no optimizer."""
    actor: ActorConfig
    total_steps: int
    seed: int
    deterministic: bool
    on_nonfinite: OnNonfinite
    threads: int
    start_from: str | None = None
    """Folder of weights in the policy's own layout that replace those of `model.path`."""
    shared_arena: Arena | None = None


class PolicyHost:
    """Collocated rollout and actor worker."""

    def __init__(self, init: PolicyHostInit) -> None:
        torch.set_num_threads(init.threads)
        if init.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        random.seed(init.seed)
        np.random.seed(init.seed % 2**32)
        torch.manual_seed(init.seed)
        self._owns_arena = init.shared_arena is None
        self._arena = init.shared_arena or Arena.attach(init.arena)
        factory = POLICIES.get(init.model.model_type)
        request = replace(init.request, device="cuda" if torch.cuda.is_available() else "cpu")
        self._policy = factory.build(init.model, request)
        if init.start_from is not None:
            self._policy.load_weights(Path(init.start_from))
        self._rollout = RolloutWorker(self._policy, self._arena, init.gripper)
        self._actor: ActorWorker | None = None
        if init.algorithm is not None:
            algorithm = build_algorithm(init.algorithm)
            reference = None
            if algorithm.needs_reference:
                reference = factory.build(init.model, request)
                if init.start_from is not None:
                    reference.load_weights(Path(init.start_from))
                reference.module.requires_grad_(False)
            self._actor = ActorWorker(
                self._policy,
                self._arena,
                algorithm,
                init.actor,
                update_epoch=init.algorithm.update_epoch,
                total_steps=init.total_steps,
                seed=init.seed,
                on_nonfinite=init.on_nonfinite,
                reference=reference,
            )

    def ready(self) -> WorkerReady:
        """Introduce the worker."""
        count = sum(p.numel() for p in self._policy.module.parameters())
        return WorkerReady(pid=os.getpid(), info=f"{self._policy.spec.name}, {count:,} parameters")

    def handle(self, order: Any) -> Iterator[Done]:
        """Carry out one order and report how long it took."""
        started = time.perf_counter()
        metrics = self._carry_out(order)
        yield Done(sequence=order.sequence, seconds=time.perf_counter() - started, metrics=metrics)

    def _carry_out(self, order: Any) -> dict[str, float]:
        match order:
            case InferOrder():
                self._rollout.infer(order)
            case ValueOrder():
                self._rollout.values(order)
            case ScoreOrder():
                self._trainer.score(order)
            case UpdateOrder():
                return self._trainer.update(order)
            case SaveOrder():
                self._save(order)
            case LoadOrder():
                self._load(order)
            case _:
                raise AssertionError(f"unknown order {order!r}")
        return {}

    @property
    def _trainer(self) -> ActorWorker:
        assert self._actor is not None, "this run has no actor"
        return self._actor

    def _save(self, order: SaveOrder) -> None:
        folder = Path(order.folder)
        policy = folder / POLICY_FOLDER
        policy.mkdir(parents=True)
        self._policy.save(policy)
        if order.training_state:
            trainer = self._trainer
            state = {
                "optimizer": trainer.optimizer.state_dict(),
                "schedule": {"last_epoch": trainer.scheduler.last_epoch},
                "rng": rng_state(),
            }
            save_state(folder, TRAINING_STATE, state)

    def _load(self, order: LoadOrder) -> None:
        folder = Path(order.folder)
        self._policy.load_weights(folder / POLICY_FOLDER)
        if order.training_state:
            state = load_state(folder, TRAINING_STATE)
            trainer = self._trainer
            trainer.optimizer.load_state_dict(state["optimizer"])
            trainer.scheduler.last_epoch = int(state["schedule"]["last_epoch"])
            set_rng_state(state["rng"])

    def close(self) -> None:
        if self._owns_arena:
            self._arena.close()
