"""GPU check of OpenVLA-OFT with two layers of the 7B model: rollouts, log-probabilities, CUDA graphs and training."""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import rms_norm

from embodyrl.config.shared import Precision
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.llama import RmsNorm
from embodyrl.policies.openvla_oft.settings import OftSettings
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.settings import LoraSettings
from embodyrl.policies.tensors import get_best_device
from embodyrl.types import PolicyCosts, PolicyOutput
from embodyrl_gpu_check.result import GpuParts, GpuResult
from embodyrl_gpu_check.synthetic import ENV, observe, write_checkpoint

_GIB = 2**30
_LAYERS, _BATCH = 2, 8
_TOLERANCE = 0.05
"""Tolerance for log-probabilities, above the rounding error of bfloat16."""
_PEAK_TOLERANCE = 0.15
"""Relative difference between measured and planned peak memory above which a warning is reported."""


def check_policy() -> GpuResult:
    """Check the policy on the first visible GPU."""
    return measure_policy(GpuParts(), get_best_device(), "7b")


def measure_policy(parts: GpuParts, device: str, size: str) -> GpuResult:
    """Build the policy with and without CUDA graphs; measure rollouts, log-probabilities and training."""
    lines: list[str] = []
    with parts.part("norms"):
        lines.append(_check_norms(parts, device))
    has_peft = find_spec("peft") is not None
    reference: PolicyOutput | None = None
    for adapters in (True, False) if has_peft else (False,):
        name = "adapters" if adapters else "all weights"
        with _build_policy(parts, device, size, is_lora=adapters) as policy:
            if adapters == has_peft:
                with parts.part("acting and scoring"):
                    reference, text = _check_acting(parts, policy, device, "plain")
                    lines.append(text)
            with parts.part(f"training of {name}"):
                lines.append(_check_training(parts, policy, device, name, _estimate_costs(size, is_lora=adapters)))
    with _build_policy(parts, device, size, is_lora=has_peft, cuda_graphs=True) as policy, parts.part("CUDA graphs"):
        lines.append(_check_graphs(parts, policy, device, reference))
    return parts.result("; ".join(lines))


def _build_settings(folder: Path, *, is_lora: bool, cuda_graphs: bool = False) -> OftSettings:
    return OftSettings(
        model_type="openvla_oft",
        path=str(folder),
        precision=Precision.bf16,
        num_images_in_input=1,
        use_proprio=False,
        is_lora=is_lora,
        lora=LoraSettings(r=32, lora_alpha=32),
        cuda_graphs=cuda_graphs,
    )


@contextmanager
def _build_policy(
    parts: GpuParts, device: str, size: str, *, is_lora: bool, cuda_graphs: bool = False
) -> Iterator[list[Policy]]:
    """Yield a list with the policy, and free its memory at the end. The list is empty if construction fails."""
    holder: list[Policy] = []
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), size, _LAYERS)
        request = PolicyRequest(env=ENV, device=device, seed=0)
        started = time.perf_counter()
        with parts.part("building the policy"):
            holder.append(FACTORY.build(_build_settings(Path(name), is_lora=is_lora, cuda_graphs=cuda_graphs), request))
            parts.record("seconds to build", round(time.perf_counter() - started, 2))
        yield holder
    holder.clear()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _estimate_costs(size: str, *, is_lora: bool) -> PolicyCosts:
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), size, _LAYERS)
        return FACTORY.costs(_build_settings(Path(name), is_lora=is_lora), ENV, 0)


