"""State, dynamics and success of one table; lengths are in meters.

x points right, y away from the front camera, z up from the table top.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

BLOCK_COLORS = ("red", "green", "blue")
PLATE_COLORS = ("yellow", "purple", "white")

STEP = 0.04
"""Displacement of the gripper in meters for an action of 1."""
REACH = 0.32
"""Maximum absolute x and y of the gripper, in meters."""
TOP = 0.12
"""Maximum height of the gripper above the table, in meters."""
TRAVEL_HEIGHT = 0.10
BLOCK_SIDE = 0.06
BLOCK_HEIGHT = 0.05
PLATE_RADIUS = 0.065
GRASP_RADIUS = 0.04
"""Maximum horizontal distance in meters of a block's center from the gripper for a grasp."""
GRASP_HEIGHT = 0.035
"""Maximum height in meters of the gripper for a grasp."""
PUSH_RADIUS = 0.042
"""Distance in meters from a block's center within which a low, closed gripper pushes the block."""
PUSH_HEIGHT = 0.04
ON_PLATE = 0.05
"""A block is on a plate if the distance between their centers is below this value, in meters."""

_LAYOUT_SEED = 20261
_PLATE_COLUMNS = (-0.2, 0.0, 0.2)
_BLOCK_SPACING = 0.13

Point = tuple[float, float]


Axis = StrEnum("Axis", ["base", "colours", "positions", "phrasings"])
"""Variations of the environment for evaluation: none, other shades of the same colors, plates in front and blocks at
the back (the reverse of training), and rephrased instructions."""
Skill = StrEnum("Skill", ["touch", "push", "put"])
"""Skill that a task requires."""


@dataclass(frozen=True, slots=True)
class Task:
    """Task of the tabletop: skill, block and plate; touch tasks do not use `plate`."""

    skill: Skill
    block: int
    plate: int = 0

    @property
    def instruction(self) -> str:
        """Language instruction of the task."""
        block, plate = BLOCK_COLORS[self.block], PLATE_COLORS[self.plate]
        if self.skill is Skill.touch:
            return f"touch the {block} block"
        return f"{self.skill} the {block} block {'to' if self.skill is Skill.push else 'on'} the {plate} plate"

    @property
    def rephrased_instruction(self) -> str:
        """Rephrased instruction of the task."""
        block, plate = f"the {BLOCK_COLORS[self.block]} cube", f"the {PLATE_COLORS[self.plate]} dish"
        return {
            Skill.touch: f"make contact with {block}",
            Skill.push: f"slide {block} over to {plate}",
            Skill.put: f"pick up {block} and set it down on {plate}",
        }[self.skill]


TASKS = (
    *(Task(Skill.touch, block) for block in range(3)),
    *(Task(Skill.push, block, plate) for block in range(3) for plate in range(3)),
    *(Task(Skill.put, block, plate) for block in range(3) for plate in range(3)),
)
"""All tasks: 0-2 touch, 3-11 push, 12-20 put."""


