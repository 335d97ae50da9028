"""Compare the measured peak memory of the policy process with that of two modules in one process, and with the plan.

    python benchmarks/memory.py --json memory.json          0.3 B parameters, about 7 GB of memory and some minutes

Every row is a separate process that builds a policy with random weights, acts on synthetic observations and makes one
optimizer step. `two modules` is the same process with a second module for inference, as in systems with separate models
for rollout and training. The plan is the output of `embodyrl train --dry-run`; both sides exclude the shared arena.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import re
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record, encode_instruction
from embodyrl.channels.messages import InferRequest, RankInfo, UpdateRequest
from embodyrl.config.paths import assets_dir
from embodyrl.files import available_cores
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.memory import plan_memory
from embodyrl.plan.memory_plan import GIB
from embodyrl.plan.run_plan import RunPlan
from embodyrl.scheduler.start import build_policy_init, open_rendezvous
from embodyrl.workers.policy_host import PolicyHost

SIZES = {"tiny": (128, 352, 3, 4), "100m": (768, 2048, 14, 12), "300m": (1024, 2816, 24, 16)}
"""Width, inner width, layers and heads of the language model."""
COMMON = ("env=tabletop", "model=openvla_oft_tiny", "model.precision=fp32", "launcher=local")


@dataclass(frozen=True)
class Case:
    """Configuration of one measurement."""

    name: str
    size: str
    words: tuple[str, ...]
    ranks: int = 1

    @property
    def samples(self) -> int:
        """Number of samples of two micro-batches per rank: gradients of the first and activations of the second
        coexist.
        """
        return 2 * self.ranks


CASES = (
    Case("full", "300m", ()),
    Case("adapters, recomputed", "300m", ("model.is_lora=true", "actor.gradient_checkpointing=true")),
    Case("full, 2 ranks", "100m", (), ranks=2),
)


def write_folder(folder: Path, size: str) -> None:
    """Write a checkpoint folder that requests random weights."""
    for path in (assets_dir() / "openvla_oft_tiny").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    width, inner, layers, heads = SIZES[size]
    config["text_config"] |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    config["text_config"] |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps(config))


def draw(folder: Path, case: Case) -> RunPlan:
    words = (
        *COMMON,
        "actor.micro_batch_size=1",
        f"model.path={folder}",
        f"actor.fsdp.size={case.ranks}",
        f"actor.global_batch_size={case.samples}",
    )
    return build_run_plan(load_config("train", [*words, *case.words]), training=True)


def peak() -> float:
    """Return the peak resident memory of this process without shared memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    high, shared = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) * 1024 for name in ("VmHWM", "RssShmem"))
    return high - shared


def process(folder: Path, case: Case, rank_info: RankInfo, twice: bool, out: Connection) -> None:
    """Act and train once; send the peak after acting and the peak after training."""
    run_plan = draw(folder, case)
    arena = Arena.create(run_plan.layout, case.samples)
    init = replace(build_policy_init(run_plan, arena, None), rank_info=rank_info)
    trainer = actor = PolicyHost(init)
    if twice:
        actor = PolicyHost(replace(init, trains=False))
        actor.policy.module.load_state_dict(trainer.policy.module.state_dict())
    record_refs = fill(arena, run_plan)
    seeds, first = range(len(record_refs)), [0] * len(record_refs)
    list(
        actor.handle(
            InferRequest(record_refs=record_refs, noise_seeds=seeds, chunk_indices=first, greedy=False, version=0)
        )
    )
    acted = peak()
    episode = tuple(range(len(record_refs)))
    (done,) = trainer.handle(UpdateRequest(sequence=0, step=0, record_refs=record_refs, episode=episode))
    assert done.metrics["optimizer_steps"] == 1
    out.send((acted, peak()))
    trainer.close()


def fill(arena: Arena, run_plan: RunPlan) -> tuple[int, ...]:
    rng, record_refs = np.random.default_rng(0), tuple(arena.allocate() for _ in range(arena.capacity))
    for record_ref in record_refs:
        with arena.write(record_ref) as record:
            arena[Record.images][record] = rng.integers(0, 256, arena[Record.images].shape[1:])
            arena[Record.instruction][record] = encode_instruction(
                run_plan.env.tasks[0], arena[Record.instruction].shape[1]
            )
            arena[Record.advantage][record] = rng.normal()
            arena[Record.valid][record] = True
    return record_refs


def measure(folder: Path, case: Case, *, twice: bool = False) -> tuple[float, float]:
    """Return the peaks of the first rank in GiB: after acting, after training."""
    context, meet = multiprocessing.get_context("spawn"), open_rendezvous(case.ranks, "127.0.0.1", timeout_s=3600)
    ends, processes = [], []
    for rank in range(case.ranks):
        ours, theirs = context.Pipe()
        rank_info = replace(meet.rank_info, rank=rank, world=case.ranks)
        processes.append(context.Process(target=process, args=(folder, case, rank_info, twice, theirs)))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    peaks = [end.recv() for end in ends]
    for one in processes:
        one.join(60)
    acted, trained = peaks[0]
    return acted / GIB, trained / GIB


def row(what: str, ours: float, against: str, theirs: float, ratio: float, goal: float) -> dict:
    numbers = {"ours": ours, "theirs": theirs, "ratio": ratio}
    rounded = {key: float(f"{value:.4g}") for key, value in numbers.items()}
    line = {"what": what, "unit": "GiB", "against": against, **rounded, "goal": goal}
    print(f"{what}: {ours:.2f} GiB, {against} {theirs:.2f} GiB, ratio {ratio:.2f}", flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, help="one size for all cases, for a quick check")
    args = parser.parse_args()
    rows = []
    for number, case in enumerate(replace(case, size=args.size or case.size) for case in CASES):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_folder(folder, case.size)
            planned = plan_memory(draw(folder, case)).policy / GIB
            acted, trained = measure(folder, case)
            what = f"{case.size} {case.name}"
            rows.append(
                row(f"{what}, plan", planned, "measured", trained, min(planned, trained) / max(planned, trained), 0.85)
            )
            if number == 0:
                acted_2, trained_2 = measure(folder, case, twice=True)
                rows.append(row(f"{what}, acting", acted, "two modules", acted_2, acted_2 / acted, 1.0))
                rows.append(row(f"{what}, training", trained, "two modules", trained_2, trained_2 / trained, 1.0))
    machine = {"cpu": platform.processor() or platform.machine(), "cores": available_cores()}
    args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
