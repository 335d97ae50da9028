"""One table: where everything is, how an action changes it, and when the task is done.

Lengths in metres. x points right, y away from the front camera, z up from the table top.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

BLOCK_COLOURS = ("red", "green", "blue")
PLATE_COLOURS = ("yellow", "purple", "white")

STEP = 0.04
"""Way of the gripper for an action of 1."""
REACH = 0.32
"""The gripper stays within +-REACH in x and y."""
TOP = 0.12
"""The gripper stays between the table (0) and this height."""
TRAVEL_HEIGHT = 0.10
BLOCK_SIDE = 0.06
BLOCK_HEIGHT = 0.05
PLATE_RADIUS = 0.065
GRASP_RADIUS = 0.04
"""Closing fingers catch a block whose centre is at most this far away ..."""
GRASP_HEIGHT = 0.035
"""... if the gripper is at most this high."""
PUSH_RADIUS = 0.042
"""Distance that a low, closed gripper keeps to the centre of every block, by pushing it."""
PUSH_HEIGHT = 0.04
ON_PLATE = 0.05
"""A block lies on a plate if their centres are closer than this."""

_LAYOUT_SEED = 20261
_PLATE_COLUMNS = (-0.2, 0.0, 0.2)
_BLOCK_SPACING = 0.13

Point = tuple[float, float]


class Axis(StrEnum):
    """What is changed of the tables that are trained on."""

    base = "base"
    """Nothing."""
    colours = "colours"
    """Other shades of the same colours."""
    positions = "positions"
    """Plates in front and blocks at the back, where none ever lay."""
    phrasings = "phrasings"
    """The same tasks in other words."""


class Skill(StrEnum):
    """What is to be done with a block."""

    touch = "touch"
    push = "push"
    put = "put"


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction; `plate` has no meaning for `touch`."""

    skill: Skill
    block: int
    plate: int = 0

    @property
    def instruction(self) -> str:
        """What the policy is told."""
        block, plate = BLOCK_COLOURS[self.block], PLATE_COLOURS[self.plate]
        if self.skill is Skill.touch:
            return f"touch the {block} block"
        return f"{self.skill} the {block} block {'to' if self.skill is Skill.push else 'on'} the {plate} plate"

    @property
    def other_words(self) -> str:
        """The same in words that no other instruction has."""
        block, plate = f"the {BLOCK_COLOURS[self.block]} cube", f"the {PLATE_COLOURS[self.plate]} dish"
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
"""Tasks 0-2 touch, 3-11 push, 12-20 put."""


@dataclass(slots=True)
class World:
    """State of one table."""

    task: Task
    blocks: list[Point]
    plates: tuple[Point, ...]
    x: float
    y: float
    z: float
    closed: bool = False
    held: int | None = None
    """Index of the block between the closed fingers."""
    lifted: bool = False
    """The task's block has been grasped at some time: it was not pushed only."""
    palette: int = 0
    """Which shades the colours have; 1: those of `Axis.colours`."""

    def step(self, dx: float, dy: float, dz: float, close: bool) -> None:
        """Move the gripper by (dx, dy, dz) in -1..1, then open or close the fingers.

        A held block travels along; a released one drops straight down. Open fingers straddle blocks, closed ones push
        them out of the way. Blocks pass through each other.
        """
        before = self.x, self.y
        self.x = _clip(self.x + STEP * _clip(dx, 1.0), REACH)
        self.y = _clip(self.y + STEP * _clip(dy, 1.0), REACH)
        self.z = min(max(self.z + STEP * _clip(dz, 1.0), 0.0), TOP)
        if self.held is not None:
            self.blocks[self.held] = self.x, self.y
        if close and not self.closed:
            # Only at the moment of closing: closed fingers that come upon a block push it.
            self.held = self._between_fingers()
            self.lifted |= self.held == self.task.block
        elif not close:
            self.held = None
        self.closed = close
        if close and self.z < PUSH_HEIGHT:
            self._push(self.x - before[0], self.y - before[1])

    def success(self) -> bool:
        """Whether the task's goal holds now."""
        block = self.blocks[self.task.block]
        if self.task.skill is Skill.touch:
            return self.z < BLOCK_HEIGHT and self.distance(block) < PUSH_RADIUS + 0.005
        plate = self.plates[self.task.plate]
        if math.dist(block, plate) >= ON_PLATE or self.held == self.task.block:
            return False
        return not (self.task.skill is Skill.push and self.lifted)

    def distance(self, point: Point) -> float:
        """Horizontal distance of the gripper."""
        return math.hypot(point[0] - self.x, point[1] - self.y)

    def _between_fingers(self) -> int | None:
        if self.z > GRASP_HEIGHT:
            return None
        nearest = min(range(len(self.blocks)), key=lambda i: self.distance(self.blocks[i]))
        if self.distance(self.blocks[nearest]) > GRASP_RADIUS:
            return None
        self.blocks[nearest] = self.x, self.y
        return nearest

    def _push(self, dx: float, dy: float) -> None:
        """Slide touched blocks along the gripper's way (sticking contact: they do not roll off sideways)."""
        way = math.hypot(dx, dy)
        for index, block in enumerate(self.blocks):
            if index == self.held:
                continue
            ex, ey = block[0] - self.x, block[1] - self.y
            gap = math.hypot(ex, ey)
            if gap >= PUSH_RADIUS:
                continue
            if way > 1e-6:
                ux, uy = dx / way, dy / way
            elif gap > 1e-6:
                ux, uy = ex / gap, ey / gap
            else:
                ux, uy = 0.0, 1.0
            # The root t >= 0 of |e + t u| = PUSH_RADIUS.
            along = ex * ux + ey * uy
            slide = -along + math.sqrt(along * along - gap * gap + PUSH_RADIUS * PUSH_RADIUS)
            self.blocks[index] = _clip(block[0] + slide * ux, REACH), _clip(block[1] + slide * uy, REACH)


def new_world(task: Task, reset_id: int, axis: Axis = Axis.base) -> World:
    """Lay the table: three plates at the back in random order, three blocks in front, the gripper above them.

    `Axis.positions` mirrors it, so that plates lie in front.
    """
    rng = np.random.default_rng([_LAYOUT_SEED, reset_id])
    columns = rng.permutation(len(_PLATE_COLUMNS))
    shift = rng.uniform((-0.03, 0.14), (0.03, 0.24), (len(columns), 2))
    plates = tuple((_PLATE_COLUMNS[c] + float(sx), float(sy)) for c, (sx, sy) in zip(columns, shift, strict=True))
    blocks: list[Point] = []
    # Drawn again until it has room. The order of draws is part of a table: another one would lay all tables anew.
    while len(blocks) < len(BLOCK_COLOURS):
        x, y = rng.uniform((-0.25, -0.25), (0.25, 0.03)).tolist()
        if all(math.dist((x, y), other) > _BLOCK_SPACING for other in blocks):
            blocks.append((x, y))
    x, y = rng.uniform((-0.12, -0.18), (0.12, 0.06)).tolist()
    if axis is Axis.positions:
        blocks, plates, y = [(bx, -by) for bx, by in blocks], tuple((px, -py) for px, py in plates), -y
    return World(task, blocks, plates, x, y, TRAVEL_HEIGHT, palette=int(axis is Axis.colours))


def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)
