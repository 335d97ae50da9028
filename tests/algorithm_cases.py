"""Fixed inputs of the reference values: six sequences, two groups of three, up to five steps, and builders."""

from __future__ import annotations

import numpy as np

from embodyrl.types import Episode, EpisodeSpec

LENGTHS = (5, 3, 4, 2, 5, 1)
REWARDS = (1.0, 0.0, 0.5, 2.0, -1.0, 2.0)
GROUPS = (0, 0, 0, 1, 1, 1)
GAMMA, LAM = 0.9, 0.8

_B, _T = np.meshgrid(np.arange(6), np.arange(5), indexing="ij")
VALID = np.array(LENGTHS)[:, None] > _T
LOGPROB = -(0.20 + 0.17 * _B + 0.07 * _T + 0.05 * ((_B * _T) % 3))
OLD_LOGPROB = -(0.25 + 0.13 * _B + 0.06 * _T + 0.06 * ((_B + _T) % 4))
REF_LOGPROB = -(0.40 + 0.09 * _B + 0.05 * _T)
BEHAVIOUR_LOGPROB = OLD_LOGPROB + 0.15 * (((_B + 2 * _T) % 3) - 1)
VALUE = 0.1 * _B - 0.05 * _T + 0.2
NEW_VALUE = VALUE + 0.3 * (((_B + _T) % 3) - 1)

GRPO_REFERENCE = [0.999998, -0.999998, 0, 0.57735, -1.1547, 0.57735]
GAE_RAW = [
    [0.113364, 0.247728, 0.4274, 0.67, 1],
    [-0.22908, -0.214, -0.2, 0, 0],
    [-0.088168, -0.0044, 0.105, 0.25, 0],
    [1.021, 1.55, 0, 0, 0],
    [-0.636074, -0.737603, -0.88556, -1.098, -1.4],
    [1.3, 0, 0, 0, 0],
]
GAE_RETURNS = [
    [0.313364, 0.397728, 0.5274, 0.72, 1],
    [0.07092, 0.036, 0, 0, 0],
    [0.311832, 0.3456, 0.405, 0.5, 0],
    [1.521, 2, 0, 0, 0],
    [-0.036074, -0.187603, -0.38556, -0.648, -1],
    [2, 0, 0, 0, 0],
]
GAE_WHITENED = [
    [0.067995, 0.237862, 0.465009, 0.771711, 1.188907],
    [-0.364933, -0.345868, -0.328169, 0, 0],
    [-0.186788, -0.080886, 0.057421, 0.240734, 0],
    [1.215456, 1.884233, 0, 0, 0],
    [-0.879467, -1.007823, -1.194875, -1.463448, -1.845245],
    [1.568176, 0, 0, 0, 0],
]


REINFORCE_PP = [
    [0.305085, 0.384481, 0.472698, 0.570717, 0.679628],
    [-0.409476, -0.409476, -0.409476, 0, 0],
    [-0.012497, 0.031611, 0.080621, 0.135076, 0],
    [1.550911, 1.768731, 0, 0, 0],
    [-1.124037, -1.203432, -1.29165, -1.389669, -1.498579],
    [1.768731, 0, 0, 0, 0],
]
REINFORCE_PP_BASELINE = [0.723974, -0.180993, 0.27149, 1.176457, -1.538444, 1.176457]
"""One number per sequence."""


def token_rewards() -> np.ndarray:
    """[6, 5] the outcome reward on the last valid token."""
    out = np.zeros((6, 5))
    out[np.arange(6), np.array(LENGTHS) - 1] = REWARDS
    return out


def make_episode(
    reward: list[list[float]] | np.ndarray,
    *,
    episode_id: int = 0,
    group: int = 0,
    valid: list[list[bool]] | np.ndarray | None = None,
    value: list[list[float]] | np.ndarray | None = None,
    bootstrap: list[float] | np.ndarray | None = None,
    terminated: bool = True,
    success: bool = False,
    first_record: int = 0,
) -> Episode:
    """One episode of T chunks and K actions."""
    rewards = np.asarray(reward, dtype=np.float32)
    mask = np.ones(rewards.shape, dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    values = np.zeros((len(rewards), 0)) if value is None else np.asarray(value)
    after = np.zeros(values.shape[1]) if bootstrap is None else np.asarray(bootstrap)
    won = np.zeros(rewards.shape, dtype=bool)
    won[-1, 0] = success
    return Episode(
        spec=EpisodeSpec(
            episode_id=episode_id, reset_id=100 + group, task_id=3, group_id=group, member=0, seed=1, noise_seed=2
        ),
        records=np.arange(first_record, first_record + len(rewards), dtype=np.int64),
        reward=rewards,
        valid=mask,
        success=won,
        value=values.astype(np.float32),
        bootstrap_value=after.astype(np.float32),
        terminated=terminated,
        truncated=not terminated,
    )


def reference_episodes() -> list[Episode]:
    """The six sequences as episodes of one-action chunks (K = V = 1)."""
    rewards = token_rewards()
    return [
        make_episode(
            rewards[i, :length, None],
            episode_id=i,
            group=GROUPS[i],
            value=VALUE[i, :length, None],
            first_record=10 * i,
        )
        for i, length in enumerate(LENGTHS)
    ]
