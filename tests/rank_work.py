"""Actor ranks in separate processes with the same updates and records for any number of ranks."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor
from toy_runs import toy_config

from embodyrl.channels.arena import Arena, get_record_indices
from embodyrl.channels.layout import Record, encode_instruction
from embodyrl.channels.messages import InferRequest, LoadRequest, RankInfo, SaveRequest, UpdateRequest
from embodyrl.learners import policy_gradient
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.run_plan import RunPlan
from embodyrl.scheduler.start import build_policy_init, open_rendezvous
from embodyrl.types import IntArray
from embodyrl.workers.policy_host import PolicyHost

RECORDS = 6
PRELOADED = [
    "torch.distributed.fsdp",
    "torch._dynamo",
    "embodyrl.commands.train",
    "embodyrl.workers.policy_host",
    "embodyrl.policies.actor_critic.policy",
]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Updates `first`..`last`-1 with a config, from a saved state or from the start."""

    name: str
    words: tuple[str, ...]
    last: int
    first: int = 0
    load: Path | None = None
    poison: bool = False
    """True if one sample, used by one rank, has a NaN advantage."""
    at_once: int | None = None
    """Number of tokens whose metrics are computed together; small values test several passes."""


def run_ranks(
    folder: Path, world: int, jobs: Sequence[Rollout], *, host: str = "127.0.0.1", deadline_s: float = 900.0
) -> None:
    """Run jobs on `world` ranks; each job writes <folder>/<name>/ with metrics.json and saved state."""
    meetings = [open_rendezvous(world, host, timeout_s=3600) for _ in jobs]
    # One process imports torch and the rest, once for all tests; ranks are forked from it before it has threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    work = [(job, meeting.rank_info) for job, meeting in zip(jobs, meetings, strict=True)]
    processes = [context.Process(target=_rank, args=(folder, rank, world, work)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(deadline_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    for meeting in meetings:
        meeting.close()
    assert codes == [0] * world, f"exit codes {codes}"


def losses(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each update."""
    return json.loads((folder / "metrics.json").read_text())


def state(folder: Path) -> dict[str, Tensor]:
    """Return all tensors that a job saved: weights, adapters and optimizer moments."""
    found = {f"{p.parent.name}/{k}": v for p in folder.rglob("*.safetensors") for k, v in load_file(p).items()}
    assert any("policy" in key or "lora" in key for key in found)
    return found


def _rank(folder: Path, rank: int, world: int, work: Sequence[tuple[Rollout, RankInfo]]) -> None:
    import torch

    torch.set_num_threads(1)
    for job, rank_info in work:
        _do(folder / job.name, job, replace(rank_info, rank=rank, world=world))


def _do(folder: Path, job: Rollout, rank_info: RankInfo) -> None:
    sizes = (f"actor.fsdp.size={rank_info.world}", "actor.global_batch_size=6", "env.train.total_num_envs=8")
    words = (*sizes, *job.words)
    if job.at_once is not None:
        policy_gradient.MAX_COLLECTED_TOKENS = job.at_once
    cfg = toy_config(folder, "launcher=local", *words)
    run_plan = build_run_plan(cfg, training=True)
    arena = Arena.create(run_plan.layout, max(run_plan.capacity, RECORDS))
    host = PolicyHost(replace(build_policy_init(run_plan, arena, None), rank_info=rank_info))
    record_refs = fill(arena, run_plan, host)
    if job.poison:
        arena[Record.advantage][get_record_indices(record_refs[0])] = np.nan
    if job.load is not None:
        list(host.handle(LoadRequest(sequence=0, folder=str(job.load))))
    metrics = []
    for step in range(job.first, job.last):
        request = UpdateRequest(
            sequence=0, step=step, record_refs=record_refs, episode=tuple(i // 3 for i in range(RECORDS))
        )
        (done,) = host.handle(request)
        metrics.append(done.metrics)
    list(host.handle(SaveRequest(sequence=0, folder=str(folder / "saved"))))
    if rank_info.rank == 0:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    host.close()
    arena.close()


def fill(arena: Arena, run_plan: RunPlan, host: PolicyHost, *, drift: float = 0.05) -> IntArray:
    """Fill records as in a rollout, sampled from one seed; `drift`: change of the log-probabilities."""
    rng = np.random.default_rng(0)
    record_refs = arena.allocate_all(RECORDS)
    for record_ref in record_refs.tolist():
        with arena.write(record_ref) as record:
            arena[Record.images][record] = rng.integers(0, 256, arena[Record.images].shape[1:])
            arena[Record.observed_state][record] = rng.normal(size=arena[Record.observed_state].shape[1:])
            width = arena[Record.instruction].shape[1]
            arena[Record.instruction][record] = encode_instruction(run_plan.env.tasks[0], width)
            arena[Record.advantage][record] = rng.normal()
            arena[Record.returns][record] = rng.normal(size=arena[Record.returns].shape[1:])
            arena[Record.valid][record] = rng.random(arena[Record.valid].shape[1:]) < 0.9
    seeds, first = range(RECORDS), [0] * RECORDS
    list(
        host.handle(
            InferRequest(record_refs=record_refs, noise_seeds=seeds, chunk_indices=first, greedy=False, version=0)
        )
    )
    arena[Record.logprob][:] += rng.normal(0, drift, arena[Record.logprob].shape)
    return record_refs
