"""Draws from categorical distributions with given uniform numbers; deterministic on GPUs where that is asked for."""

import torch
from torch import Tensor


def cumulative(probability: Tensor) -> Tensor:
    """Running sums of probabilities along the last dimension.

    CUDA adds floats in no fixed order and refuses to in deterministic mode.
    """
    exact = probability.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()
    return integer_sums(probability) if exact else probability.cumsum(-1)


def integer_sums(probability: Tensor) -> Tensor:
    """The same in units of 2^-53: integers give one sum in any order, and what has no probability adds nothing."""
    return ((probability.double() * 2**53).long().cumsum(-1).double() / 2**53).to(probability.dtype)


def sample_inverse_cdf(scaled: Tensor, noise: Tensor) -> Tensor:
    """Draw one category per place: the first whose cumulative probability exceeds the uniform number.

    Args:
        scaled: [..., n] logits divided by the temperature.
        noise: [...] uniform in [0, 1).

    Returns:
        [...] int64. The sum runs in float64: in float32 it loses the rare categories.
    """
    cdf = cumulative(scaled.double().softmax(-1))
    found = torch.searchsorted(cdf, noise.double()[..., None].contiguous(), right=True)[..., 0]
    return found.clamp_(max=scaled.shape[-1] - 1)
