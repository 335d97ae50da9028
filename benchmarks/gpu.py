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
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import BUCKET_BYTES, bucket_layout, fill_buckets
from embodyrl.channels.messages import LoadWeightsRequest, PublishRequest, RankInfo
from embodyrl.config.paths import assets_dir
from embodyrl.config.shared import Precision
from embodyrl.learners.ranks import OneRank
from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import Optimization
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.settings import OftSettings
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.settings import LoraSettings
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, Observation
from embodyrl.workers.weights import describe_weights, publish, take

TASK = "put both the alphabet soup and the tomato sauce in the basket"
GIB = 2**30
LARGE = {
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "vocab_size": 32064},
}
ENV = EnvSpec(
    name="synthetic",
    action=ActionSpec(dim=7),
    tasks=(TASK,),
    states_per_task=(1,),
    cameras=CameraSpec(names=("agentview",), size=(256, 256)),
    benchmark=BenchmarkSpec(unnorm_key="libero_10"),
)
FEW_LAYERS = 2
GOALS = {"act": 0.4, "latency": 0.3, "train": 0.4, "memory": 1.0, "publish": 0.5}


@dataclass(frozen=True)
class Limits:
    """What the device can do."""

    flops: float
    """Per second, of a large matrix product."""
    bandwidth: float
    """Bytes per second, read and written, of a large copy."""
    memory: int
    """Bytes."""


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], device: str, seconds: float) -> float:
    """Median seconds of a call, after one that warms up."""
    call()
    synchronise(device)
    times, started = [], time.perf_counter()
    while not times or time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        call()
        synchronise(device)
        times.append(time.perf_counter() - begun)
    return float(np.median(times))


def measure_limits(device: str, dtype: torch.dtype, seconds: float) -> Limits:
    side = 8192 if device == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = seconds_of(lambda: a @ b, device, seconds)
    source = torch.empty(GIB if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    copy = seconds_of(source.clone, device, seconds)
    memory = (
        torch.cuda.mem_get_info()[1] if device == "cuda" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    return Limits(flops=2 * side**3 / product, bandwidth=2 * source.nbytes / copy, memory=memory)


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def write_folder(folder: Path, size: str, layers: int | None) -> None:
    """A checkpoint folder that asks for random weights: the shipped tiny one, or the same with the public sizes."""
    source = assets_dir() / "openvla_oft_tiny"
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text()) | (LARGE if size == "7b" else {})
    if layers:
        config["text_config"] = config["text_config"] | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))


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
    write_folder(folder, args.size, args.layers)
    cfg = settings(folder, mode, args)
    request = PolicyRequest(
        env=ENV, value_dim=0, temperature=1.0, device=args.device, seed=0, gradient_checkpointing=args.recompute
    )
    return FACTORY.build(cfg, request)


def observe(batch: int) -> Observation:
    images = np.random.default_rng(0).integers(0, 256, (batch, 1, 256, 256, 3), dtype=np.uint8)
    return Observation(images=images, state=np.zeros((batch, 0), np.float32), instructions=(TASK,) * batch)


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
    bucket_arena = Arena.create(bucket_layout(), 1)
    buckets = list(fill_buckets([w for w in describe_weights(policy.module) if w.trained], BUCKET_BYTES))
    row = bucket_arena["weights"][0]
    other = np.ones_like(row)

    def run() -> None:
        for parts in buckets:
            ticket = bucket_arena.allocate()
            publish(
                PublishRequest(sequence=0, ticket=ticket, parts=parts), policy.module, OneRank(RankInfo()), bucket_arena
            )
            take(LoadWeightsRequest(sequence=0, ticket=ticket, parts=parts), policy.module, bucket_arena)
            bucket_arena.free([ticket])

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
        took = seconds_of(lambda obs=obs, noise=noise: policy.act(obs, noise=noise), args.device, args.seconds)
        limit = max(forward * batch / limits.flops, weights / limits.bandwidth)
        rows.append(
            row(f"{name} act batch {batch}", "chunks/s", batch / took, "matrix peak", limits.flops / forward, "act")
        )
        rows.append(
            row(f"{name} latency batch {batch}", "ms", took * 1e3, "roofline", limit * 1e3, "latency", less=True)
        )
    took, limit = (seconds_of(call, args.device, args.seconds) for call in publication(policy))
    rows.append(row(f"{name} publish new weights", "s", took, "two copies in memory", limit, "publish", less=True))
    step = train_step(policy, args)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = seconds_of(step, args.device, args.seconds)
    passes = 2 if mode == "lora" else 3
    rate, limit = args.global_batch / took, limits.flops / (passes * forward)
    rows.append(row(f"{name} train micro-batch {args.micro_batch}", "samples/s", rate, "matrix peak", limit, "train"))
    used, there = peak_bytes(args.device) / GIB, limits.memory / GIB
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
        write_folder(Path(name), args.size, args.layers)
        parameters = FACTORY.costs(settings(Path(name), mode, args), ENV, 0).num_parameters
        few = fitting_layers(parameters, limits.memory) if mode == "full" and not args.layers else args.layers
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
