"""OpenVLA-OFT at 7B with random weights on one GPU: acting, training, memory, against what the device can do at all.

    python benchmarks/gpu.py --json gpu.json                              LoRA and full fine-tuning, bf16
    python benchmarks/gpu.py --json gpu.json --size tiny --device cpu     the same code path on any machine

The policy is the one that trains: raw uint8 observations in, chunks out; a step is a forward and backward pass per
micro-batch and one AdamW step. The limits are measured in the same run: a large matrix product in the compute dtype and
a large copy. FLOPs are those of the model's forward pass, counted; training counts three of them, with frozen weights
two (recomputed activations do not count), so that the ratio of a training row is its MFU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import BUCKET_BYTES, build_bucket_layout, fill_buckets
from embodyrl.channels.messages import LoadWeightsRequest, PublishRequest, RankInfo
from embodyrl.config.shared import Precision
from embodyrl.learners.ranks import Ranks
from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import Optimization
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.settings import OftSettings
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.settings import LoraSettings
from embodyrl.workers.weights import describe_weights, load_bucket, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "gpu_check"))
from embodyrl_gpu_check.speed import Limits, measure_limits, measure_seconds
from embodyrl_gpu_check.synthetic import ENV, observe, write_checkpoint

GIB = 2**30
FEW_LAYERS = 2
GOALS = {"act": 0.4, "latency": 0.3, "train": 0.4, "memory": 1.0, "publish": 0.5}


def memory_of(device: str) -> int:
    """Bytes of the device's memory."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def settings(folder: Path, mode: str, args: argparse.Namespace) -> OftSettings:
    return OftSettings(
        model_type="openvla_oft",
        path=str(folder),
        precision=Precision(args.dtype),
        num_images_in_input=1,
        use_proprio=False,
        is_lora=mode == "lora",
        lora=LoraSettings(r=32, lora_alpha=32),
        compile=args.compile,
        cuda_graphs=args.graphs,
    )


def build(folder: Path, mode: str, args: argparse.Namespace) -> Policy:
    """The policy, with few layers where all of them do not fit."""
    write_checkpoint(folder, args.size, args.layers)
    cfg = settings(folder, mode, args)
    request = PolicyRequest(
        env=ENV, value_dim=0, temperature=1.0, device=args.device, seed=0, gradient_checkpointing=args.recompute
    )
    return FACTORY.build(cfg, request)


