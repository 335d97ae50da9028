"""Search for sequences of straight pushes that move the block of PushT to its goal pose.

The block of gym-pusht moves only in frictionless contact, so the motion of a straight push does not depend on the
block's pose. `PushTable` simulates each push once; the search needs no further simulation. Lengths are pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pymunk  # pyright: ignore[reportMissingImports]
import shapely  # pyright: ignore[reportMissingModuleSource]
from gym_pusht.envs import PushTEnv  # pyright: ignore[reportMissingImports]

from embodyrl.types import BoolArray, DoubleArray, IntArray

RADIUS = 15.0
"""Radius of the agent."""
GAP, _DEPTH, _STEP_LENGTH = 6.0, 150.0, 2.0
"""Distance between block and agent before a push, maximum length of a push, and agent motion per physics step."""
_SPACING, _CORNER_MARGIN = 10.0, 3.0
"""Distance between contact points, and from a contact point to the next corner."""
_MIN_POSITION, _MAX_POSITION, _WALL_MARGIN = 21.0, 491.0, 8.0
"""Range of the agent's x and y during pushes, and minimum distance between the block and the edge of the window."""
_BEAM_WIDTH, _MAX_PUSHES, _MAX_CANDIDATES = 40, 4, 2000
"""Sequences in the beam, pushes of a sequence, and best candidates that are compared for the next beam."""
_STEP_COST, _EXTRA_STEPS, _TRAVEL_MOTION, _PUSH_MOTION = 0.02, 5.0, 22.5, 13.0
"""Cost of an env step in the search, additional env steps per push, and agent motion per env step between pushes and
during pushes."""
_CELL_SIZE = np.array([6.0, 6.0, 0.1])
"""Poses in the same cell (pixels, pixels, rad) count as equal in the beam."""


@dataclass(frozen=True, slots=True)
class Push:
    """Straight push: the agent moves from `start` [2] by `length` along the unit vector `direction` [2]."""

    start: DoubleArray
    direction: DoubleArray
    length: float

    @property
    def end(self) -> DoubleArray:
        """Last position [2] of the agent."""
        return self.start + self.direction * self.length

    def project(self, point: DoubleArray) -> tuple[float, float]:
        """Return the distance of a point [2] along the line from `start`, and its distance from the line."""
        offset = point - self.start
        return float(offset @ self.direction), float(abs(offset[0] * self.direction[1] - offset[1] * self.direction[0]))


