"""A fake GPU: torch's fake tensors (shapes, dtypes, devices; no data) with device="cuda" on a CPU build.

A pytest plugin for a separate process: it must be loaded before torch (see `test_fakegpu.py`). `with FakeGpu() as
gpu:` runs code with device="cuda:N"; it raises errors for mixed devices and dtypes, and for operations without a
deterministic form if requested, as CUDA does. It measures live bytes, kernels, FLOPs, bytes moved, copies and waits. It
cannot show values, kernel choice, races, NCCL or fragmentation; operations on DTensors count on their local tensors.
"""

# ruff: noqa: E402
from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import sys
import weakref
from typing import Any

assert "torch" not in sys.modules, "the device guard must be loaded before torch"
assert ctypes.CDLL(os.environ["FAKE_CUDA_GUARD"]).fake_cuda_guard()

import fakestreams
import numpy as np
import torch
from fakerules import place, refuse_mixed, refuse_unordered
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

GIB = 2**30
DEVICES, MEMORY = 8, 80 * 10**9
PEAK = {torch.bfloat16: 650e12, torch.float16: 650e12}
"""Assumed FLOP/s of one device; other dtypes: SLOW_PEAK."""
SLOW_PEAK, BANDWIDTH, LAUNCH = 50e12, 2.8e12, 2.5e-6
COPIES = ("_to_copy", "copy_")
MAKERS = ("empty", "empty_like", "empty_strided", "new_empty")
WAITS = ("nonzero", "_unique2", "masked_select")
"""Operations whose result shape depends on values."""
_ON: list[FakeGpu] = fakestreams.ON
_PINNED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Storages of host memory that a GPU reads directly."""


class FakeGpu(TorchDispatchMode):
    """Eight devices; one of them is measured as if it ran everything."""

    def __init__(self, *, scalar: float = 1.0) -> None:
        """`scalar` is the value of every number that is copied to the host."""
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.scalar = scalar
        self.live = self.peak = self.pool = 0
        self.recording = False
        """True during graph capture, in which no wait is allowed."""
        self.imagined = False
        """True while shapes of whole DTensors are computed on tensors that no device stores."""
        self.sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self.reset()

    def reset(self) -> FakeGpu:
        """Start a new measurement; live tensors stay."""
        self.kernels = self.flops = self.moved = self.syncs = self.h2d = 0
        self.seconds = 0.0
        self.by_op: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0, 0, 0])
        self.by_place: collections.Counter[tuple[str, str, torch.dtype]] = collections.Counter()
        """Kernels by source line, operation and dtype of the first floating-point input."""
        self.attention: collections.Counter[str] = collections.Counter()
        self.sync_places: collections.Counter[str] = collections.Counter()
        self.peak = self.live
        return self

    def __enter__(self) -> FakeGpu:
        _ON.append(self)
        torch.tensor, torch.Tensor.numpy = _tensor, _numpy
        torch.nn.functional.scaled_dot_product_attention = _attention
        torch.nn.functional.rms_norm = _rms_norm
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)
        torch.tensor, torch.Tensor.numpy = _real_tensor, _real_numpy
        torch.nn.functional.scaled_dot_product_attention = _real_attention
        torch.nn.functional.rms_norm = _real_rms_norm
        _ON.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.imagined:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        ins = _tensors((args, kwargs))
        if name == "_local_scalar_dense":
            return self._item(ins[0])
        if any(is_traceable_wrapper_subclass(t) for t in ins):
            return NotImplemented  # what it does with its local tensors comes here again
        if name.startswith("prim::"):
            return func(*args, **kwargs)
        refuse_unordered(name, ins, kwargs)
        refuse_mixed(name, [*args, *kwargs.values()])
        if name in COPIES:
            args = tree_map_only(Tensor, self._without_constant, args)
        out = func(*args, **kwargs)
        outs = _tensors(out)
        if any(t.device.type == "cuda" for t in (*ins, *outs)) and not any(map(is_traceable_wrapper_subclass, outs)):
            self._count(func, name, ins, outs, (args, kwargs, out))
        return out

    def _without_constant(self, tensor: Tensor) -> Tensor:
        """Remove scalar constants, for which torch would run the copy to the device."""
        fake = tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)
        fake.constant = None
        return fake

    def _item(self, source: Tensor) -> float | bool:
        if source.device.type == "cuda":
            self._wait("item")
        if source.dtype == torch.bool:
            return bool(self.scalar)
        return self.scalar if source.dtype.is_floating_point else int(self.scalar)

    def _wait(self, what: str) -> None:
        if self.recording:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} {place()}")
        self.syncs += 1
        self.sync_places[f"{what} {place()}"] += 1

    def _count(self, func: Any, name: str, ins: list[Tensor], outs: list[Tensor], call: tuple[Any, Any, Any]) -> None:
        known = {t.untyped_storage()._cdata for t in ins}
        for t in outs:
            storage = t.untyped_storage()
            if t.device.type == "cuda" and storage not in self.sizes:
                self.know(storage, storage.nbytes())
        if not func._schema.is_mutable and outs and all(t.untyped_storage()._cdata in known for t in outs):
            return  # a view
        if name in COPIES and len({t.device.type for t in (*ins, *outs)}) == 2:
            if outs[0].device.type == "cpu":
                self._wait("copy to host")
            else:
                self.h2d += 1
                named = dict(zip((a.name for a in func._schema.arguments), call[0], strict=False)) | call[1]
                if not named.get("non_blocking") or ins[-1].untyped_storage() not in _PINNED:
                    self._wait("copy from memory that is not pinned")
        if name in WAITS:
            self._wait(name)
        if name in MAKERS:
            return
        args, kwargs, out = call
        counter = flop_registry.get(torch.ops.aten.addmm if name == "addmm_" else func._overloadpacket)
        flops = 0 if counter is None else counter(*args, **kwargs, out_val=out)
        moved = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in (*ins, *outs))
        dtype = next((t.dtype for t in ins if t.dtype.is_floating_point), torch.float32)
        took = max(flops / PEAK.get(dtype, SLOW_PEAK), moved / BANDWIDTH, LAUNCH)
        self.kernels, self.flops, self.moved = self.kernels + 1, self.flops + flops, self.moved + moved
        self.seconds += took
        self.by_place[place(), name, dtype] += 1
        entry = self.by_op[f"{name} {str(dtype)[6:]}" if flops else name]
        entry[:] = (a + b for a, b in zip(entry, (1, took, flops, moved), strict=True))

    def know(self, storage: Any, nbytes: int) -> None:
        """Register the size of a storage."""
        size = -(-nbytes // 512) * 512
        if storage not in self.sizes:
            box = self.sizes[storage] = [0]
            weakref.finalize(storage, self._forget, box)
        box = self.sizes[storage]
        self.live += size - box[0]
        box[0] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, box: list[int]) -> None:
        self.live -= box[0]

    def report(self, title: str, top: int = 12) -> str:
        """Return the measurements since `reset` as text."""
        lines = [
            f"{title}: peak {self.peak / GIB:.1f} GiB, live {self.live / GIB:.1f} GiB, {self.kernels} kernels, "
            f"{self.flops / 1e12:.1f} TFLOP, {self.moved / 1e9:.0f} GB moved, roofline {self.seconds * 1e3:.0f} ms, "
            f"{self.syncs} synchronisations, {self.h2d} copies to the device, {dict(self.attention)}"
        ]
        for name, (count, took, flops, moved) in sorted(self.by_op.items(), key=lambda x: -x[1][1])[:top]:
            lines.append(f"  {name:<46} x{count:<6} {took * 1e3:8.1f} ms {flops / 1e12:8.2f} TF {moved / 1e9:8.1f} GB")
        return "\n".join([*lines, f"  waits: {dict(self.sync_places.most_common(8))}"])


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, Tensor)]


# --- what torch does differently where there is a device, or where tensors have no data ---

_real_tensor, _real_numpy = torch.tensor, torch.Tensor.numpy
_real_attention = torch.nn.functional.scaled_dot_product_attention
_real_rms_norm = torch.nn.functional.rms_norm
_real_data_ptr = torch.UntypedStorage.data_ptr
_real_apply, _real_resize = torch.nn.Module._apply, torch.UntypedStorage.resize_


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
    made = data.detach().clone() if isinstance(data, FakeTensor) else _real_tensor(data, dtype=dtype, **more)
    if isinstance(made, FakeTensor):
        made.constant = None  # else the copy would be carried out on a real device
    return made if device is None else made.to(device)


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    assert self.device.type == "cpu", "cannot pin what is on a device"
    pinned = self.clone()
    _PINNED.add(pinned.untyped_storage())
    return pinned


def _numpy(self: Tensor, *args: Any, **more: Any) -> np.ndarray:
    if not isinstance(self, FakeTensor):
        return _real_numpy(self, *args, **more)
    if self.device.type != "cpu":
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")
    if self.requires_grad:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    if self.dtype == torch.bfloat16:
        raise TypeError("Got unsupported ScalarType BFloat16")
    return np.zeros(tuple(self.shape), dtype=str(self.dtype).removeprefix("torch."))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention without a mask, memory-efficient attention with a mask."""
    if not (isinstance(q, FakeTensor) and q.device.type == "cuda"):
        return _real_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):  # as the real one, which autocast brings to the lower precision
        lower = torch.get_autocast_dtype("cuda")
        q, k, v, attn_mask = (
            t if t is None or t.dtype in (torch.bool, torch.float64) else t.to(lower) for t in (q, k, v, attn_mask)
        )
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert attn_mask is None or attn_mask.dtype in (torch.bool, torch.float32, q.dtype), attn_mask.dtype
    if enable_gqa:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    aten = torch.ops.aten
    if attn_mask is None and q.dtype in PEAK:
        _ON[-1].attention["flash"] += 1
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]
    _ON[-1].attention["efficient"] += 1
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        if rest := attn_mask.shape[-1] % 16:
            attn_mask = torch.nn.functional.pad(attn_mask, (0, 16 - rest))[..., : attn_mask.shape[-1]]
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, grad, 0.0, is_causal, scale=scale)[0]


