"""Hyperbolic tangent of the actor-critic networks: values and gradients of small and large tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodyrl.policies.actor_critic.tanh import Tanh


def spread(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return [rows, 64] values from -12 to 12, with infinities, zeros and a NaN."""
    x = torch.linspace(-12, 12, rows * 64, dtype=dtype)[torch.randperm(rows * 64)].view(rows, 64)
    x[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=dtype)
    return x


@pytest.mark.parametrize(
    ("rows", "dtype"), [(8, torch.float32), (512, torch.float32), (4096, torch.float32), (512, torch.float64)]
)
def test_values_and_gradients_match_torch(rows, dtype):
    x, slope = spread(rows, dtype), torch.randn(rows, 64, dtype=dtype)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, target = Tanh()(found), torch.tanh(expected)
    y.backward(slope)
    target.backward(slope)
    tight = 2**-22 if rows * 64 >= 2**15 and dtype == torch.float32 else 0.0
    np.testing.assert_allclose(y.detach(), target.detach(), rtol=tight, atol=0)
    # The slope 1 - tanh^2 of saturated units is a difference of nearly equal numbers.
    np.testing.assert_allclose(found.grad, expected.grad, rtol=0, atol=4 * tight)


def test_large_values_do_not_depend_on_the_rest_of_the_batch():
    x = spread(4096)
    whole = Tanh()(x)
    for start in (0, 1, 777):
        torch.testing.assert_close(
            Tanh()(x[start : start + 513]), whole[start : start + 513], rtol=0, atol=0, equal_nan=True
        )


def test_gradient_of_large_tensors_matches_differences():
    x = torch.randn(512, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Tanh()(x).sum(), x)
    with torch.no_grad():
        wide = x.double()
        difference = (torch.tanh(wide + 1e-5) - torch.tanh(wide - 1e-5)) / 2e-5
    torch.testing.assert_close(gradient.double(), difference, rtol=1e-4, atol=1e-6)
