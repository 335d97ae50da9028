"""Advantages as pure numpy functions, computed in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def grpo(reward: npt.ArrayLike, group: npt.ArrayLike, *, normalize: bool = True, eps: float = 1e-6) -> Float64:
    """Group-relative advantage (R - mean_g) / (std_g + eps), std with ddof 1 (arXiv 2402.03300).

    A group whose rewards are all equal gets exactly 0; a group of one has no baseline: mean 0, std 1.

    Args:
        reward: [E] outcome reward of each episode.
        group: [E] group id of each episode.
        normalize: divide by the group's standard deviation; False is Dr.GRPO (arXiv 2503.20783).
        eps: added to the standard deviation.

    Returns:
        [E] advantages.
    """
    reward = np.asarray(reward, dtype=np.float64)
    group = np.asarray(group)
    assert reward.shape == group.shape
    out = np.zeros_like(reward)
    for name in np.unique(group):
        member = group == name
        values = reward[member]
        if len(values) == 1:
            out[member] = values / (1.0 + eps) if normalize else values
        elif np.ptp(values) > 0:  # rounding of the mean must not turn equal rewards into a tiny signal
            scale = values.std(ddof=1) + eps if normalize else 1.0
            out[member] = (values - values.mean()) / scale
    return out


def gae(
    reward: npt.ArrayLike,
    value: npt.ArrayLike,
    bootstrap: float,
    valid: npt.ArrayLike,
    *,
    gamma: float,
    lam: float,
) -> tuple[Float64, Float64]:
    """Generalised advantage estimation of one episode (arXiv 1506.02438); entries that are not valid are skipped.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V.

    Args:
        reward: [T] reward of each credited step.
        value: [T] value estimate before each step.
        bootstrap: value after the last valid step: 0 where the episode terminated, the estimate for its final
            observation where it was truncated or cut.
        valid: [T] bool, the step was executed.
        gamma: discount per credited step.
        lam: GAE lambda.

    Returns:
        advantages [T] and returns [T]; 0 where not valid.
    """
    reward, value = np.asarray(reward, dtype=np.float64), np.asarray(value, dtype=np.float64)
    steps = np.flatnonzero(np.asarray(valid, dtype=bool))
    advantage, returns = np.zeros_like(reward), np.zeros_like(reward)
    following, running = float(bootstrap), 0.0
    for t in steps[::-1]:
        delta = reward[t] + gamma * following - value[t]
        running = delta + gamma * lam * running
        advantage[t], returns[t] = running, running + value[t]
        following = value[t]
    return advantage, returns


def whiten(values: npt.ArrayLike, *, eps: float = 1e-8) -> Float64:
    """Shift and scale to mean 0 and variance 1: (x - mean) / sqrt(var + eps), var with ddof 1.

    Fewer than two values have no variance and become 0.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size < 2 or np.ptp(values) == 0:
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + eps)