_library = torch.library.Library("fakegpu", "DEF")
_library.define("rms_norm(Tensor x, Tensor w) -> Tensor")
_library.define("rms_norm_backward(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)")
torch.library.register_fake("fakegpu::rms_norm", lambda x, w: torch.empty_like(x), lib=_library)
torch.library.register_fake(
    "fakegpu::rms_norm_backward", lambda g, x, w: (torch.empty_like(x), torch.empty_like(w)), lib=_library
)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.ops.fakegpu.rms_norm(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.ops.fakegpu.rms_norm_backward(grads[0], *ctx.saved_tensors)


def _rms_norm(input: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel on CUDA; torch decomposes it for tensor subclasses."""
    if isinstance(input, FakeTensor) and input.device.type == "cuda" and weight is not None:
        if torch.is_autocast_enabled("cuda"):  # which has this function in its list for float32
            input, weight = (t.float() if t.dtype != torch.float64 else t for t in (input, weight))
        return _FusedRmsNorm.apply(input, weight)
    return _real_rms_norm(input, shape, weight, eps)


def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` that creates new parameters, because fake ones cannot be changed in place."""
    if not _ON:
        return _real_apply(self, fn, recurse)
    # Shared ones stay shared; the old ones are kept for as long, so that no other gets their number.
    known: dict[int, tuple[Tensor, torch.nn.Parameter]] = vars(fn).setdefault("known", {})
    for child in self.children():
        child._apply(fn)
    with torch.no_grad():
        for name, parameter in self._parameters.items():
            if parameter is not None:
                if id(parameter) not in known:
                    moved = torch.nn.Parameter(fn(parameter.detach()), requires_grad=parameter.requires_grad)
                    known[id(parameter)] = parameter, moved
                self._parameters[name] = known[id(parameter)][1]
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
    return self


def _resize(self: Any, size: int) -> Any:
    out = _real_resize(self, size)
    if _ON and self in _ON[-1].sizes:
        _ON[-1].know(self, size)
    return out


class _Imagined:
    """Context for torch's shape tests of DTensors, which are not measured."""

    def __enter__(self) -> None:
        for gpu in _ON:
            gpu.imagined = True

    def __exit__(self, *error: Any) -> None:
        for gpu in _ON:
            gpu.imagined = False


def _data_ptr(self: Any) -> int:
    return self._cdata if _ON else _real_data_ptr(self)


def _pretend() -> None:
    """Install these replacements and report that devices exist."""
    stream, state = fakestreams.Stream(), _real_tensor([0] * 16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": DEVICES,
        "is_initialized": True,
        "is_bf16_supported": True,
        "current_device": 0,
        "get_device_name": "a GPU that is not there",
        "mem_get_info": (MEMORY, MEMORY),
        "current_stream": stream,
        "default_stream": stream,
        "graph_pool_handle": (0, 1),
        "get_rng_state": state,
        "get_rng_state_all": [],
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "set_rng_state", "_lazy_init")),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **more: _answer)
    torch.cuda.Stream, torch.cuda.Event = fakestreams.Stream, fakestreams.Event  # type: ignore[misc, assignment]
    torch.cuda.CUDAGraph, torch.cuda.graph = fakestreams.Graph, fakestreams.record  # type: ignore[misc, assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    fake_tensor.init_gpu_context = lambda device: None
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None
    ShardingPropagator._fake_mode_lock = _Imagined()  # type: ignore[assignment]
    torch.UntypedStorage.data_ptr = _data_ptr
    torch.nn.Module._apply, torch.UntypedStorage.resize_ = _apply, _resize


_pretend()
import fakefiles  # noqa: F401
