"""Compare the memory plan with the measured peak of the same config, row by row.

    python tests/fakegpu/rows.py                    all rows with full models: minutes
    python tests/fakegpu/rows.py --layers 2         with n layers of each part (SmolVLA and pi0.5: all layers)
    python tests/fakegpu/rows.py --only "7B lora"   rows whose name starts with this text

Needs `FAKE_CUDA_GUARD` (see `test_fakegpu.py`) and this folder on PYTHONPATH.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import fakegpu  # noqa: F401  (before torch)
from jobs import FLOWS, GIB, H100, Job, Result, run

ONE, EIGHT, AGAIN = "actor.fsdp.size=1", "actor.fsdp.size=8", "actor.gradient_checkpointing=true"
KL, APART = "algorithm.kl_beta=0.01", "rollout.mode=disaggregated"
EACH, STEP = "actor.fsdp.gradient_sync=micro_batch", "actor.fsdp.gradient_sync=step"
HSDP, OFFLOAD = "actor.fsdp.shard_size=4", "actor.fsdp.cpu_offload=true"
VLLM, GRAPHS = "rollout.backend=vllm", "model.cuda_graphs=true"
ASLEEP = "rollout.vllm.enable_sleep_mode=true"
ALL = "actor.global_batch_size=128"
FOUR, SIXTEEN, MANY = (f"actor.micro_batch_size={n}" for n in (4, 16, 32))
PRESET = "model.num_steps=4"
WHOLE = "model.train_expert_only=false"
LONG = "algorithm.sampling_params.max_new_tokens=1024"
ROWS = (
    Job(name="7B lora, 1 rank", model="7b", lora=True, words=(ONE,), act=8, train=16),
    Job(name="7B lora, 1 rank, recomputed", model="7b", lora=True, words=(ONE, AGAIN), act=0, train=16),
    Job(name="7B lora, 1 rank, reference", model="7b", lora=True, words=(ONE, KL), act=0, train=16),
    Job(name="7B lora, 1 rank, CUDA graphs", model="7b", lora=True, words=(ONE, GRAPHS), act=8, train=16),
    Job(name="7B lora, 8 ranks", model="7b", lora=True, words=(EIGHT,), act=8, train=128),
    Job(name="7B full, 8 ranks", model="7b", words=(EIGHT, STEP), act=8, train=128),
    Job(name="7B full, 8 ranks, recomputed", model="7b", words=(EIGHT, STEP, AGAIN), act=0, train=128),
    Job(name="7B full, 8 ranks, each micro-batch", model="7b", words=(EIGHT, EACH, AGAIN), act=0, train=128),
    Job(name="7B full, 8 ranks, reference", model="7b", words=(EIGHT, STEP, AGAIN, KL), act=0, train=128),
    Job(name="7B full, 8 ranks, apart", model="7b", words=(EIGHT, STEP, AGAIN, APART), act=0, train=128),
    Job(name="7B full, 2 x 4 ranks", model="7b", words=(EIGHT, STEP, AGAIN, HSDP), act=0, train=128),
    Job(name="7B full, offloaded", model="7b", words=(ONE, AGAIN, OFFLOAD), act=8, train=16),
    Job(name="0.5B text", model="0.5b", words=(ONE,), act=0, train=16),
    Job(name="1.5B text, recomputed", model="1.5b", words=(ONE, AGAIN, LONG), act=0, train=16),
    Job(name="7B full, 8 ranks, one micro-batch", model="7b", words=(EIGHT, STEP), act=8, train=64),
    Job(name="0.5B text, 8 ranks, one micro-batch", model="0.5b", words=(EIGHT, STEP, ALL), act=0, train=64),
    Job(
        name="1.5B text, 8 ranks, recomputed, one micro-batch",
        model="1.5b",
        words=(EIGHT, STEP, ALL, AGAIN),
        act=0,
        train=64,
    ),
    Job(name="0.5B text, 8 ranks", model="0.5b", words=(EIGHT, STEP, ALL), act=0, train=128),
    Job(name="0.5B text, 8 ranks, recomputed", model="0.5b", words=(EIGHT, STEP, ALL, AGAIN), act=0, train=128),
    Job(name="1.5B text, 8 ranks", model="1.5b", words=(EIGHT, STEP, ALL), act=0, train=128),
    Job(name="1.5B text, 8 ranks, recomputed", model="1.5b", words=(EIGHT, STEP, ALL, AGAIN), act=0, train=128),
    Job(name="1.5B text, 8 ranks, each micro-batch", model="1.5b", words=(EIGHT, EACH, ALL, AGAIN), act=0, train=128),
    Job(name="0.5B text, vLLM", model="0.5b", words=(ONE, VLLM), act=0, train=16),
    Job(name="1.5B text, recomputed, vLLM", model="1.5b", words=(ONE, AGAIN, LONG, VLLM), act=0, train=16),
    Job(name="1.5B text, vLLM asleep", model="1.5b", words=(ONE, LONG, VLLM, ASLEEP), act=0, train=16),
    Job(name="1.5B text, adapters", model="1.5b", lora=True, words=(ONE,), act=0, train=16),
    Job(name="SmolVLA, all weights", model="smolvla", words=(ONE, WHOLE), act=8, train=16),
    Job(name="SmolVLA, all weights, recomputed", model="smolvla", words=(ONE, WHOLE, AGAIN), act=0, train=16),
    Job(name="pi0.5, expert", model="pi05", words=(ONE,), act=8, train=16),
    Job(name="pi0.5, expert, recomputed", model="pi05", words=(ONE, AGAIN), act=0, train=16),
    Job(name="SmolVLA, all weights, 32", model="smolvla", words=(ONE, WHOLE, MANY), act=0, train=64),
    Job(name="pi0.5, expert, 32", model="pi05", words=(ONE, MANY), act=0, train=64),
    Job(name="7B lora, 1 rank, 16", model="7b", lora=True, words=(ONE, SIXTEEN), act=16, train=32),
    Job(name="7B lora, 1 rank, recomputed, 4", model="7b", lora=True, words=(ONE, AGAIN, FOUR), act=8, train=8),
    Job(
        name="SmolVLA, all weights, recomputed, 32",
        model="smolvla",
        words=(ONE, WHOLE, AGAIN, MANY, PRESET),
        act=16,
        train=64,
    ),
    Job(name="pi0.5, expert, recomputed, 16", model="pi05", words=(ONE, AGAIN, SIXTEEN, PRESET), act=16, train=32),
)
"""`train`: two micro-batches of eight on each rank, or one. The last four rows have the sizes of presets."""
STEP_OF_TEXT = Job(name="text, one micro-batch", model="1.5b", words=(ONE, AGAIN, LONG), act=0, train=8)


def line(job: Job, got: Result, seconds: float) -> str:
    """Return a row of the table; memory outside of tensors (CUDA, vLLM) is subtracted from the plan.

    vLLM's share must fit in addition to the measured memory, while vLLM is awake.
    """
    sizes, seen = got.planned, got.measured()
    planned = sizes["policy"] - sizes["process"] - (0 if got.sleeps else sizes["engine"])
    beside = got.phases["update 1"]["live"] if got.sleeps else seen
    assert beside + sizes["process"] + sizes["share"] <= H100, f"vLLM's {sizes['share'] / GIB:.1f} GiB do not fit"
    where = max(got.peaks, key=got.peaks.__getitem__)
    return (
        f"| {job.name} | {planned / GIB:.2f} | {seen / GIB:.2f} | {planned / seen - 1:+.1%} | {where} | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print("| configuration | plan, GiB | metered, GiB | difference | peak in | CPU s |\n|---|---|---|---|---|---|")
    for job in (*ROWS, STEP_OF_TEXT) if args.only else ROWS:
        if not job.name.startswith(args.only):
            continue
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            got = run(replace(job, layers=None if job.model in FLOWS else args.layers), Path(folder))
        print(line(job, got, time.process_time() - started), flush=True)
        if args.verbose:
            print("   plan", {k: round(v / GIB, 2) for k, v in got.planned.items() if v and not isinstance(v, bool)})
            print("   peak", {k: round(v / GIB, 2) for k, v in got.peaks.items()})
            print("   live", {k: round(v["live"] / GIB, 2) for k, v in got.phases.items()}, flush=True)


if __name__ == "__main__":
    main()
