"""GPU check of speed: matrix products, copies, and an optimizer step from a checkpoint written on the CPU."""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch

from embodyrl.learners.adam import build_adam
from embodyrl.learners.training import load_optimizer
from embodyrl.plan.rates import find_known_speed
from embodyrl.policies.tensors import get_best_device
from embodyrl_gpu_check.result import GpuParts, GpuResult

GIB = 2**30
_SECONDS = 1.0
_MIN_RATIO = 0.6
"""Ratio of measured to assumed rate below which a warning is reported."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured peak rates of a device."""

    flops: float
    """FLOP/s of a large matrix product."""
    bandwidth: float
    """Bytes per second, read plus written, of a large copy."""


def synchronize(device: str) -> None:
    """Wait until all work of the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def measure_seconds(call: Callable[[], object], device: str, seconds: float) -> float:
    """Return the median duration of a call in seconds, after one warm-up call."""
    call()
    synchronize(device)
    times, started = list[float](), time.perf_counter()
    while not times or time.perf_counter() - started < seconds:
        call_started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - call_started)
    return sorted(times)[len(times) // 2]


def measure_product_rate(device: str, dtype: torch.dtype, side: int, seconds: float) -> float:
    """Measure the FLOP/s of a product of two square matrices."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / measure_seconds(lambda: torch.matmul(a, b, out=out), device, seconds)


def measure_limits(device: str, dtype: torch.dtype, seconds: float) -> Limits:
    """Measure the rates of an 8192 x 8192 matrix product and of a 1 GiB copy; a CPU uses smaller sizes."""
    on_gpu = device.startswith("cuda")
    flops = measure_product_rate(device, dtype, 8192 if on_gpu else 512, seconds)
    source = torch.empty(GIB if on_gpu else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure_seconds(lambda: target.copy_(source), device, seconds)
    return Limits(flops=flops, bandwidth=2 * source.nbytes / copy)


def check_speed() -> GpuResult:
    """Measure the speed of each visible GPU."""
    get_best_device()  # raises torch's reason if it cannot use the GPUs
    parts, lines = GpuParts(), list[str]()
    for number in range(torch.cuda.device_count()):
        lines.append(measure_device(parts, f"cuda:{number}", torch.cuda.get_device_name(number)))
    return parts.result("; ".join(lines))


def measure_device(parts: GpuParts, device: str, name: str) -> str:
    """Measure the speed of one device, and return the rates as text.

    For several devices with the same name, the lowest rates are stored.
    """
    rates, lines = dict[str, float](), [f"{device} ({name})"]
    on_gpu = device.startswith("cuda")
    with parts.part(f"{device} products and copies"):
        limits = measure_limits(device, torch.bfloat16, _SECONDS)
        rates |= {"flops": limits.flops, "bandwidth": limits.bandwidth}
        parts.record(f"{device} bfloat16 TFLOP/s", round(limits.flops / 1e12, 2))
        parts.record(f"{device} copy GB/s", round(limits.bandwidth / 1e9, 1))
        lines.append(f"{limits.flops / 1e12:.0f} TFLOP/s in bfloat16, {limits.bandwidth / 1e9:.0f} GB/s")
    with parts.part(f"{device} float32 product"):
        rates["slow_flops"] = measure_product_rate(device, torch.float32, 4096 if on_gpu else 256, _SECONDS)
        parts.record(f"{device} float32 TFLOP/s", round(rates["slow_flops"] / 1e12, 2))
        lines.append(f"{rates['slow_flops'] / 1e12:.1f} TFLOP/s in float32")
    if on_gpu:
        with parts.part(f"{device} copies from and to the host"):
            lines.append(_host_copies(parts, device))
    with parts.part(f"{device} AdamW from a CPU checkpoint"):
        resume_adam(device)
        lines.append("AdamW resumes from a CPU checkpoint")
    _compare(parts, device, name, rates)
    before = parts.measured.get(name, rates)
    parts.measured[name] = {key: min(value, before.get(key, value)) for key, value in rates.items()}
    return ", ".join(lines)


def _compare(parts: GpuParts, device: str, name: str, rates: dict[str, float]) -> None:
    assumed = find_known_speed(name)
    for key in ("flops", "slow_flops", "bandwidth") if assumed else ():
        if key in rates and rates[key] < _MIN_RATIO * getattr(assumed, key):
            share = rates[key] / getattr(assumed, key)
            parts.warnings.append(f"{device}: {key} is {share:.0%} of the expected rate (busy or throttled)")


def _host_copies(parts: GpuParts, device: str) -> str:
    target = torch.empty(GIB // 2, dtype=torch.uint8, device=device)
    rates = {}
    for kind, pinned in (("pinned", True), ("pageable", False)):
        source = torch.empty(GIB // 2, dtype=torch.uint8, pin_memory=pinned)
        source.zero_()  # touches the pages
        up = measure_seconds(lambda s=source: target.copy_(s, non_blocking=True), device, _SECONDS / 2)
        down = measure_seconds(lambda s=source: s.copy_(target, non_blocking=True), device, _SECONDS / 2)
        rates[kind] = [round(target.nbytes / one / 1e9, 1) for one in (up, down)]
        parts.record(f"{device} {kind} host memory GB/s, to and from the device", rates[kind])
    return f"{rates['pinned'][0]:.0f} GB/s from pinned and {rates['pageable'][0]:.0f} from pageable memory"


def resume_adam(device: str) -> None:
    """Resume AdamW on a device from a state saved on the CPU, and compare the next step with a step on the CPU.

    Raises:
        AssertionError: a state tensor is on another device, or the weights differ.
    """
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64)
    gradients = [torch.randn(64, 64), torch.randn(64)]

    def step(target: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter, gradient in zip(target.parameters(), gradients, strict=True):
            parameter.grad = gradient.to(parameter.device)
        optimizer.step()

    optimizer = build_adam([{"params": [*module.parameters()]}], lr=1e-2)
    step(module, optimizer)
    other = deepcopy(module).to(device)
    resumed = build_adam([{"params": [*other.parameters()]}], lr=1e-2)
    load_optimizer(resumed, deepcopy(optimizer.state_dict()))
    step(module, optimizer)
    step(other, resumed)
    devices = {str(x.device) for state in resumed.state.values() for x in state.values()}
    assert devices == {str(torch.empty(0, device=device).device)}, f"states of AdamW on {devices}"
    for cpu_weight, device_weight in zip(module.parameters(), other.parameters(), strict=True):
        difference = float((cpu_weight.detach() - device_weight.detach().cpu()).abs().max())
        assert difference < 1e-6, f"weights differ by {difference}"
