"""Losses of implicit Q-learning (Kostrikov et al., arXiv 2110.06169): pure functions of tensors."""

from torch import Tensor


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return |expectile - 1(u < 0)| u^2 for differences u = target - prediction, equation 5.

    The prediction that minimizes the mean loss is the expectile of the targets.
    """
    weight = (difference < 0).to(difference.dtype).sub(expectile).abs()
    return weight * difference.square()


def critic_loss(value: Tensor, reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Return the squared error between Q [n, B] and r + d V(s') [B], equation 6: sum over critics, mean over samples.

    `discount` is gamma, and 0 after a terminal state.
    """
    return (value - (reward + discount * next_value)).square().mean(1).sum()


def compute_advantage_weights(advantage: Tensor, temperature: float, clip: float) -> Tensor:
    """Return min(exp(temperature A), clip) [B], the weights of equation 7."""
    # The exponent is limited first, because exp of a large advantage is infinite.
    return (temperature * advantage).clamp(max=100.0).exp().clamp(max=clip)
