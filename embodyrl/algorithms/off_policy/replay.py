"""Replay buffer that stores each observation once; a transition is a pair of observation indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from embodyrl.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """N observations of one or more episodes, with the action chunk after each observation."""

    seen: Mapping[str, np.ndarray]
    """Arrays [N, ...] by name: the fields of the observations, or the features of a frozen policy."""
    action: FloatArray
    """[N, L] sampled latent actions, within -1..1."""
    reward: FloatArray
    """[N] sum of the rewards of the chunk."""
    acted: BoolArray
    """[N] True if an action follows; False for the final observation of an episode."""
    terminated: BoolArray
    """[N] True if the episode terminated with this chunk."""
    episode: IntArray
    """[N] number of the episode; frames of an episode are consecutive."""

    def map(self, function: Callable[[Any], Any]) -> Frames:
        """Return a copy with a function applied to each array."""
        arrays = {item.name: function(getattr(self, item.name)) for item in fields(self) if item.name != "seen"}
        return Frames(seen={name: function(array) for name, array in self.seen.items()}, **arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """Batch of B transitions of a replay buffer."""

    buffer: ReplayBuffer
    indices: IntArray
    """[B] buffer index of the first observation of each transition."""
    after: IntArray
    """[B] buffer index of the next observation of each transition; arbitrary where the discount is 0."""
    reward: FloatArray
    discount: FloatArray
    """[B] discount of the next value: gamma^n, or 0 after termination. `reward` has the same shape."""
    relabeled: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[R] batch indices of the transitions with a relabeled goal."""
    goal: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[R, G] goals of the relabeled transitions."""


class ReplayBuffer:
    """Ring buffer of observations and n-step transitions; memory grows on demand up to the capacity."""

    def __init__(self, size: int, gamma: float, n_step: int) -> None:
        self._size = size
        self._gamma = gamma
        self._n_step = n_step
        self._count = self._next = 0
        self._arrays: dict[str, np.ndarray] = {}

    def add(self, frames: Frames) -> None:
        """Add frames and drop the oldest frames beyond the capacity.

        A transition contains the reward sum of gamma^j r_j over up to n chunks, the observation after these chunks, and
        the discount gamma^n, or 0 if the episode terminated. A final observation without an action begins no
        transition.
        """
        reward, discount, ahead = self._compute_transitions(frames)
        new = dict(frames.seen) | {"action": frames.action, "reward": reward, "discount": discount, "ahead": ahead}
        new["left"] = _count_later_frames(frames.episode)
        new = {name: array[-self._size :] for name, array in new.items()}
        total = len(new["ahead"])
        self._grow(new, total)
        # Frames of one episode may wrap around the end of the ring, so distances are stored instead of indices.
        place = (self._next + np.arange(total)) % self._size
        for name, array in new.items():
            self._arrays[name][place] = array
        self._next = (self._next + total) % self._size
        self._count = min(self._size, self._count + total)

    def __len__(self) -> int:
        """Return the number of stored observations."""
        return self._count

    @property
    def starts(self) -> IntArray:
        """Buffer indices of the first observation of each transition."""
        return np.flatnonzero(self._arrays["ahead"][: self._count]) if self._count else np.zeros(0, np.int64)

    def __getitem__(self, field: str) -> np.ndarray:
        """Return the stored array [n, ...] of a field: an observation field, or `action`, `reward` or `discount`.

        `ahead` is the length of a transition in chunks, `left` the number of later observations in the episode.
        """
        return self._arrays[field]

    def get_later_indices(self, indices: IntArray, steps: IntArray) -> IntArray:
        """Return the buffer indices of the observations `steps` chunks after `indices`, in the same episode."""
        # The second modulo is needed because indices after the last frame are unwritten until the ring is full.
        return (indices + steps) % self._size % self._count

    def transitions(self, indices: IntArray) -> Transitions:
        """Return the transitions that begin at the buffer indices `indices` [B]."""
        ahead, reward, discount = (self._arrays[name][indices] for name in ("ahead", "reward", "discount"))
        after = self.get_later_indices(indices, ahead)
        return Transitions(buffer=self, indices=indices, after=after, reward=reward, discount=discount)

    def state(self) -> dict[str, Any]:
        """Return the stored observations and transitions for a checkpoint."""
        return {"next": self._next, "size": self._size} | {n: a[: self._count] for n, a in self._arrays.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned; if this buffer is smaller, keep only the newest observations."""
        arrays = {name: array for name, array in state.items() if name not in ("next", "size")}
        if not arrays:
            return
        count = len(arrays["ahead"])
        # A full ring begins at `next`. In chronological order, the newest frames are last.
        order = np.roll(np.arange(count), -state["next"]) if count == state["size"] else np.arange(count)
        self._arrays = {name: np.ascontiguousarray(array[order[-self._size :]]) for name, array in arrays.items()}
        self._count = min(count, self._size)
        self._next = self._count % self._size

    def _grow(self, new: Mapping[str, np.ndarray], total: int) -> None:
        required, capacity = min(self._count + total, self._size), len(self._arrays.get("ahead", ()))
        if required <= capacity:
            return
        # The capacity is doubled on demand, so that a short run does not reserve the whole buffer.
        capacity = min(self._size, max(required, 2 * capacity, 1024))
        for name, array in new.items():
            larger = np.zeros((capacity, *array.shape[1:]), array.dtype)
            larger[: self._count] = self._arrays[name][: self._count] if self._count else 0
            self._arrays[name] = larger

    def _compute_transitions(self, frames: Frames) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return reward, discount and length [N] of each frame's n-step transition; length 0: no transition."""
        count = len(frames.acted)
        reward, discount = np.zeros(count, np.float64), np.ones(count, np.float64)
        ahead = np.zeros(count, np.int64)
        current, is_active = np.arange(count), frames.acted.copy()
        for _ in range(self._n_step):
            active = np.flatnonzero(is_active)
            positions = current[active]
            reward[active] += discount[active] * frames.reward[positions]
            discount[active] *= np.where(frames.terminated[positions], 0.0, self._gamma)
            ahead[active] += 1
            # The last frame has no successor: `same_episode` is false there, and the index stays within the array.
            current[active] = after = np.minimum(positions + 1, count - 1)
            same_episode = (positions + 1 < count) & (frames.episode[after] == frames.episode[positions])
            is_active[active] = same_episode & frames.acted[after] & (discount[active] > 0)
            ahead[
                active[~same_episode & (discount[active] > 0)]
            ] = -count  # there is no observation to estimate a value for
        ahead = np.where(ahead > 0, ahead, 0)
        return reward.astype(np.float32), discount.astype(np.float32), ahead


def _count_later_frames(episode: IntArray) -> IntArray:
    """Return the number [N] of later frames in the same episode."""
    last = np.flatnonzero(np.append(episode[1:] != episode[:-1], True))
    return np.repeat(last, np.diff(last, prepend=-1)) - np.arange(len(episode))
