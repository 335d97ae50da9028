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
from embodyrl.policies.tensors import best_device
from embodyrl.types import PolicyCosts, PolicyOutput
from embodyrl_gpu_check.result import GpuParts, GpuResult
from embodyrl_gpu_check.synthetic import ENV, observe, write_checkpoint

_GIB = 2**30
_LAYERS, _BATCH = 2, 8
_GAP = 0.05
"""Tolerance for log-probabilities, above the rounding error of bfloat16."""
_PEAK = 0.15
"""Relative difference between measured and planned peak memory above which a warning is reported."""


def check_policy() -> GpuResult:
    """Check the policy on the first visible GPU."""
    return measure_policy(GpuParts(), best_device(), "7b")


def measure_policy(parts: GpuParts, device: str, size: str) -> GpuResult:
    """Build the policy with and without CUDA graphs; measure rollouts, log-probabilities and training."""
    said: list[str] = []
    with parts.part("norms"):
        said.append(_norms(parts, device))
    adapted = find_spec("peft") is not None
    plain: PolicyOutput | None = None
    for adapters in (True, False) if adapted else (False,):
        name = "adapters" if adapters else "all weights"
        with _built(parts, device, size, adapted=adapters) as policy:
            if adapters == adapted:
                with parts.part("acting and scoring"):
                    plain, text = _act(parts, policy, device, "plain")
                    said.append(text)
            with parts.part(f"training of {name}"):
                said.append(_train(parts, policy, device, name, _costs(size, adapted=adapters)))
    with _built(parts, device, size, adapted=adapted, recorded=True) as policy, parts.part("CUDA graphs"):
        said.append(_replay(parts, policy, device, plain))
    return parts.result("; ".join(said))


def _settings(folder: Path, *, adapted: bool, recorded: bool = False) -> OftSettings:
    return OftSettings(
        model_type="openvla_oft",
        path=str(folder),
        precision=Precision.bf16,
        num_images_in_input=1,
        use_proprio=False,
        is_lora=adapted,
        lora=LoraSettings(r=32, lora_alpha=32),
        cuda_graphs=recorded,
    )


@contextmanager
def _built(parts: GpuParts, device: str, size: str, *, adapted: bool, recorded: bool = False) -> Iterator[list[Policy]]:
    """Yield a list with the policy, and free its memory at the end. The list is empty if construction fails."""
    holder: list[Policy] = []
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), size, _LAYERS)
        request = PolicyRequest(env=ENV, device=device, seed=0)
        begun = time.perf_counter()
        with parts.part("building the policy"):
            holder.append(FACTORY.build(_settings(Path(name), adapted=adapted, recorded=recorded), request))
            parts.note("seconds to build", round(time.perf_counter() - begun, 2))
        yield holder
    holder.clear()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _costs(size: str, *, adapted: bool) -> PolicyCosts:
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), size, _LAYERS)
        return FACTORY.costs(_settings(Path(name), adapted=adapted), ENV, 0)


