"""GPU-only code paths on the CPU: the same functions and gradients as the default paths."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from embodyrl.policies.openvla_oft.llama import _rotate, _Rotation, apply_adapted_linears, build_rope_tables


class Pair(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5, bias=bias), nn.Linear(6, 7, bias=bias)


def gradients(outs, x, module, onto) -> list[torch.Tensor]:
    sum((out * torch.linspace(1, 2, out.numel()).view_as(out)).sum() for out in outs).backward()
    kept = [x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]
    kept += [] if onto is None else [onto.grad]
    for tensor in (x, *module.parameters(), *([] if onto is None else [onto])):
        tensor.grad = None
    return kept


@pytest.mark.parametrize("alpha", [2, 5])
@pytest.mark.parametrize("names", [["one"], ["one", "two"]])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_adapted_layers_match_separate_layers(names, bias, alpha):
    torch.manual_seed(0)
    module = Pair(bias=bias)
    config = LoraConfig(r=2, lora_alpha=alpha, target_modules=["one", "two"], init_lora_weights=False)
    inject_adapter_in_model(config, module)
    layers = [getattr(module, name) for name in names]
    x = torch.randn(3, 4, 6, requires_grad=True)
    onto = torch.randn(3, 4, 5, requires_grad=True) if len(names) == 1 else None
    want = [layer(x) for layer in layers]
    want = want if onto is None else [onto + want[0]]
    got = apply_adapted_linears(layers, x, onto)
    of_want, of_got = gradients(want, x, module, onto), gradients(got, x, module, onto)
    for a, b in zip([*want, *of_want], [*got, *of_got], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_in_place_rotation_matches_the_formula():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in build_rope_tables(torch.arange(5)[None], 8, 10_000.0))
    weight = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    got, want = _Rotation.apply(x, cos, sin), _rotate(x, (cos, sin))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    (of_got,), (of_want,) = torch.autograd.grad((got * weight).sum(), x), torch.autograd.grad((want * weight).sum(), x)
    torch.testing.assert_close(of_got, of_want, rtol=0, atol=1e-12)