@dataclass(slots=True)
class World:
    """State of one table, and its dynamics."""

    task: Task
    blocks: list[Point]
    plates: tuple[Point, ...]
    x: float
    y: float
    z: float
    closed: bool = False
    """True if the gripper is closed."""
    held_block: int | None = None
    """Index of the block between the closed fingers; None: no block."""
    was_lifted: bool = False
    """True if the task's block was grasped in this episode, not only pushed."""
    palette: int = 0
    """Index of the color palette; 1: the shades of `Axis.colours`."""

    def step(self, dx: float, dy: float, dz: float, close: bool) -> None:
        """Move the gripper by (dx, dy, dz) in -1..1, then open or close the fingers.

        A held block moves with the gripper; a released block drops straight down. Open fingers straddle blocks, closed
        fingers push blocks away. Blocks do not collide with each other.
        """
        previous = self.x, self.y
        self.x = _clip(self.x + STEP * _clip(dx, 1.0), REACH)
        self.y = _clip(self.y + STEP * _clip(dy, 1.0), REACH)
        self.z = min(max(self.z + STEP * _clip(dz, 1.0), 0.0), TOP)
        if self.held_block is not None:
            self.blocks[self.held_block] = self.x, self.y
        if close and not self.closed:
            # A block is grasped only at the moment of closing; closed fingers push blocks.
            self.held_block = self._find_grasped_block()
            self.was_lifted |= self.held_block == self.task.block
        elif not close:
            self.held_block = None
        self.closed = close
        if close and self.z < PUSH_HEIGHT:
            self._push(self.x - previous[0], self.y - previous[1])

    def success(self) -> bool:
        """Return True if the goal of the task is reached."""
        block = self.blocks[self.task.block]
        if self.task.skill is Skill.touch:
            return self.z < BLOCK_HEIGHT and self.distance(block) < PUSH_RADIUS + 0.005
        plate = self.plates[self.task.plate]
        if math.dist(block, plate) >= ON_PLATE or self.held_block == self.task.block:
            return False
        return not (self.task.skill is Skill.push and self.was_lifted)

    def distance(self, point: Point) -> float:
        """Return the horizontal distance of the gripper from a point."""
        return math.hypot(point[0] - self.x, point[1] - self.y)

    def _find_grasped_block(self) -> int | None:
        if self.z > GRASP_HEIGHT:
            return None
        nearest = min(range(len(self.blocks)), key=lambda i: self.distance(self.blocks[i]))
        if self.distance(self.blocks[nearest]) > GRASP_RADIUS:
            return None
        self.blocks[nearest] = self.x, self.y
        return nearest

    def _push(self, dx: float, dy: float) -> None:
        """Move touched blocks with the gripper; blocks do not slide along the fingers."""
        distance = math.hypot(dx, dy)
        for index, block in enumerate(self.blocks):
            if index == self.held_block:
                continue
            ex, ey = block[0] - self.x, block[1] - self.y
            gap = math.hypot(ex, ey)
            if gap >= PUSH_RADIUS:
                continue
            if distance > 1e-6:
                ux, uy = dx / distance, dy / distance
            elif gap > 1e-6:
                ux, uy = ex / gap, ey / gap
            else:
                ux, uy = 0.0, 1.0
            # The root t >= 0 of |e + t u| = PUSH_RADIUS.
            along = ex * ux + ey * uy
            slide = -along + math.sqrt(along * along - gap * gap + PUSH_RADIUS * PUSH_RADIUS)
            self.blocks[index] = _clip(block[0] + slide * ux, REACH), _clip(block[1] + slide * uy, REACH)


def create_world(task: Task, reset_id: int, axis: Axis = Axis.base) -> World:
    """Create a table: three plates at the back in random order, three blocks in front, the gripper above them.

    `Axis.positions` mirrors the table, so that plates are in front.
    """
    rng = np.random.default_rng([_LAYOUT_SEED, reset_id])
    columns = rng.permutation(len(_PLATE_COLUMNS))
    shift = rng.uniform((-0.03, 0.14), (0.03, 0.24), (len(columns), 2))
    plates = tuple((_PLATE_COLUMNS[c] + float(sx), float(sy)) for c, (sx, sy) in zip(columns, shift, strict=True))
    blocks: list[Point] = []
    # Rejection sampling. The order of samples is part of a table: changing it would change all tables.
    while len(blocks) < len(BLOCK_COLORS):
        x, y = rng.uniform((-0.25, -0.25), (0.25, 0.03)).tolist()
        if all(math.dist((x, y), other) > _BLOCK_SPACING for other in blocks):
            blocks.append((x, y))
    x, y = rng.uniform((-0.12, -0.18), (0.12, 0.06)).tolist()
    if axis is Axis.positions:
        blocks, plates, y = [(bx, -by) for bx, by in blocks], tuple((px, -py) for px, py in plates), -y
    return World(task, blocks, plates, x, y, TRAVEL_HEIGHT, palette=int(axis is Axis.colours))


def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)
