"""Speed and peak memory of OpenVLA-OFT and pi0 against plain builds and transformers, with random weights.

    pip install timm transformers
    python benchmarks/policy.py --json policy.json                           tiny and 100 M parameters, fp32
    python benchmarks/policy.py --json policy.json --sizes pi0-tiny pi0-90m  pi0, with the same weights on all sides
    python benchmarks/policy.py --json policy.json --sizes 7b --dtype bf16   on a GPU

The reference of OpenVLA-OFT is built like the public model: timm's vision transformers (`get_intermediate_layers`) and
transformers' LlamaForCausalLM (sdpa, no cache, full attention through a 4-D mask, logits of all rows and the whole
vocabulary); the references of pi0 are in `policy_flow.py`. The sides alternate in separate processes, so that peak
memory is measured separately and a busy machine affects both. Results are medians, of CPU seconds if one thread
computes. `act` is a forward pass without gradients, `score` a forward and backward pass.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import policy_flow
import torch
from torch import Tensor, nn

from embodyrl.files import available_cores
from embodyrl.policies.openvla_oft.config import LlamaSpec, OftConfig, OftOptions, PixelNorm, Statistics, VitSpec
from embodyrl.policies.openvla_oft.model import ModelInputs, OpenVlaOft
from embodyrl.policies.openvla_oft.settings import OftSettings

CHUNK, ACTION_DIM, PROMPT = 8, 7, 32
OFT_PEER = "timm VisionTransformer x 2 + transformers LlamaForCausalLM"


@dataclass(frozen=True)
class Size:
    image: int
    dino: tuple[int, int, int]
    """Width, depth and number of heads."""
    siglip: tuple[int, int, int, int]
    """Width, depth, number of heads, width of the MLP."""
    llama: tuple[int, int, int, int, int]
    """Width, width of the MLP, numbers of layers, heads and tokens."""


SIZES = {
    "tiny": Size(98, (96, 4, 3), (64, 5, 2, 256), (128, 352, 4, 4, 1024)),
    "100m": Size(224, (384, 8, 6), (384, 8, 6, 1536), (640, 1728, 8, 10, 8192)),
    "7b": Size(224, (1024, 24, 16), (1152, 27, 16, 4304), (4096, 11008, 32, 32, 32064)),
}


def config_of(size: Size) -> OftConfig:
    """Return the config of embodyrl for a size."""
    dino, siglip, llama = size.dino, size.siglip, size.llama
    common = {"image_size": size.image, "patch_size": 14}
    norm = PixelNorm(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return OftConfig(
        folder=Path(),
        towers=(
            VitSpec(
                **common, width=dino[0], depth=dino[1], heads=dino[2], mlp_hidden=4 * dino[0],
                class_token=True, reg_tokens=4, layer_scale=True, attn_pool=False,
            ),
            VitSpec(
                **common, width=siglip[0], depth=siglip[1], heads=siglip[2], mlp_hidden=siglip[3],
                class_token=False, reg_tokens=0, layer_scale=False, attn_pool=False,
            ),
        ),
        pixel_norms=(norm, norm),
        llama=LlamaSpec(
            vocab_size=llama[4], hidden_size=llama[0], intermediate_size=llama[1], num_hidden_layers=llama[2],
            num_attention_heads=llama[3], rms_norm_eps=1e-6, rope_theta=10000.0, bos_token_id=1, eos_token_id=2,
        ),
        pad_token_id=0,
        action_vocab_end=llama[4] - 64,
        n_bins=256,
        statistics=Statistics({}, Path()),
        random_init=True,
    )  # fmt: skip


class Peer(nn.Module):
    """Reference: the public model built from modules of transformers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        import transformers as hf
        from timm.models.vision_transformer import VisionTransformer

        dino, siglip, llama = size.dino, size.siglip, size.llama
        common = {"img_size": size.image, "patch_size": 14, "num_classes": 0}
        self.dino = VisionTransformer(
            **common, embed_dim=dino[0], depth=dino[1], num_heads=dino[2], reg_tokens=4, no_embed_class=True,
            init_values=1e-5,
        )  # fmt: skip
        self.siglip = VisionTransformer(
            **common, embed_dim=siglip[0], depth=siglip[1], num_heads=siglip[2], mlp_ratio=siglip[3] / siglip[0],
            class_token=False, global_pool="",
        )  # fmt: skip
        vision = dino[0] + siglip[0]
        self.projector = nn.Sequential(
            nn.Linear(vision, 4 * vision), nn.GELU(), nn.Linear(4 * vision, llama[0]), nn.GELU(),
            nn.Linear(llama[0], llama[0]),
        )  # fmt: skip
        self.llama = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=llama[4], hidden_size=llama[0], intermediate_size=llama[1], num_hidden_layers=llama[2],
                num_attention_heads=llama[3], num_key_value_heads=llama[3], rms_norm_eps=1e-6,
            )
        )  # fmt: skip
        self.end = llama[4] - 64

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, None]:
        pixels, ids, length = inputs.pixels, inputs.prompt_ids, CHUNK * ACTION_DIM
        dino, siglip = (
            tower.get_intermediate_layers(part, n={len(tower.blocks) - 2})[0]
            for tower, part in ((self.dino, pixels[:, :3]), (self.siglip, pixels[:, 3:]))
        )
        patches = self.projector(torch.cat([dino, siglip], dim=-1))
        text = self.llama.model.embed_tokens(torch.cat([ids, torch.full_like(ids[:, :1], 2)], dim=1))
        zeros = text.new_zeros(len(ids), length, text.shape[-1])
        embeddings = torch.cat([text[:, :1], patches, text[:, 1:-1], zeros, text[:, -1:]], dim=1)
        count = embeddings.shape[1]
        mask = torch.ones(len(ids), 1, count, count, dtype=torch.bool, device=ids.device)
        logits = self.llama(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
        start = patches.shape[1] + ids.shape[1] - 1
        return logits[:, start : start + length, self.end - 256 : self.end].float(), None


def build(side: str, size: Size, device: str, dtype: torch.dtype) -> nn.Module:
    """Build one side with random weights."""
    with torch.device("meta"):
        options = OftOptions(cfg=OftSettings(model_type="openvla_oft", num_action_chunks=CHUNK, action_dim=ACTION_DIM))
        module = OpenVlaOft(config_of(size), options) if side == "ours" else None
    if module is None:
        with torch.device(device):
            return Peer(size).to(dtype)
    module = module.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02)
    return module