def train_step(policy: Policy, args: argparse.Namespace) -> Callable[[], None]:
    """One optimizer step on `--global-batch` samples: the policy gradient of random advantages."""
    parts = [observe(args.micro_batch)] * (args.global_batch // args.micro_batch)
    tokens = [policy.act(part, noise=None).tokens for part in parts]
    optimization = Optimization(policy.module, OptimSettings(), total_steps=1)
    advantage = torch.linspace(-1.0, 1.0, args.micro_batch, device=args.device)[:, None]

    def step() -> None:
        optimization.zero_grad()
        for part, chosen in zip(parts, tokens, strict=True):
            logprob = policy.score(part, chosen).logprob
            loss = -(advantage * (logprob - logprob.detach()).exp()).mean() / len(parts)
            loss.backward()
        optimization.step(0)

    return step


def publication(policy: Policy) -> tuple[Callable[[], None], Callable[[], None]]:
    """One publication of what is trained, from the device into buckets of shared memory and back; and two plain copies
    of as many bytes in host memory, which is what it cannot do without."""
    bucket_arena = Arena.create(build_bucket_layout(), 1)
    buckets = list(fill_buckets([w for w in describe_weights(policy.module) if w.trained], BUCKET_BYTES))
    row = bucket_arena["weights"][0]
    other = np.ones_like(row)

    def run() -> None:
        for parts in buckets:
            record_ref = bucket_arena.allocate()
            publish(
                PublishRequest(sequence=0, record_ref=record_ref, parts=parts),
                policy.module,
                Ranks(RankInfo()),
                bucket_arena,
            )
            load_bucket(LoadWeightsRequest(sequence=0, record_ref=record_ref, parts=parts), policy.module, bucket_arena)
            bucket_arena.free([record_ref])

    def copy() -> None:
        for parts in buckets:
            last = parts[-1]
            end = last.offset + (last.stop - last.start) * getattr(torch, last.dtype).itemsize
            row[:end] = other[:end]
            other[:end] = row[:end]

    return run, copy


def _added_flops(_: Sequence[int], left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    return 2 * math.prod(left) * right[1]


PRODUCTS = {torch.ops.aten.addmm_: _added_flops}
"""Unknown to the counter of torch: the products of adapted layers on a GPU."""


def count_forward(policy: Policy) -> int:
    """Return the FLOPs of scoring one sample: acting may be a recording, which runs the forward pass twice."""
    tokens = policy.act(observe(1), noise=None).tokens
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter, torch.no_grad():
        policy.score(observe(1), tokens)
    return counter.get_total_flops()


def fitting_layers(parameters: int, memory: int) -> int | None:
    """Return the layers whose full fine-tuning fits; None: all. AdamW in float32 takes 16 bytes a parameter."""
    return None if 16 * parameters <= 0.9 * memory else FEW_LAYERS


def rows_of(mode: str, policy: Policy, limits: Limits, args: argparse.Namespace) -> list[dict]:
    forward = count_forward(policy)
    weights = sum(p.numel() for p in policy.module.parameters()) * torch.tensor([], dtype=dtype_of(args)).element_size()
    depth = f" {args.layers} layers" if args.layers else ""
    name, rows = f"{args.size}{depth} {args.dtype} {mode}", []
    for batch in args.batches:
        obs, noise = observe(batch), np.random.default_rng(1).random((batch, 56), dtype=np.float32)
        took = measure_seconds(lambda obs=obs, noise=noise: policy.act(obs, noise=noise), args.device, args.seconds)
        limit = max(forward * batch / limits.flops, weights / limits.bandwidth)
        rows.append(
            row(f"{name} act batch {batch}", "chunks/s", batch / took, "matrix peak", limits.flops / forward, "act")
        )
        rows.append(
            row(f"{name} latency batch {batch}", "ms", took * 1e3, "roofline", limit * 1e3, "latency", less=True)
        )
    took, limit = (measure_seconds(call, args.device, args.seconds) for call in publication(policy))
    rows.append(row(f"{name} publish new weights", "s", took, "two copies in memory", limit, "publish", less=True))
    step = train_step(policy, args)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = measure_seconds(step, args.device, args.seconds)
    passes = 2 if mode == "lora" else 3
    rate, limit = args.global_batch / took, limits.flops / (passes * forward)
    rows.append(row(f"{name} train micro-batch {args.micro_batch}", "samples/s", rate, "matrix peak", limit, "train"))
    used, there = peak_bytes(args.device) / GIB, memory_of(args.device) / GIB
    rows.append(row(f"{name} train peak memory", "GiB", used, "memory of the device", there, "memory", less=True))
    return rows


def row(what: str, unit: str, ours: float, against: str, theirs: float, kind: str, *, less: bool = False) -> dict:
    ratio = theirs / ours if less else ours / theirs
    numbers = {"ours": ours, "theirs": theirs, "ratio": ratio}
    return {"what": what, "unit": unit, "against": against, "goal": GOALS[kind]} | {
        key: float(f"{value:.4g}") for key, value in numbers.items()
    }


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--size", choices=["7b", "tiny"], default="7b")
    parser.add_argument("--modes", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    parser.add_argument("--layers", type=int, help="of the language model; default: all, or 2 where all do not fit")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each measurement, at least one call")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="act by CUDA graphs")
    parser.add_argument("--no-recompute", dest="recompute", action="store_false", help="keep activations")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --size tiny --device cpu tries the code path")
    limits = measure_limits(args.device, dtype_of(args), min(args.seconds, 2.0))
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    machine = {"device": device, "tflops": limits.flops / 1e12, "torch": torch.__version__}
    machine |= {"GB/s": limits.bandwidth / 1e9, "threads": torch.get_num_threads()}
    rows: list[dict] = []
    for mode in args.modes:
        rows += measure(mode, limits, args)
        # After each mode: one that runs out of memory must not take the others with it.
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=2) + "\n", encoding="utf-8")
    for entry in rows:
        print(f"{entry['what']:<40}{entry['unit']:<11}{entry['ours']:>10}{entry['theirs']:>10}{entry['ratio']:>8}")


def measure(mode: str, limits: Limits, args: argparse.Namespace) -> list[dict]:
    """Rows of a mode, whose policy is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), args.size, args.layers)
        parameters = FACTORY.costs(settings(Path(name), mode, args), ENV, 0).num_parameters
        few = fitting_layers(parameters, memory_of(args.device)) if mode == "full" and not args.layers else args.layers
        if few != args.layers:
            print(f"full: {parameters:,} parameters do not fit; {few} layers of the language model instead")
        args = argparse.Namespace(**{**vars(args), "layers": few})
        policy = build(Path(name), mode, args)
        print(f"{mode}: {sum(p.numel() for p in policy.module.parameters()):,} parameters")
        rows = rows_of(mode, policy, limits, args)
    del policy
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
