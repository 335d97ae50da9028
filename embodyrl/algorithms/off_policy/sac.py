"""Soft actor-critic with a learned temperature (Haarnoja et al., arXiv 1812.05905): pure functions of tensors."""

from torch import Tensor


def soft_target(reward: Tensor, discount: Tensor, next_value: Tensor, next_logprob: Tensor, alpha: Tensor) -> Tensor:
    """Return the targets [B]: r + d (min Q'(s', a') - alpha log pi(a'|s')), equation 3.

    Args:
        reward: [B] sum of n discounted rewards.
        discount: [B] gamma^n, 0 after the end of an episode.
        next_value: [n, B] Q values of the target critics, of which the minimum is used.
        next_logprob: [B] log-probability of the next action.
        alpha: weight of the entropy.
    """
    return reward + discount * (next_value.amin(0) - alpha * next_logprob)


def critic_loss(value: Tensor, target: Tensor) -> Tensor:
    """Return half the squared error of Q values [n, B], summed over n critics and averaged over B samples (eq. 5)."""
    return 0.5 * (value - target).square().mean(1).sum()


def actor_loss(value: Tensor, logprob: Tensor, alpha: Tensor) -> Tensor:
    """Return the mean of alpha log pi(a|s) - Q(s, a) for values [n, B] and log-probabilities [B]; equation 9.

    Q is the minimum of two critics, or the mean of more than two critics (REDQ, arXiv 2101.05982, algorithm 1, as in
    RLPD). The minimum of ten critics would penalize rare actions.
    """
    estimate = value.amin(0) if len(value) == 2 else value.mean(0)
    return (alpha * logprob - estimate).mean()


def temperature_loss(log_alpha: Tensor, logprob: Tensor, target_entropy: float) -> Tensor:
    """Return the loss that increases alpha while the entropy -log pi [B] is below its target (equation 18)."""
    return -(log_alpha * (logprob.detach() + target_entropy)).mean()
