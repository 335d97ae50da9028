"""Where to hold an object: candidates from its box, checked against what stands around it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embodyrl.envs.libero.scene import Box, Scene

DoubleArray = npt.NDArray[np.float64]

OPENING = 0.078
"""Widest thing the fingers close around."""

_SQUARE = 0.075
"""Things narrower than this both ways may be held either way."""

_RIM_INSET = 0.006
"""Half the wall of a bowl: the rim is held, one finger inside."""

_RIM_DEPTH = 0.025
_BODY_DEPTH = 0.035
"""How far below its top a thing is held."""

_FINGER_REACH = (0.045, 0.06)
"""Distances of an open finger's middle and outside from the grasp."""

_FINGER_RADIUS = 0.008
_PALM_REACH = (0.07, 0.1)
_PALM_RADIUS = 0.02
PALM_HEIGHT = 0.055
"""The palm's underside above the fingertips."""

_MAX_REACH = 0.78
"""Farther from its base the arm is stretched and cannot keep the hand vertical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grasp:
    """A vertical grasp."""

    point: DoubleArray
    """[3] where the fingertips close, metres, world."""
    axis: DoubleArray
    """[2] horizontal direction from finger to finger."""
    clearance: float
    """Room, metres, here and where the object is put down: height of the hand above what stands below it, and reach
    that is left; negative: the hand would collide or not get there."""


def find_grasps(scene: Scene, name: str, target: str, shift: DoubleArray) -> list[Grasp]:
    """All candidates for an object that is to be moved by `shift` [3] to `target`, in a fixed order."""
    box = scene.box(name)
    flat = [i for i in range(3) if i != box.up]
    narrow = min(flat, key=lambda i: box.half[i])
    candidates = _rim(box, narrow) if 2 * box.half[narrow] > OPENING else _body(box, flat, narrow)
    return [
        Grasp(
            point=point,
            axis=axis,
            clearance=min(
                _clearance(scene, point, axis, (name,)), _clearance(scene, point + shift, axis, (name, target))
            ),
        )
        for point, axis in candidates
    ]


def order_grasps(grasps: list[Grasp], rng: np.random.Generator) -> list[Grasp]:
    """Free ones first, shuffled (the episode's variant); then the others, the least obstructed first."""
    free = [grasp for grasp in grasps if grasp.clearance >= 0]
    rest = sorted((grasp for grasp in grasps if grasp.clearance < 0), key=lambda grasp: -grasp.clearance)
    return [free[i] for i in rng.permutation(len(free))] + rest


def _rim(box: Box, narrow: int) -> list[tuple[DoubleArray, DoubleArray]]:
    height = max(box.top - _RIM_DEPTH, box.bottom + 0.012)
    found = []
    for angle in np.arange(8) * (np.pi / 4):
        axis = np.array([np.cos(angle), np.sin(angle)])
        found.append((np.array([*(box.center[:2] + axis * (box.half[narrow] - _RIM_INSET)), height]), axis))
    return found


def _body(box: Box, flat: list[int], narrow: int) -> list[tuple[DoubleArray, DoubleArray]]:
    depth = min(_BODY_DEPTH, 1.2 * box.half[box.up])
    height = max(box.top - depth, box.bottom + 0.005)
    square = all(2 * box.half[i] < _SQUARE for i in flat)
    found = []
    for across in flat if square else [narrow]:
        along = next(i for i in flat if i != across)
        axis, side = _flat_unit(box.axes[:, across]), _flat_unit(box.axes[:, along])
        for shift in (0.0, -0.5, 0.5):
            offset = shift * max(0.0, box.half[along] - 0.012)
            found.append((np.array([*(box.center[:2] + side * offset), height]), axis))
    return found


def _flat_unit(vector: DoubleArray) -> DoubleArray:
    return vector[:2] / np.linalg.norm(vector[:2])


def _clearance(scene: Scene, point: DoubleArray, axis: DoubleArray, without: tuple[str, ...]) -> float:
    def room(reaches: tuple[float, ...], radius: float, height: float) -> float:
        points = np.array([point[:2] + sign * reach * axis for reach in reaches for sign in (-1, 1)])
        return float(height - scene.obstacle_tops(points, radius, without).max())

    fingers = room(_FINGER_REACH, _FINGER_RADIUS, point[2])
    palm = room(_PALM_REACH, _PALM_RADIUS, point[2] + PALM_HEIGHT)
    return min(fingers, palm, _MAX_REACH - scene.reach(point))
