"""The fake GPU: replaced operations have the dtypes of torch's own dispatch."""

from __future__ import annotations

import copy

import fakegpu
import pytest
import torch
from fakegpu import FakeGpu
from torch.nn import functional

from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import Optimization, load_optimizer
from embodyrl.policies.openvla_oft.llama import RmsNorm
from embodyrl.policies.openvla_oft.vision import LayerNorm

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AUTOCAST = (None, torch.bfloat16, torch.float16)
NORMED = (TYPES[0], TYPES[1])


def _outcome(function, autocast: torch.dtype | None) -> tuple:
    try:
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            out = function()
    except (RuntimeError, AssertionError):
        return ("refused",)
    return out.dtype, tuple(out.shape), out.device


@pytest.mark.parametrize("autocast", AUTOCAST)
@pytest.mark.parametrize("dtype", TYPES)
def test_norm_dtypes_match_torch(dtype, autocast):
    for weight in (dtype, torch.float32):
        with FakeGpu():
            x, w = torch.empty(2, 8, device="cuda:1", dtype=dtype), torch.empty(8, device="cuda:1", dtype=weight)
            ours = _outcome(lambda x=x, w=w: functional.rms_norm(x, (8,), w, 1e-5), autocast)
            real = _outcome(lambda x=x, w=w: fakegpu._real_rms_norm(x, (8,), w, 1e-5), autocast)
        if weight == dtype or autocast:  # of two types torch's kernel and its parts disagree
            assert ours == real, (dtype, weight, autocast)


@pytest.mark.parametrize("autocast", AUTOCAST)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", TYPES[:3])
def test_attention_dtypes_match_torch(dtype, mask, autocast):
    for key in (dtype, torch.float32):
        with FakeGpu():
            q, k = (torch.empty(2, 4, 16, 64, device="cuda:1", dtype=one) for one in (dtype, key))
            m = None if mask is None else torch.zeros(2, 1, 16, 16, device="cuda:1", dtype=mask)
            call = {"attn_mask": m}
            ours = _outcome(lambda: functional.scaled_dot_product_attention(q, k, k, **call), autocast)  # noqa: B023
            real = _outcome(lambda: fakegpu._real_attention(q, k, k, **call), autocast)  # noqa: B023
        assert ours == real, (dtype, key, mask, autocast)


def test_copied_tensors_match_torch():
    with FakeGpu():
        for dtype in (torch.float32, torch.int64, torch.bool):
            host = torch.empty(3, dtype=dtype)
            assert str(host.numpy().dtype) == str(dtype).removeprefix("torch.")
            assert (host.pin_memory().dtype, host.pin_memory().device.type) == (dtype, "cpu")
        for bad in (torch.empty(1, device="cuda"), torch.empty(1, dtype=torch.bfloat16)):
            with pytest.raises(TypeError):
                bad.numpy()
        with pytest.raises(RuntimeError, match="requires grad"):
            torch.empty(1, requires_grad=True).numpy()
        assert torch.tensor([1.5], device="cuda:1").device == torch.device("cuda:1")
        assert torch.tensor([1.5], dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", NORMED)
def test_policy_norms_keep_their_dtype_under_autocast(dtype):
    """Autocast would create float32 copies of a norm's input, which the kernel does not need."""
    with FakeGpu() as gpu, torch.autocast("cuda", dtype=torch.bfloat16):
        for norm in (RmsNorm(8, 1e-5), LayerNorm(8)):
            x = torch.empty(2, 8, device="cuda", dtype=dtype)
            norm = norm.to("cuda", dtype)
            gpu.reset()
            assert norm(x).dtype == dtype
            assert gpu.kernels == 1


def test_lists_of_tensors_on_several_devices_are_rejected():
    with FakeGpu():
        here, there = torch.empty(2, device="cuda:0"), torch.empty(2, device="cuda:1")
        host, scalar = torch.empty(2), torch.empty(())
        for other in (there, host):
            with pytest.raises(RuntimeError, match=r"same device, found .* in lists of _foreach_mul_"):
                torch._foreach_mul_([here, here], [here, other])
        torch._foreach_mul_([here, there], [here, there])
        torch._foreach_mul_([here, here], [scalar, scalar])
        many = [[here] for _ in range(5)]
        settings = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
        for steps in (scalar, torch.empty((), device="cuda:1")):
            with pytest.raises(RuntimeError, match="in lists of _fused_adamw_"):
                torch._fused_adamw_(*many[:4], [], [steps], amsgrad=False, maximize=False, **settings)


def test_cpu_run_resumes_on_a_gpu():
    """The step count is on the CPU in the checkpoint; the fused optimizer needs it on the device of the weights."""
    begun = torch.nn.Linear(3, 1)
    first = torch.optim.AdamW(begun.parameters())
    for p in begun.parameters():
        p.grad = torch.ones_like(p)
    first.step()
    state = copy.deepcopy(first.state_dict())
    with FakeGpu(scalar=1.0):
        module = torch.nn.Linear(3, 1, device="cuda:1")
        second = Optimization(module, OptimSettings(lr=0.5), 10)
        load_optimizer(second.optimizer, state)
        (group,) = second.optimizer.param_groups
        assert (group["lr"], group["fused"]) == (0.5, True)
        for values in second.optimizer.state.values():
            assert {name: str(value.device) for name, value in values.items()} == dict.fromkeys(values, "cuda:1")
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        second.step(0.1)