def _norms(parts: GpuParts, device: str) -> str:
    kind = torch.device(device).type
    norm = RmsNorm(64, 1e-6).to(device, torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    with torch.autocast(kind, dtype=torch.bfloat16), torch.no_grad():
        ours, theirs = norm(x).dtype, rms_norm(x, (64,), norm.weight, 1e-6).dtype
    parts.note("dtype of norms in autocast", f"the model's {ours}, F.rms_norm {theirs}")
    if ours != torch.bfloat16:
        parts.failures.append(f"norms in autocast are {ours} instead of bfloat16")
    return f"norms {ours}"


def _seconds(call: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Return the median time of a call, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times[1:])[repeats // 2]


def _noise(batch: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((batch, 56), dtype=np.float32)


def _act(parts: GpuParts, holder: list[Policy], device: str, name: str) -> tuple[PolicyOutput, str]:
    """Compare log-probabilities from `act` and from `score`, and measure the time of `act`."""
    (policy,) = holder
    obs, noise = observe(_BATCH), _noise(_BATCH, 1)
    out = policy.act(obs, noise=noise)
    with torch.no_grad():
        scored = policy.score(obs, out.tokens).logprob.float().cpu().numpy()
    gap = float(np.abs(scored - out.logprob).max())
    parts.note(f"{name}: gap of log-probabilities", gap)
    if not gap <= _GAP:
        parts.failures.append(f"{name}: log-probabilities of acting and scoring differ by {gap:.3g}")
    for batch in (1, _BATCH):
        obs, noise = observe(batch), _noise(batch, 1)
        took = _seconds(lambda o=obs, n=noise: policy.act(o, noise=n), device)
        parts.note(f"{name}: ms to act, batch {batch}", round(1e3 * took, 2))
    return out, f"{name}: acting and scoring differ by {gap:.2g}"


def _replay(parts: GpuParts, holder: list[Policy], device: str, plain: PolicyOutput | None) -> str:
    """Check that CUDA graphs repeat their results and agree with the forward pass without graphs."""
    (policy,) = holder
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        out, text = _act(parts, holder, device, "recorded")
        again = policy.act(observe(_BATCH), noise=_noise(_BATCH, 1))
        other = policy.act(observe(_BATCH), noise=_noise(_BATCH, 2))
        back = policy.act(observe(_BATCH), noise=_noise(_BATCH, 1))
    if refused := [str(one.message) for one in raised if "cannot be recorded" in str(one.message)]:
        parts.failures.append(refused[0])
    if not all(np.array_equal(out.tokens, one.tokens) for one in (again, back)):
        parts.failures.append("replays of equal inputs differ")
    if np.array_equal(out.tokens, other.tokens):
        parts.failures.append("a replay ignores its inputs")
    if plain is not None:
        same = float((plain.tokens == out.tokens).mean())
        parts.note("tokens equal to those without CUDA graphs", same)
        if same < 0.97:
            parts.failures.append(f"only {same:.0%} of the tokens are those without CUDA graphs")
    return text


def _train(parts: GpuParts, holder: list[Policy], device: str, name: str, costs: PolicyCosts) -> str:
    """Take optimizer steps, and compare peak memory with the plan."""
    (policy,) = holder
    planned = planned_bytes(costs, _BATCH)
    on_gpu = device.startswith("cuda")
    if on_gpu and planned > 0.9 * torch.cuda.mem_get_info()[0]:
        parts.note(name, f"not trained: {planned / _GIB:.1f} GiB do not fit")
        return f"{name} not trained (memory)"
    obs = observe(_BATCH)
    tokens = policy.act(obs, noise=_noise(_BATCH, 1)).tokens
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

    took = _seconds(step, device, 3)
    finite = all(bool(torch.isfinite(p).all()) for p in weights)
    if not finite:
        parts.failures.append(f"training of {name} makes weights non-finite")
    parts.note(f"{name}: trained parameters", sum(p.numel() for p in weights))
    parts.note(f"{name}: ms of a step of {_BATCH} samples", round(1e3 * took, 1))
    # Forward and backward pass are three forward passes, with frozen weights two.
    passes = 3 if costs.num_trained is None else 2
    rate = passes * _BATCH * costs.forward_flops / took
    parts.note(f"{name}: TFLOP/s of the model", round(rate / 1e12, 2))
    text = f"{name}: {1e3 * took:.0f} ms a step, {rate / 1e12:.0f} TFLOP/s"
    if not on_gpu:
        return text
    peak = torch.cuda.max_memory_allocated()
    parts.note(f"{name}: peak and planned GiB", [round(peak / _GIB, 3), round(planned / _GIB, 3)])
    if abs(peak / planned - 1) > _PEAK:
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
    activations = batch * costs.activation_bytes + costs.scoring(batch)[0]
    return frozen + max(12 * trained + copied + activations, 16 * trained)
