"""Advantages as pure numpy functions, computed in float64.

R [E] outcome reward of each episode, g [E] its group, mean_g and std_g over the group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from embodyrl.types import DoubleArray


def _by_group(
    compute: Callable[..., npt.ArrayLike], group: npt.ArrayLike, reward: npt.ArrayLike, *more: npt.ArrayLike
) -> DoubleArray:
    """Apply `compute` to the rewards (and what more there is, all [E]) of one group after the other.

    One member alone, or equal rewards, get 0.
    """
    group, columns = np.asarray(group), [np.asarray(column, dtype=np.float64) for column in (reward, *more)]
    assert all(column.shape == group.shape for column in columns)
    out = np.zeros(group.shape)
    for name in np.unique(group):
        member = group == name
        if np.ptp(columns[0][member]) > 0:  # rounding of the mean must not turn equal rewards into a tiny signal
            out[member] = compute(*(column[member] for column in columns))
    return out


def grpo(
    reward: npt.ArrayLike, group: npt.ArrayLike, *, normalize: bool = True, unbiased: bool = True, eps: float = 1e-6
) -> DoubleArray:
    """(R - mean_g) / (std_g + eps), arXiv 2402.03300; 0 for a group of one, which has nobody to be compared with.

    Args:
        reward: [E] outcome rewards.
        group: [E] group ids.
        normalize: divide by the group's standard deviation; False is Dr.GRPO (arXiv 2503.20783).
        unbiased: standard deviation with ddof 1, else 0.
        eps: added to the standard deviation.

    Returns:
        [E] advantages.
    """

    def standardised(rewards: DoubleArray) -> DoubleArray:
        scale = rewards.std(ddof=int(unbiased)) + eps if normalize else 1.0
        return (rewards - rewards.mean()) / scale

    return _by_group(standardised, group, reward)


def rloo(reward: npt.ArrayLike, group: npt.ArrayLike) -> DoubleArray:
    """R minus the mean of the group's other members: n / (n - 1) (R - mean_g), arXiv 2402.14740."""

    def leave_one_out(rewards: DoubleArray) -> DoubleArray:
        n = len(rewards)
        return (rewards - rewards.mean()) * n / (n - 1)

    return _by_group(leave_one_out, group, reward)


def opo(reward: npt.ArrayLike, group: npt.ArrayLike, length: npt.ArrayLike) -> DoubleArray:
    """R - sum(len R) / sum(len) over the group: the baseline of least variance, arXiv 2505.23585."""

    def above_baseline(rewards: DoubleArray, lengths: DoubleArray) -> DoubleArray:
        return rewards - np.average(rewards, weights=lengths)

    return _by_group(above_baseline, group, reward, length)


def gpg(reward: npt.ArrayLike, group: npt.ArrayLike) -> DoubleArray:
    """Alpha (R - mean_g), alpha = episodes / episodes with a reward other than 0, arXiv 2504.02546."""
    rewarded = max(1, int(np.count_nonzero(reward)))
    return np.size(reward) / rewarded * grpo(reward, group, normalize=False)


def pass_at_k(reward: npt.ArrayLike, group: npt.ArrayLike, *, normalize: bool = True, eps: float = 1e-6) -> DoubleArray:
    """Only the best of a group is credited, with its lead over the second: R1 - R2, arXiv 2503.19595.

    `normalize` divides by the group's standard deviation (ddof 1) + eps.
    """

    def lead_of_the_best(rewards: DoubleArray) -> DoubleArray:
        second, best = np.sort(rewards)[-2:]
        out = np.zeros_like(rewards)
        out[rewards.argmax()] = (best - second) / (rewards.std(ddof=1) + eps if normalize else 1.0)
        return out

    return _by_group(lead_of_the_best, group, reward)


