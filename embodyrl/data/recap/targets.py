"""Returns, advantages and labels of RECAP (arXiv 2511.14759), for the concatenated frames of several episodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from embodyrl.data.layout import Actor
from embodyrl.data.reader import Demonstrations
from embodyrl.types import BoolArray, DoubleArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Frame ranges, success and tasks of E episodes with N frames in total."""

    start: IntArray
    """[E] index of the first frame."""
    end: IntArray
    """[E] exclusive end index of the frames up to the first success; later frames are not counted."""
    success: BoolArray
    """[E] True if the episode succeeded."""
    task: IntArray
    """[E] index of the task."""
    frames: int
    """Number of frames, N."""

    @classmethod
    def of(cls, demos: Demonstrations) -> Self:
        """Read the outcomes of a data set; each distinct instruction is a task.

        Episodes whose actions have an unknown actor count as successful: such demonstrations, recorded by other
        programs, contain no success flags.
        """
        success, end = [], []
        for start, stop in zip(demos.start.tolist(), demos.stop.tolist(), strict=True):
            successes = np.flatnonzero(demos.success[start:stop])
            third_party = not len(successes) and bool((demos.actor[start:stop] == Actor.unknown).all())
            success.append(third_party or len(successes) > 0)
            end.append(start + int(successes[0]) + 1 if len(successes) else stop)
        names = [str(demos.instruction[start]) for start in demos.start]
        task_ids = {name: number for number, name in enumerate(sorted(set(names)))}
        return cls(
            start=demos.start,
            end=np.array(end, np.int64),
            success=np.array(success, np.bool_),
            task=np.array([task_ids[name] for name in names], np.int64),
            frames=len(demos.action),
        )

    @property
    def task_of_frame(self) -> IntArray:
        """[N] task of each frame up to the first success; -1 for later frames."""
        tasks = np.full(self.frames, -1, np.int64)
        for start, end, task in zip(self.start, self.end, self.task, strict=True):
            tasks[start:end] = task
        return tasks


def normalised_returns(outcomes: Outcomes, failure_penalty: float) -> DoubleArray:
    """Return the normalised return-to-go g [N] of each frame, in -1..0.

    The reward is -1 per step; at the last step it is 0 after a success and -penalty after a failure. The penalty is
    `failure_penalty` times the longest episode of the task. Returns are divided by the length of the longest episode
    of the task plus the penalty. Frames after the first success have 0.
    """
    g = np.zeros(outcomes.frames)
    length = outcomes.end - outcomes.start
    for start, end, task, success in zip(outcomes.start, outcomes.end, outcomes.task, outcomes.success, strict=True):
        longest = float(length[outcomes.task == task].max())
        penalty = failure_penalty * longest
        remaining = -np.arange(end - start - 1, -1, -1, dtype=np.float64) - (0.0 if success else penalty)
        g[start:end] = np.clip(remaining / (longest + penalty), -1.0, 0.0)
    return g


def advantages(outcomes: Outcomes, g: DoubleArray, value: DoubleArray, steps: int | None) -> DoubleArray:
    """Return the n-step advantages [N]: g_t - g_{t+n} + V_{t+n} - V_t with n = `steps`.

    The advantage is g_t - V_t if the episode ends within n steps, or if `steps` is None.
    """
    result = np.zeros(outcomes.frames)
    for start, end in zip(outcomes.start.tolist(), outcomes.end.tolist(), strict=True):
        result[start:end] = g[start:end] - value[start:end]
        if steps is not None and (inner := end - start - steps) > 0:
            bootstrap = slice(start + steps, end)
            result[start : start + inner] += value[bootstrap] - g[bootstrap]
    return result


def thresholds(outcomes: Outcomes, advantage: DoubleArray, positive_share: float) -> dict[int, float]:
    """Return an advantage threshold per task: the quantile 1 - `positive_share` over frames up to the first success."""
    task = outcomes.task_of_frame
    task_ids = np.unique(outcomes.task).tolist()
    return {task_id: float(np.quantile(advantage[task == task_id], 1.0 - positive_share)) for task_id in task_ids}


def ranked_labels(outcomes: Outcomes, advantage: DoubleArray, limits: dict[int, float]) -> BoolArray:
    """Return the mask [N] of frames whose advantage is at least the threshold of their task.

    Frames after the first success are False.
    """
    task = outcomes.task_of_frame
    labels = np.zeros(outcomes.frames, np.bool_)
    for task_id, limit in limits.items():
        labels |= (task == task_id) & (advantage >= limit)
    return labels


def find_expert_frames(demos: Demonstrations) -> BoolArray:
    """Return the mask [N] of frames whose action is not from the policy, so that the label is always positive."""
    return demos.actor != Actor.policy


def shuffle_labels(outcomes: Outcomes, labels: BoolArray, free: BoolArray, seed: int) -> BoolArray:
    """Return a copy of the labels [N]; the labels selected by the mask `free` [N] are shuffled within each task."""
    result, task = labels.copy(), outcomes.task_of_frame
    rng = np.random.default_rng(seed)
    for task_id in np.unique(outcomes.task).tolist():
        rows = np.flatnonzero(free & (task == task_id))
        result[rows] = labels[rng.permutation(rows)]
    return result


def two_hot(g: DoubleArray, bins: int) -> DoubleArray:
    """Return two-hot targets [N, bins] for returns g [N] on the bins linspace(-1, 0); the mean of row i is g_i."""
    position = (np.clip(g, -1.0, 0.0) + 1.0) * (bins - 1)
    low = np.minimum(np.floor(position), bins - 2).astype(np.int64)
    target, rows = np.zeros((len(g), bins)), np.arange(len(g))
    target[rows, low], target[rows, low + 1] = 1.0 - (position - low), position - low
    return target


def assign_folds(episodes: int, folds: int, seed: int) -> IntArray:
    """Return the cross-validation fold [E] of each episode; sizes of folds differ by at most one episode."""
    return np.random.default_rng(seed).permutation(np.arange(episodes) % folds)


def rank_correlation(first: Sequence[float] | DoubleArray, second: Sequence[float] | DoubleArray) -> float:
    """Return Spearman's rank correlation of two sequences; ties get their mean rank. 0 if a sequence is constant."""
    a, b = (_get_ranks(np.asarray(values, np.float64)) for values in (first, second))
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0


def _get_ranks(values: DoubleArray) -> DoubleArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