def reset_peak(device: str) -> int:
    """Start a new peak measurement and return the bytes in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # What earlier calls freed must not hide in the base line.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(device: str) -> int:
    """Return the peak bytes since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def clock_of(device: str) -> Callable[[], float]:
    """Return the clock: CPU time excludes other processes, but counts every thread."""
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def oft_call(module: nn.Module, inputs: ModelInputs, what: str) -> Callable[[], None]:
    """Run a forward pass, with or without a backward pass."""
    if what == "act":
        return lambda: module(inputs)[0].log_softmax(dim=-1)
    return lambda: module(inputs)[0].log_softmax(dim=-1)[..., 0].mean().backward()


def measure(module: nn.Module, call: Callable[[], object], what: str, device: str, seconds: float) -> dict:
    """Return the seconds of each call after a warm-up call (if there are several), and the bytes beyond the weights."""
    module.zero_grad(set_to_none=True)
    clock = clock_of(device)
    before, times, started = reset_peak(device), [], clock()
    while not times or clock() - started < seconds:
        begun = clock()
        with torch.set_grad_enabled(what == "score"):
            if what == "score":
                module.zero_grad(set_to_none=True)
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - begun)
    return {"times": times[1:] or times, "bytes": peak(device) - before}


def run_side(side: str, size_name: str, args: argparse.Namespace) -> None:
    """Measure one side of one size in this process and print the numbers as JSON."""
    device, dtype = args.device, {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    torch.manual_seed(0)
    flow = policy_flow.Side(side, policy_flow.SIZES[size_name], device, dtype) if is_flow(size_name) else None
    module = build(side, SIZES[size_name], device, dtype) if flow is None else flow.module
    results = {"parameters": sum(p.numel() for p in module.parameters())}
    # The first call also pays for libraries that load late.
    for batch in (1, *args.batches):
        for what in args.what:
            if (batch > args.largest_score and what == "score") or (flow and what not in flow.measured):
                continue
            if flow is None:
                call = oft_call(module, inputs_of(SIZES[size_name], batch, device, dtype), what)
            else:
                call = flow.call(what, batch)
                with torch.set_grad_enabled(what == "score"):
                    results[f"{what} {batch} numbers"] = call().detach().float().flatten()[:64].tolist()
            results[f"{what} {batch}"] = measure(module, call, what, device, args.seconds)
    print(json.dumps(results))


def is_flow(size_name: str) -> bool:
    """Return whether a size belongs to pi0."""
    return size_name in policy_flow.SIZES


def inputs_of(size: Size, batch: int, device: str, dtype: torch.dtype) -> ModelInputs:
    """Return a batch of random inputs."""
    return ModelInputs(
        pixels=torch.randn(batch, 6, size.image, size.image, device=device, dtype=dtype),
        prompt_ids=torch.randint(3, 500, (batch, PROMPT), device=device),
        prompt_lengths=torch.full((batch,), PROMPT, device=device),
    )


def largest_difference(ours: dict, theirs: dict) -> float:
    """Return the largest difference of the results of both sides for the same weights and inputs."""
    names = [name for name in theirs if name.endswith("numbers")]
    return max(abs(a - b) for name in names for a, b in zip(ours[name], theirs[name], strict=True))


def rows_of(size_name: str, ours: dict, theirs: dict, against: str, args: argparse.Namespace) -> list[dict]:
    """Compare both sides; a ratio above 1 means that embodyrl is faster."""
    rows, chunk = [], policy_flow.SIZES[size_name].horizon if is_flow(size_name) else CHUNK
    for batch in args.batches:
        for what in args.what:
            if f"{what} {batch}" not in theirs:
                continue
            mine, other = ours[f"{what} {batch}"], theirs[f"{what} {batch}"]
            label = f"{size_name} {args.dtype} {what} batch {batch}"
            speed, their_speed = (chunk * batch / statistics.median(side["times"]) for side in (mine, other))
            rows.append(_row(label, against, "actions/s", speed, their_speed, speed / their_speed))
            ours_mb, theirs_mb = mine["bytes"] / 2**20, other["bytes"] / 2**20
            rows.append(_row(label, against, "MiB beyond weights", ours_mb, theirs_mb, theirs_mb / max(ours_mb, 1e-3)))
    return rows


def _row(what: str, against: str, unit: str, ours: float, theirs: float, ratio: float) -> dict:
    return {
        "what": what, "unit": unit, "ours": round(ours, 3), "against": against, "theirs": round(theirs, 3),
        "ratio": round(ratio, 3), "goal": 1.0,
    }  # fmt: skip


def _in_own_process(side: str, size: str) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--sizes", size, "--side", side]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _joined(turns: list[dict]) -> dict:
    """Concatenate the calls of several turns of one side."""
    joined = turns[0]
    for turn in turns[1:]:
        for name in (name for name, found in joined.items() if isinstance(found, dict)):
            joined[name]["times"] += turn[name]["times"]
            joined[name]["bytes"] = min(joined[name]["bytes"], turn[name]["bytes"])
    return joined


def main() -> None:
    """Run both sides of each size and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *policy_flow.SIZES], default=["tiny", "100m"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--what", nargs="+", choices=["act", "score"], default=["act", "score"])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each measurement, at least one call")
    parser.add_argument("--turns", type=int, default=2, help="number of starts of each side")
    parser.add_argument("--largest-score", type=int, default=64, help="maximum batch size of score, to limit memory")
    parser.add_argument("--side", choices=["ours", *policy_flow.PEERS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args.side, args.sizes[0], args)
        return
    rows = []
    for size in args.sizes:
        peers = policy_flow.PEERS if is_flow(size) else {"theirs": OFT_PEER}
        sides = ("ours", *peers)
        turns = [_in_own_process(side, size) for side in sides * args.turns]
        found = {side: _joined(turns[number :: len(sides)]) for number, side in enumerate(sides)}
        print(f"{size}: {' / '.join(format(found[side]['parameters'], ',') for side in sides)} parameters")
        for side, against in peers.items():
            if is_flow(size):
                by = largest_difference(found["ours"], found[side])
                print(f"{size}: numbers differ from those of {against} by {by:.1e}")
            rows += rows_of(size, found["ours"], found[side], against, args)
    for row in rows:
        print(
            f"{row['what']:<28}{row['unit']:<20}{row['ours']:>12}{row['theirs']:>12}{row['ratio']:>8}  {row['against']}"
        )
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    machine = {
        "clock": clock_of(args.device).__name__,
        "device": name,
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