def gdpo(parts: npt.ArrayLike, group: npt.ArrayLike, weight: Sequence[float]) -> DoubleArray:
    """Sum_k w_k grpo(R_k), whitened over the batch: no part of the reward drowns another one (arXiv 2601.05242).

    Args:
        parts: [E, C] outcome of each part of the reward.
        group: [E] group ids.
        weight: [C]
    """
    columns = zip(np.asarray(parts, dtype=np.float64).T, weight, strict=True)
    return whiten(sum(w * grpo(part, group) for part, w in columns))


def step_groups(states: Sequence[npt.NDArray[np.int64]], groups: Sequence[int]) -> npt.NDArray[np.int64]:
    """Number the chunk steps of all episodes so that equal states within one group share a number (GiGPO).

    Args:
        states: [T_i] state hash of each chunk step of each episode.
        groups: group id of each episode.

    Returns:
        [sum T_i] ids, episode by episode.
    """
    numbers: dict[tuple[Hashable, int], int] = {}
    keys = [(group, int(state)) for group, own in zip(groups, states, strict=True) for state in own]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def discounted(reward: npt.ArrayLike, valid: npt.ArrayLike, *, gamma: float) -> DoubleArray:
    """Return-to-go sum over s >= t of gamma^(s-t) r_s of one episode [T]; steps that are not valid are skipped."""
    reward = np.asarray(reward, dtype=np.float64)
    return gae(reward, np.zeros_like(reward), 0.0, valid, gamma=gamma, lam=1.0)[0]


def gae(
    reward: npt.ArrayLike,
    value: npt.ArrayLike,
    bootstrap: npt.ArrayLike,
    valid: npt.ArrayLike,
    *,
    gamma: float,
    lam: float,
    ends: npt.ArrayLike | None = None,
) -> tuple[DoubleArray, DoubleArray]:
    """Generalised advantage estimation of episodes (arXiv 1506.02438); entries that are not valid are skipped.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V.

    Args:
        reward: [T] reward of each credited step.
        value: [T] value estimate before each step.
        bootstrap: [E] value after the last valid step: 0 where the episode terminated, the estimate for its final
            observation where it was truncated or cut.
        valid: [T] bool, the step was executed.
        gamma: discount per credited step.
        lam: GAE lambda.
        ends: [E] where one episode after the other ends; all entries are one episode's without it.

    Returns:
        advantages [T] and returns [T]; 0 where not valid.
    """
    reward, value = np.asarray(reward, dtype=np.float64), np.asarray(value, dtype=np.float64)
    valid = np.asarray(valid, dtype=bool)
    steps, stops = np.flatnonzero(valid), np.asarray([len(reward)] if ends is None else ends)
    # By place among the valid steps; of an episode without any, nothing is left.
    after: list[float | None] = [None] * (len(steps) + 1)
    places = np.concatenate([[0], valid.cumsum()])[stops]
    for place, estimate in zip(places.tolist(), np.ravel(bootstrap).tolist(), strict=True):
        # Of several episodes that end at one place all but the first are without a valid step.
        if after[place] is None:
            after[place] = estimate
    # Plain numbers: numpy's own take ten times longer one by one.
    found: list[float] = []
    following = running = 0.0
    for r, v, first in zip(reward[steps][::-1].tolist(), value[steps][::-1].tolist(), after[:0:-1], strict=True):
        # The last step of an episode: what is carried back belongs to the one after it.
        if first is not None:
            following, running = first, 0.0
        running = r + gamma * following - v + gamma * lam * running
        found.append(running)
        following = v
    advantage, returns = np.zeros_like(reward), np.zeros_like(reward)
    advantage[steps] = found[::-1]
    returns[steps] = advantage[steps] + value[steps]
    return advantage, returns


def whiten(values: npt.ArrayLike, *, eps: float = 1e-8) -> DoubleArray:
    """Shift and scale to mean 0 and variance 1: (x - mean) / sqrt(var + eps), var with ddof 1.

    Fewer than two values have no variance and become 0.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size < 2 or np.ptp(values) == 0:
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + eps)
