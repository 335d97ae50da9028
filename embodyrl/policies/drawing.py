"""Distributions that policies draw from with given uniform numbers; deterministic on GPUs where that is asked for."""

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


def categorical_scores(scaled: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nat), both [...], of chosen categories [...].

    Args:
        scaled: [..., n] logits divided by the temperature.
        choice: [...] int64.
    """
    log_probs = scaled.log_softmax(-1)
    return log_probs.gather(-1, choice[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def standard_normal(noise: Tensor) -> Tensor:
    """Draw from the standard normal distribution by its inverse CDF, float32.

    Args:
        noise: [...] uniform in [0, 1); the ends of the interval would become infinite and are moved by 1e-6.
    """
    return torch.special.ndtri(noise.double().clamp(1e-6, 1 - 1e-6)).float()
