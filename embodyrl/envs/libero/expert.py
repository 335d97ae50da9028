"""Scripted experts for pick and place, which read object poses from the simulator and return the policy's 7-D actions.

Experts work in closed loop: every action depends on the current state, and after a missed or lost grasp the next
grasp is tried. Experts therefore tolerate noise on their actions.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from embodyrl.envs.libero.scene import Box, Goal, Scene
from embodyrl.types import DoubleArray, FloatArray

_MAX_GRASP_WIDTH = 0.078
"""Maximum width in meters of an object that fits between the fingers; wider objects are grasped at the rim."""

_MAX_SQUARE_WIDTH = 0.075
"""Maximum width in meters of an object that may be grasped in either horizontal direction."""

_RIM_INSET = 0.006
"""Distance in meters from a bowl's rim inwards to the grasp point: half the thickness of the wall.

One finger is then inside the bowl."""

_RIM_DEPTH, _BODY_DEPTH = 0.025, 0.035
"""Distance in meters of the grasp point below the object's top, for grasps at the rim and at the body."""

_FINGER_REACH = (0.045, 0.06)
"""Distances from the grasp point to the middle and the outer side of an open finger, in meters."""

_PALM_REACH = (0.07, 0.1)
"""Distances from the grasp point to two points of the palm, in meters."""
_FINGER_RADIUS, _PALM_RADIUS = 0.008, 0.02
"""Distance in meters around the points of fingers and palm that must be free of obstacles."""
PALM_HEIGHT = 0.055
"""Height in meters of the palm's underside above the fingertips."""

