"""Returns, advantages and labels of RECAP (arXiv 2511.14759), on the flat frames of several episodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from embodyrl.extensions.demonstrations.layout import Actor
from embodyrl.extensions.demonstrations.reader import Demonstrations
from embodyrl.types import BoolArray, DoubleArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Lengths and results of E episodes with N frames."""

    start: IntArray
    """[E] first frame."""
    end: IntArray
    """[E] end index (exclusive) of the counted frames: those up to the first success."""
    success: BoolArray
    """[E] True if the episode succeeded."""
    task: IntArray
    """[E] index of the task."""
    frames: int
    """Number of frames, N."""

    @classmethod
    def of(cls, demos: Demonstrations) -> Self:
        """Read the outcomes of data sets; tasks are distinct instructions.

        Episodes with unknown authors are demonstrations of other programs, which record no success: they count as
        successful.
        """
        success, end = [], []
        for start, stop in zip(demos.start.tolist(), demos.stop.tolist(), strict=True):
            reached = np.flatnonzero(demos.success[start:stop])
            foreign = not len(reached) and bool((demos.actor[start:stop] == Actor.unknown).all())
            success.append(foreign or len(reached) > 0)
            end.append(start + int(reached[0]) + 1 if len(reached) else stop)
        names = [str(demos.instruction[start]) for start in demos.start]
        known = {name: number for number, name in enumerate(sorted(set(names)))}
        return cls(
            start=demos.start,
            end=np.array(end, np.int64),
            success=np.array(success, np.bool_),
            task=np.array([known[name] for name in names], np.int64),
            frames=len(demos.action),
        )

    @property
    def task_of_frame(self) -> IntArray:
        """[N] task of each counted frame; -1 after the first success."""
        found = np.full(self.frames, -1, np.int64)
        for start, end, task in zip(self.start, self.end, self.task, strict=True):
            found[start:end] = task
        return found


def normalised_returns(outcomes: Outcomes, failure_penalty: float) -> DoubleArray:
    """Return g [N] in -1..0 of rewards -1 per step; the last step has 0 after a success and -penalty after a failure.

    Returns are divided, for each task, by the longest episode plus the penalty, which is `failure_penalty` times the
    longest episode. Frames after the first success have 0.
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
    """Return A [N]: g_t - g_{t+n} + V_{t+n} - V_t, or g_t - V_t if the episode ends within `steps` (None: always)."""
    found = np.zeros(outcomes.frames)
    for start, end in zip(outcomes.start.tolist(), outcomes.end.tolist(), strict=True):
        found[start:end] = g[start:end] - value[start:end]
        if steps is not None and (inner := end - start - steps) > 0:
            later = slice(start + steps, end)
            found[start : start + inner] += value[later] - g[later]
    return found


def thresholds(outcomes: Outcomes, advantage: DoubleArray, positive_share: float) -> dict[int, float]:
    """Return the quantile 1 - `positive_share` of the advantages of each task's counted frames, by task."""
    task = outcomes.task_of_frame
    found = np.unique(outcomes.task).tolist()
    return {one: float(np.quantile(advantage[task == one], 1.0 - positive_share)) for one in found}


def ranked_labels(outcomes: Outcomes, advantage: DoubleArray, limits: dict[int, float]) -> BoolArray:
    """Return the mask [N] of frames whose advantage is at least the task's threshold; False after the first success."""
    task = outcomes.task_of_frame
    labels = np.zeros(outcomes.frames, np.bool_)
    for one, limit in limits.items():
        labels |= (task == one) & (advantage >= limit)
    return labels


def forced(demos: Demonstrations) -> BoolArray:
    """Return the mask [N] of actions of an expert, a person or an unknown actor, which always count as positive."""
    return demos.actor != Actor.policy


def shuffled(outcomes: Outcomes, labels: BoolArray, free: BoolArray, seed: int) -> BoolArray:
    """Return labels in which the labels of `free` frames [N] are shuffled within each task."""
    found, task = labels.copy(), outcomes.task_of_frame
    rng = np.random.default_rng(seed)
    for one in np.unique(outcomes.task).tolist():
        rows = np.flatnonzero(free & (task == one))
        found[rows] = labels[rng.permutation(rows)]
    return found


def two_hot(g: DoubleArray, bins: int) -> DoubleArray:
    """Return probabilities [N, bins] of the two bins of linspace(-1, 0) next to each return, with mean g."""
    place = (np.clip(g, -1.0, 0.0) + 1.0) * (bins - 1)
    low = np.minimum(np.floor(place), bins - 2).astype(np.int64)
    target, rows = np.zeros((len(g), bins)), np.arange(len(g))
    target[rows, low], target[rows, low + 1] = 1.0 - (place - low), place - low
    return target


def folds_of(episodes: int, folds: int, seed: int) -> IntArray:
    """Return the fold [E] of each episode; folds differ by at most one episode."""
    return np.random.default_rng(seed).permutation(np.arange(episodes) % folds)


def rank_correlation(one: Sequence[float] | DoubleArray, other: Sequence[float] | DoubleArray) -> float:
    """Return Spearman's rank correlation, with mean ranks of equal values; 0 if one side is constant."""
    a, b = (_ranks(np.asarray(values, np.float64)) for values in (one, other))
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0


def _ranks(values: DoubleArray) -> DoubleArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