def rotation(angle: DoubleArray) -> DoubleArray:
    """Return rotation matrices [..., 2, 2]."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)


class PushTable:
    """Block motions of C straight pushes at D depths, in the frame of the block before the push.

    Attributes: `outline` [P, 2] (closed, counterclockwise), `corners` [8, 2], `starts` [C, 2], `directions` [C, 2],
    `motions` [C, D, 3] (x, y, angle), `lengths` [D].
    """

    def __init__(self) -> None:
        *_, shapes = _build_scene(np.full(2, -500.0))
        corners = [[tuple(corner) for corner in shape.get_vertices()] for shape in shapes]
        block = shapely.union_all([shapely.Polygon(vertices) for vertices in corners]).simplify(0.01)
        ring = shapely.get_exterior_ring(block)
        self.outline = shapely.get_coordinates(ring)[:: 1 if shapely.is_ccw(ring) else -1]
        self.corners = np.array(corners).reshape(-1, 2)
        count = int(_DEPTH / _STEP_LENGTH)
        depths = [*range(16), *range(16, count, 3)]
        starts, directions, motions = [], [], []
        for first, last in pairwise(self.outline):
            length = float(np.linalg.norm(last - first))
            along = (last - first) / length
            inward = np.array([-along[1], along[0]])
            for offset in np.linspace(_CORNER_MARGIN, length - _CORNER_MARGIN, max(2, round(length / _SPACING))):
                contact = first + along * offset
                start = contact - inward * (RADIUS + GAP)
                # Exclude contacts next to the inner corners, where the agent would touch two edges.
                if block.distance(shapely.Point(*start)) > RADIUS + GAP - 0.1:
                    starts.append(start)
                    directions.append(inward)
                    motions.append(_simulate_push(contact - inward * RADIUS, inward, count)[depths])
        self.starts, self.directions, self.motions = map(np.array, (starts, directions, motions))
        self.lengths = GAP + _STEP_LENGTH * (np.array(depths) + 1)

    def transform_corners(self, pose: DoubleArray) -> DoubleArray:
        """Return the corners [..., 8, 2] of the block at poses [..., 3]."""
        rotated = np.einsum("...ij,kj->...ki", rotation(pose[..., 2]), self.corners)
        return rotated + pose[..., None, :2]

    def find(self, pose: DoubleArray, agent: DoubleArray, goal: DoubleArray) -> Push | None:
        """Return the first push of the best sequence of at most four pushes; None if the block cannot be pushed.

        Beam search: minimizes log(mean distance of the corners to their goals) + a cost per env step.
        """
        beam = _Beam(pose[None], agent[None], np.zeros(1), None)
        best, best_value = -1, np.inf
        for _ in range(_MAX_PUSHES):
            values, next_beam = self._expand_beam(beam, self.transform_corners(goal))
            if next_beam is None or next_beam.first is None:
                break
            if values[0] < best_value - 1e-3:
                best, best_value = int(next_beam.first[0]), values[0]
            beam = next_beam
        if best < 0:
            return None
        contact, depth = divmod(best, len(self.lengths))
        rotation_matrix = rotation(pose[2])
        start, direction = rotation_matrix @ self.starts[contact] + pose[:2], rotation_matrix @ self.directions[contact]
        return Push(start, direction, float(self.lengths[depth]))

    def _expand_beam(self, beam: _Beam, goal: DoubleArray) -> tuple[DoubleArray, _Beam | None]:
        """Append each push to each sequence of the beam; return costs and sequences of the next beam, best first."""
        rotations, origin = rotation(beam.poses[:, 2]), beam.poses[:, None, :2]
        starts = np.einsum("nij,cj->nci", rotations, self.starts) + origin
        directions = np.einsum("nij,cj->nci", rotations, self.directions)
        ends = starts[:, :, None] + directions[:, :, None] * self.lengths[:, None]
        positions = np.einsum("nij,ckj->ncki", rotations, self.motions[..., :2]) + origin[:, :, None]
        angles = beam.poses[:, None, None, 2] + self.motions[..., 2]
        poses = np.concatenate([positions, angles[..., None]], -1)
        corners = self.transform_corners(poses)
        free = _are_inside(starts)[:, :, None] & _are_inside(ends)
        free &= ((corners > _WALL_MARGIN) & (corners < 512 - 1 - _WALL_MARGIN)).all((-1, -2))
        travel = np.linalg.norm(starts - beam.agents[:, None], axis=-1) / _TRAVEL_MOTION
        steps = _EXTRA_STEPS + travel[:, :, None] + self.lengths / _PUSH_MOTION
        costs = beam.costs[:, None, None] + _STEP_COST * np.where(free, steps, np.inf)
        error = np.linalg.norm(corners - goal, axis=-1).mean(-1)
        values = (np.log(error + 0.5) + costs).ravel()
        order = np.argsort(values, kind="stable")[:_MAX_CANDIDATES]
        order = order[np.isfinite(values[order])]
        if not order.size:
            return values, None
        _, unique_rows = np.unique(np.round(poses.reshape(-1, 3)[order] / _CELL_SIZE), axis=0, return_index=True)
        order = order[np.sort(unique_rows)[:_BEAM_WIDTH]]
        pushes_per_sequence = self.motions.shape[0] * self.motions.shape[1]
        first = order if beam.first is None else beam.first[order // pushes_per_sequence]
        return values[order], _Beam(
            poses.reshape(-1, 3)[order], ends.reshape(-1, 2)[order], costs.ravel()[order], first
        )


@dataclass(frozen=True, slots=True)
class _Beam:
    """Beam of N push sequences: block poses [N, 3], agents [N, 2], costs [N] and the index of the first push [N]."""

    poses: DoubleArray
    agents: DoubleArray
    costs: DoubleArray
    first: IntArray | None


def _are_inside(points: DoubleArray) -> BoolArray:
    return np.asarray(((points > _MIN_POSITION) & (points < _MAX_POSITION)).all(-1))


def _build_scene(agent: DoubleArray) -> tuple[pymunk.Space, pymunk.Body, pymunk.Body, list[pymunk.Poly]]:
    """Build a space with the agent and the block at the origin."""
    space = pymunk.Space()
    space.damping = 0.0
    body = PushTEnv.add_circle(space, tuple(agent), RADIUS)
    block, shapes = PushTEnv.add_tee(space, (0, 0), 0)
    return space, body, block, shapes


def _simulate_push(start: DoubleArray, direction: DoubleArray, steps: int) -> DoubleArray:
    """Return the block's poses [steps, 3] while the agent moves at constant speed."""
    space, agent, block, _ = _build_scene(start)
    time_step = 0.01
    agent.velocity = tuple(direction * _STEP_LENGTH / time_step)
    poses = []
    for _ in range(steps):
        space.step(time_step)
        poses.append((*block.position, block.angle))
    return np.array(poses)