_MAX_REACH = 0.78
"""Maximum distance in meters from the robot's base at which the hand can stay vertical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grasp:
    """Grasp candidate for a vertical hand."""

    point: DoubleArray
    """Position [3] of the closed fingertips in the world frame, meters."""
    axis: DoubleArray
    """Horizontal unit vector [2] from one finger to the other."""
    clearance: float
    """Margin of the grasp in meters: minimum, over pick and place, of the hand's height above obstacles and of its
    remaining reach. If the margin is negative, the hand collides or cannot reach the position."""


def find_grasps(scene: Scene, name: str, target: str, shift: DoubleArray) -> list[Grasp]:
    """Return all grasp candidates for moving an object by `shift` [3] to `target`, in a fixed order."""
    box = scene.get_box(name)
    horizontal_axes = [i for i in range(3) if i != box.up]
    narrow_axis = min(horizontal_axes, key=lambda i: box.half[i])
    candidates = (
        _list_rim_grasps(box, narrow_axis)
        if 2 * box.half[narrow_axis] > _MAX_GRASP_WIDTH
        else _list_body_grasps(box, horizontal_axes, narrow_axis)
    )
    return [
        Grasp(
            point=point,
            axis=axis,
            clearance=min(
                _compute_clearance(scene, point, axis, (name,)),
                _compute_clearance(scene, point + shift, axis, (name, target)),
            ),
        )
        for point, axis in candidates
    ]


def order_grasps(grasps: list[Grasp], rng: np.random.Generator) -> list[Grasp]:
    """Sort grasps: first the collision-free grasps, shuffled by `rng`, then the obstructed grasps by clearance."""
    free = [grasp for grasp in grasps if grasp.clearance >= 0]
    rest = sorted((grasp for grasp in grasps if grasp.clearance < 0), key=lambda grasp: -grasp.clearance)
    return [free[i] for i in rng.permutation(len(free))] + rest


def _list_rim_grasps(box: Box, narrow_axis: int) -> list[tuple[DoubleArray, DoubleArray]]:
    height = max(box.top - _RIM_DEPTH, box.bottom + 0.012)
    candidates = []
    for angle in np.arange(8) * (np.pi / 4):
        axis = np.array([np.cos(angle), np.sin(angle)])
        candidates.append((np.array([*(box.center[:2] + axis * (box.half[narrow_axis] - _RIM_INSET)), height]), axis))
    return candidates


def _list_body_grasps(box: Box, horizontal_axes: list[int], narrow_axis: int) -> list[tuple[DoubleArray, DoubleArray]]:
    depth = min(_BODY_DEPTH, 1.2 * box.half[box.up])
    height = max(box.top - depth, box.bottom + 0.005)
    square = all(2 * box.half[i] < _MAX_SQUARE_WIDTH for i in horizontal_axes)
    candidates = []
    for closing_axis in horizontal_axes if square else [narrow_axis]:
        sliding_axis = next(i for i in horizontal_axes if i != closing_axis)
        axis, side = _to_horizontal_unit(box.axes[:, closing_axis]), _to_horizontal_unit(box.axes[:, sliding_axis])
        for shift in (0.0, -0.5, 0.5):
            offset = shift * max(0.0, box.half[sliding_axis] - 0.012)
            candidates.append((np.array([*(box.center[:2] + side * offset), height]), axis))
    return candidates


def _to_horizontal_unit(vector: DoubleArray) -> DoubleArray:
    return vector[:2] / np.linalg.norm(vector[:2])


def _compute_clearance(scene: Scene, point: DoubleArray, axis: DoubleArray, excluded: tuple[str, ...]) -> float:
    def get_margin(reaches: tuple[float, ...], radius: float, height: float) -> float:
        points = np.array([point[:2] + sign * reach * axis for reach in reaches for sign in (-1, 1)])
        return float(height - scene.get_obstacle_heights(points, radius, excluded).max())

    fingers = get_margin(_FINGER_REACH, _FINGER_RADIUS, point[2])
    palm = get_margin(_PALM_REACH, _PALM_RADIUS, point[2] + PALM_HEIGHT)
    return min(fingers, palm, _MAX_REACH - scene.get_distance_from_base(point))


OPEN, CLOSED = -1.0, 1.0

_METERS_PER_COMMAND = 0.05
"""Motion in meters for a position command of 1 (a rotation command of 1 is 0.5 rad)."""
_RADIANS_PER_COMMAND = 0.5

_HOVER_HEIGHT = 0.10
"""Height in meters above an object at which the hand starts to descend."""
_MIN_CLEARANCE = 0.06
"""Minimum height in meters of a carried object, or of the open hand, above obstacles."""
_FINGERS_HALF_WIDTH = 0.05
"""Half the width of the open fingers, in meters."""
_PALM_HALF_WIDTH = 0.1
"""Half the width of the palm, in meters."""
_RELEASE_HEIGHTS = {"on": 0.012, "in": 0.03}
"""Height in meters above the target's top at which an object is released."""
_CLOSE_STEPS, _OPEN_STEPS = 12, 15
_REST_STEPS, _REST_DISTANCE = 5, 0.001
"""An object counts as set down if it sinks less than `_REST_DISTANCE` meters in `_REST_STEPS` steps."""
_MAX_SLIP = 0.04
"""Distance in meters that a carried object may move in the hand before the object counts as lost."""

ActionIterator = Iterator[FloatArray]