def _check_norms(parts: GpuParts, device: str) -> str:
    kind = torch.device(device).type
    norm = RmsNorm(64, 1e-6).to(device, torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    with torch.autocast(kind, dtype=torch.bfloat16), torch.no_grad():
        model_dtype, torch_dtype = norm(x).dtype, rms_norm(x, (64,), norm.weight, 1e-6).dtype
    parts.record("dtype of norms in autocast", f"the model's {model_dtype}, F.rms_norm {torch_dtype}")
    if model_dtype != torch.bfloat16:
        parts.failures.append(f"norms in autocast are {model_dtype} instead of bfloat16")
    return f"norms {model_dtype}"


def _measure_seconds(call: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Return the median time of a call, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times[1:])[repeats // 2]


def _sample_noise(batch: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((batch, 56), dtype=np.float32)


def _check_acting(parts: GpuParts, holder: list[Policy], device: str, name: str) -> tuple[PolicyOutput, str]:
    """Compare log-probabilities from `act` and from `score`, and measure the time of `act`."""
    (policy,) = holder
    obs, noise = observe(_BATCH), _sample_noise(_BATCH, 1)
    output = policy.act(obs, noise=noise)
    with torch.no_grad():
        scored = policy.score(obs, output.tokens).logprob.float().cpu().numpy()
    difference = float(np.abs(scored - output.logprob).max())
    parts.record(f"{name}: gap of log-probabilities", difference)
    if not difference <= _TOLERANCE:
        parts.failures.append(f"{name}: log-probabilities of acting and scoring differ by {difference:.3g}")
    for batch in (1, _BATCH):
        obs, noise = observe(batch), _sample_noise(batch, 1)
        seconds = _measure_seconds(lambda o=obs, n=noise: policy.act(o, noise=n), device)
        parts.record(f"{name}: ms to act, batch {batch}", round(1e3 * seconds, 2))
    return output, f"{name}: acting and scoring differ by {difference:.2g}"


def _check_graphs(parts: GpuParts, holder: list[Policy], device: str, reference: PolicyOutput | None) -> str:
    """Check that CUDA graphs repeat their results and agree with the forward pass without graphs."""
    (policy,) = holder
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, text = _check_acting(parts, holder, device, "recorded")
        again = policy.act(observe(_BATCH), noise=_sample_noise(_BATCH, 1))
        other = policy.act(observe(_BATCH), noise=_sample_noise(_BATCH, 2))
        again_later = policy.act(observe(_BATCH), noise=_sample_noise(_BATCH, 1))
    if failures := [str(warning.message) for warning in caught if "cannot be recorded" in str(warning.message)]:
        parts.failures.append(failures[0])
    if not all(np.array_equal(out.tokens, warning.tokens) for warning in (again, again_later)):
        parts.failures.append("replays of equal inputs differ")
    if np.array_equal(out.tokens, other.tokens):
        parts.failures.append("a replay ignores its inputs")
    if reference is not None:
        same = float((reference.tokens == out.tokens).mean())
        parts.record("tokens equal to those without CUDA graphs", same)
        if same < 0.97:
            parts.failures.append(f"only {same:.0%} of the tokens are those without CUDA graphs")
    return text


def _check_training(parts: GpuParts, holder: list[Policy], device: str, name: str, costs: PolicyCosts) -> str:
    """Take optimizer steps, and compare peak memory with the plan."""
    (policy,) = holder
    planned = planned_bytes(costs, _BATCH)
    on_gpu = device.startswith("cuda")
    if on_gpu and planned > 0.9 * torch.cuda.mem_get_info()[0]:
        parts.record(name, f"not trained: {planned / _GIB:.1f} GiB do not fit")
        return f"{name} not trained (memory)"
    obs = observe(_BATCH)
    tokens = policy.act(obs, noise=_sample_noise(_BATCH, 1)).tokens
    weights = [p for p in policy.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=on_gpu or None)
    advantage = torch.linspace(-1.0, 1.0, _BATCH, device=device)[:, None]
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        optimizer.zero_grad()
        logprob = policy.score(obs, tokens).logprob
        (-(advantage * (logprob - logprob.detach()).exp()).mean()).backward()
        optimizer.step()

    seconds = _measure_seconds(step, device, 3)
    finite = all(bool(torch.isfinite(p).all()) for p in weights)
    if not finite:
        parts.failures.append(f"training of {name} makes weights non-finite")
    parts.record(f"{name}: trained parameters", sum(p.numel() for p in weights))
    parts.record(f"{name}: ms of a step of {_BATCH} samples", round(1e3 * seconds, 1))
    # Forward and backward pass are three forward passes, with frozen weights two.
    num_passes = 3 if costs.num_trained is None else 2
    rate = num_passes * _BATCH * costs.forward_flops / seconds
    parts.record(f"{name}: TFLOP/s of the model", round(rate / 1e12, 2))
    text = f"{name}: {1e3 * seconds:.0f} ms a step, {rate / 1e12:.0f} TFLOP/s"
    if not on_gpu:
        return text
    peak = torch.cuda.max_memory_allocated()
    parts.record(f"{name}: peak and planned GiB", [round(peak / _GIB, 3), round(planned / _GIB, 3)])
    if abs(peak / planned - 1) > _PEAK_TOLERANCE:
        parts.warnings.append(f"{name}: peak of {peak / _GIB:.2f} GiB, planned {planned / _GIB:.2f}")
    return f"{text}, peak {peak / _GIB:.1f} GiB of {planned / _GIB:.1f} planned"


def planned_bytes(costs: PolicyCosts, batch: int) -> int:
    """Return the planned peak memory of an optimizer step with one micro-batch on one GPU.

    Trained weights, their gradients and moments are float32; frozen weights and copies for autocast are bfloat16.
    Activations and copies are freed while gradients are allocated, so the peak is at one end of the backward pass.
    """
    trained = costs.num_parameters if costs.num_trained is None else costs.num_trained
    frozen = 0 if costs.num_trained is None else 2 * costs.num_parameters
    copied = 2 * (costs.num_parameters - costs.outside_layers) if costs.num_trained is None else 0
    activations = batch * costs.activation_bytes + costs.estimate_logprob_bytes(batch)[0]
    return frozen + max(12 * trained + copied + activations, 16 * trained)