class Expert:
    """Scripted expert for one episode; the seed selects the first grasp.

    An expert contains no simulator objects, so it stays valid if the environment's model is swapped or reloaded.
    """

    def __init__(self, seed: int, *, nearest: bool = False) -> None:
        """Set the seed that shuffles the grasps. With `nearest`, prefer the free grasp that rotates the hand least."""
        self._seed = seed
        self._nearest = nearest
        self._attempts: dict[Goal, int] = {}
        self._scene: Scene
        """View of the environment's model; set only during `act`."""
        self._actions = self._generate_actions()

    def act(self, scene: Scene) -> FloatArray:
        """Return the next action [7] for the current state of the environment's model."""
        # Environments share the model: its derived poses may be those of another environment's last step.
        scene.refresh()
        self._scene = scene
        try:
            return next(self._actions)
        finally:
            del self._scene

    def _generate_actions(self) -> ActionIterator:
        while True:
            goal = next((goal for goal in self._scene.goals if not self._scene.is_reached(goal)), None)
            if goal is None:
                yield self._build_action(np.zeros(3), 0.0, OPEN)
            else:
                yield from self._pick_and_place(goal)

    def _pick_and_place(self, goal: Goal) -> ActionIterator:
        """Yield the actions of one attempt to reach the goal; stop early if the object is not in the hand."""
        start, owner = self._scene.get_box(goal.subject), self._scene.get_owner(goal.target)
        release_height = self._scene.get_box(owner).top + _RELEASE_HEIGHTS[goal.relation]
        grasp = self._choose_grasp(
            goal,
            owner,
            np.array([*(self._scene.get_position(goal.target) - start.center[:2]), release_height - start.bottom]),
        )
        yield from self._approach(goal.subject, grasp, start.top + _HOVER_HEIGHT)
        for _ in range(_CLOSE_STEPS):
            yield self._build_action(np.zeros(3), 0.0, CLOSED)

        base, carry_height = self._scene.hand[:2].copy(), self._compute_carry_height(goal, start)
        yield from self._move(lambda: np.array([*base, carry_height]), CLOSED, tolerance=0.02, limit=60)
        # The object is still on the table; the next attempt uses another grasp.
        if self._scene.get_box(goal.subject).bottom < start.bottom + 0.03:
            return

        # Use the actual position in the hand: an object is rarely held at its center.
        grasp_offset = self._get_offset(goal.subject)
        yield from self._carry(goal, grasp_offset, lambda: carry_height, limit=90)
        yield from self._carry(
            goal,
            grasp_offset,
            lambda: (
                self._scene.hand[2]
                + min(
                    release_height - self._scene.get_box(goal.subject).bottom,
                    carry_height - self._scene.hand[2],
                )
            ),
            limit=40,
            lowers=True,
        )
        if not self._is_lost(goal.subject, grasp_offset):
            for _ in range(_OPEN_STEPS):
                yield self._build_action(np.zeros(3), 0.0, OPEN)
        base = self._scene.hand[:2].copy()
        yield from self._move(lambda: np.array([*base, carry_height]), OPEN, tolerance=0.02, limit=30)

    def _compute_carry_height(self, goal: Goal, start: Box) -> float:
        """Return the hand height at which the hand and the carried object clear all obstacles."""
        hand, end = self._scene.hand, self._scene.get_position(goal.target)
        depth_below_hand = hand[2] - start.bottom
        object_path_height = self._scene.get_max_height_between(start.center[:2], end, max(start.half), (goal.subject,))
        palm_path_height = self._scene.get_max_height_between(hand[:2], end, _PALM_HALF_WIDTH, (goal.subject,))
        return max(
            object_path_height + depth_below_hand + _MIN_CLEARANCE,
            palm_path_height - PALM_HEIGHT + 0.02,
            hand[2] + 0.12,
        )

    def _choose_grasp(self, goal: Goal, target: str, shift: DoubleArray) -> Grasp:
        """Return the grasp for the next attempt, chosen from the candidates in the current state."""
        attempt = self._attempts.get(goal, 0)
        self._attempts[goal] = attempt + 1
        grasps = order_grasps(find_grasps(self._scene, goal.subject, target, shift), np.random.default_rng(self._seed))
        if self._nearest:
            grasps.sort(key=self._compute_effort)
        return grasps[attempt % len(grasps)]

    def _compute_effort(self, grasp: Grasp) -> tuple[float, float, float]:
        """Return the sort key of a grasp: obstruction, then rotation (in eighths of a circle), then distance."""
        distance = float(np.linalg.norm(grasp.point[:2] - self._scene.hand[:2]))
        return max(0.0, -grasp.clearance), round(abs(self._compute_rotation(grasp.axis)) / (np.pi / 4)), distance

    def _approach(self, subject: str, grasp: Grasp, hover_height: float) -> ActionIterator:
        base, point = self._scene.hand[:2].copy(), grasp.point
        travel_height = max(
            hover_height,
            self._scene.get_max_height_between(base, point[:2], _FINGERS_HALF_WIDTH, (subject,)) + _MIN_CLEARANCE,
        )
        if self._scene.hand[2] < travel_height - 0.03:
            yield from self._move(lambda: np.array([*base, travel_height]), OPEN, tolerance=0.02, limit=30)
        above = np.array([*point[:2], travel_height])
        yield from self._move(lambda: above, OPEN, axis=grasp.axis, tolerance=0.012, limit=60)
        yield from self._move(lambda: point, OPEN, axis=grasp.axis, tolerance=0.006, limit=60, speed=0.6)

    def _carry(
        self,
        goal: Goal,
        grasp_offset: DoubleArray,
        height: Callable[[], float],
        *,
        limit: int,
        lowers: bool = False,
    ) -> ActionIterator:
        """Yield actions that move the held object above its target; stop if it is lost or, with `lowers`, at rest."""

        def get_target() -> DoubleArray:
            return np.array([*(self._scene.get_position(goal.target) + self._get_offset(goal.subject)[:2]), height()])

        moves = self._move(get_target, CLOSED, tolerance=0.012, limit=limit, speed=0.6 if lowers else 1.0)
        heights: deque[float] = deque(maxlen=_REST_STEPS)
        for action in moves:
            yield action
            if self._is_lost(goal.subject, grasp_offset):
                return
            heights.append(self._scene.get_box(goal.subject).bottom)
            if lowers and len(heights) == _REST_STEPS and heights[0] - heights[-1] < _REST_DISTANCE:
                return

    def _get_offset(self, subject: str) -> DoubleArray:
        return self._scene.hand - self._scene.get_box(subject).center

    def _is_lost(self, subject: str, grasp_offset: DoubleArray) -> bool:
        return bool(np.linalg.norm(self._get_offset(subject) - grasp_offset) > _MAX_SLIP)

    def _move(
        self,
        target: Callable[[], DoubleArray],
        gripper: float,
        *,
        tolerance: float,
        limit: int,
        axis: DoubleArray | None = None,
        speed: float = 1.0,
    ) -> ActionIterator:
        """Yield at most `limit` actions that move the hand to `target` [3] with the fingers along `axis` [2]."""
        for _ in range(limit):
            error = target() - self._scene.hand
            rotation = 0.0 if axis is None else self._compute_rotation(axis)
            if np.linalg.norm(error) < tolerance and abs(rotation) < 0.08:
                return
            yield self._build_action(error, rotation, gripper, speed)

    def _compute_rotation(self, axis: DoubleArray) -> float:
        """Return the smallest angle (rad) about the vertical that aligns the symmetric fingers with `axis`."""
        current_axis = self._scene.finger_axis
        angle = float(np.arctan2(current_axis[0] * axis[1] - current_axis[1] * axis[0], current_axis @ axis))
        # Reduced to +-90 degrees: the fingers are symmetric under a half turn.
        return (angle + np.pi / 2) % np.pi - np.pi / 2

    def _build_action(self, error: DoubleArray, rotation: float, gripper: float, speed: float = 1.0) -> FloatArray:
        """Return the action [7] that moves the hand by `error` (m) and `rotation` (rad), and keeps it vertical."""
        action = np.zeros(7)
        action[:3] = np.clip(error / _METERS_PER_COMMAND, -speed, speed)
        # Rotation vector towards straight down, for small tilts.
        action[3:6] = np.cross(self._scene.hand_axis, [0.0, 0.0, -1.0])
        action[5] += rotation / _RADIANS_PER_COMMAND
        action[6] = gripper
        return np.clip(action, -1.0, 1.0).astype(np.float32)
