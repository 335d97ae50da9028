"""Simulators and scripted expert of the tabletop environment, in Python (a few microseconds per step)."""

import copy
import math

import numpy as np

from embodyrl.envs.simulators import SequentialSimulators, SimStep
from embodyrl.envs.tabletop.views import FRONT, WRIST, render_front, render_wrist
from embodyrl.envs.tabletop.world import (
    GRASP_HEIGHT,
    PUSH_HEIGHT,
    PUSH_RADIUS,
    STEP,
    TASKS,
    TRAVEL_HEIGHT,
    Axis,
    Point,
    Skill,
    World,
    create_world,
)
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut

OPEN, CLOSED = -1.0, 1.0

_DESCENT_RADIUS = 0.02
"""Maximum horizontal distance in meters from the target at which the closed, empty gripper descends."""
_OPEN_DESCENT_RADIUS = 0.05
"""Maximum horizontal distance in meters from the target at which an open or block-holding gripper descends."""
_HALF_STEP = STEP / 2
_PUSH_GAP = PUSH_RADIUS + 0.015

Command = tuple[float, float, float, float]
"""(dx, dy, dz, gripper): displacement to the next waypoint in meters, and the gripper command."""


def expert_action(world: World) -> FloatArray:
    """Return the expert's next action [7]: position deltas in -1..1, zero rotation, gripper."""
    if world.success():
        command = 0.0, 0.0, TRAVEL_HEIGHT - world.z, CLOSED if world.closed and world.held_block is None else OPEN
    else:
        command = {Skill.touch: _plan_touch, Skill.push: _plan_push, Skill.put: _plan_put}[world.task.skill](world)
    dx, dy, dz, gripper = command
    action = np.zeros(7, np.float32)
    action[:3] = np.clip(np.array((dx, dy, dz)) / STEP, -1.0, 1.0)
    action[6] = gripper
    return action


def _plan_touch(world: World) -> Command:
    return _move_down_to(world, world.blocks[world.task.block], OPEN)


def _plan_put(world: World) -> Command:
    block, plate = world.blocks[world.task.block], world.plates[world.task.plate]
    if world.held_block == world.task.block:
        is_low = world.z < GRASP_HEIGHT and world.distance(plate) < _DESCENT_RADIUS
        return (0.0, 0.0, 0.0, OPEN) if is_low else _move_down_to(world, plate, CLOSED)
    if world.closed:
        return 0.0, 0.0, TRAVEL_HEIGHT - world.z, OPEN
    is_low = world.z < GRASP_HEIGHT and world.distance(block) < _DESCENT_RADIUS
    return (0.0, 0.0, 0.0, CLOSED) if is_low else _move_down_to(world, block, OPEN)


def _plan_push(world: World) -> Command:
    block, plate = world.blocks[world.task.block], world.plates[world.task.plate]
    if world.held_block is not None:
        return 0.0, 0.0, TRAVEL_HEIGHT - world.z, OPEN
    dx, dy = plate[0] - block[0], plate[1] - block[1]
    distance = max(math.hypot(dx, dy), 1e-6)
    ux, uy = dx / distance, dy / distance
    ex, ey = block[0] - world.x, block[1] - world.y
    along, lateral_distance = ex * ux + ey * uy, abs(ex * uy - ey * ux)
    is_low = world.z < PUSH_HEIGHT
    if is_low and lateral_distance < 0.75 * PUSH_RADIUS and 0.0 < along < PUSH_RADIUS + 2 * STEP:
        gap = max(along - PUSH_RADIUS, 0.0)
        dx, dy = dx + gap * ux, dy + gap * uy
        # Scale all axes by the same factor, because a push in another direction would lose the block.
        scale = min(1.0, STEP / max(abs(dx), abs(dy), 1e-6))
        return scale * dx, scale * dy, -world.z, CLOSED
    behind = block[0] - _PUSH_GAP * ux, block[1] - _PUSH_GAP * uy
    return _move_down_to(world, behind, CLOSED)


def _move_down_to(world: World, point: Point, gripper: float) -> Command:
    """Return the next command towards a point: move at travel height, and descend when the gripper is above it."""
    radius = _DESCENT_RADIUS if gripper == CLOSED and world.held_block is None else _OPEN_DESCENT_RADIUS
    height = 0.0 if world.distance(point) < radius else TRAVEL_HEIGHT
    # A low gripper rises and moves in the same step, which shortens episodes. Each axis is rounded to half steps,
    # because a small policy learns few distinct numbers more easily than arbitrary directions.
    delta = np.array((point[0] - world.x, point[1] - world.y, height - world.z))
    dx, dy, dz = np.round(delta / _HALF_STEP) * _HALF_STEP
    return float(dx), float(dy), float(dz), gripper


_RENDER_FUNCTIONS = {FRONT: render_front, WRIST: render_wrist}
CAMERAS = tuple(_RENDER_FUNCTIONS)

STATE_DIM = 4
"""Dimension of the state: gripper position x, y, z (m) and opening (1 open, 0 closed)."""

FRAME_SIZE = 288
"""Height and width in pixels (P) of each image in a video frame."""


def get_suite_name(axis: Axis) -> str:
    """Return the suite name of a variation: `tabletop` for the base, else `tabletop_<axis>`."""
    return "tabletop" if axis is Axis.base else f"tabletop_{axis}"


def get_axis(suite: str) -> Axis:
    """Return the variation of a suite name; the inverse of `get_suite_name`."""
    return next(axis for axis in Axis if get_suite_name(axis) == suite)


class TabletopSims(SequentialSimulators):
    """Simulators of the tabletop environment; all randomness depends on the reset id."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self._worlds: dict[int, World] = {}

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        """Place the gripper and the objects as in initial state `reset_id`; the seed has no effect."""
        task, _ = self.spec.task_of(reset_id)
        # All variations have the same tables; the reset ids of additional suites start at an offset.
        table = reset_id % self.spec.get_reset_ids(len(TASKS) - 1).stop
        self._worlds[env_index] = create_world(TASKS[task % len(TASKS)], table, get_axis(self.spec.get_suite(task)))
        self.record_solved_start(env_index, solved=self._worlds[env_index].success())

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        """Execute one action [7]: position deltas in -1..1 (0.04 m), rotations (ignored), gripper (positive closes)."""
        dx, dy, dz, *_, gripper = action.tolist()
        world = self._worlds[env_index]
        world.step(dx, dy, dz, gripper > 0.0)
        success = world.success()
        return SimStep(reward=float(success), terminated=success, success=success)

    def expert(self, env_index: int) -> FloatArray:
        """Return the expert's next action [7]."""
        return expert_action(self._worlds[env_index])

    def save(self, env_index: int) -> World:
        """Return a copy of the state of the environment's table."""
        return copy.deepcopy(self._worlds[env_index])

    def load(self, env_index: int, state: World) -> None:
        """Restore a saved state of the environment's table."""
        self._worlds[env_index] = copy.deepcopy(state)

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        """Write the camera images and proprioception [4] into the arrays of `out`."""
        world = self._worlds[env_index]
        for image, camera in zip(out.images, self.spec.cameras.names, strict=True):
            image[...] = _RENDER_FUNCTIONS[camera](world, len(image))
        out.state[:] = world.x, world.y, world.z, float(not world.closed)

    def render(self, env_index: int) -> ByteArray:
        """Return a frame [P, 2P, 3]: front view and wrist view side by side."""
        world = self._worlds[env_index]
        return np.concatenate([render_front(world, FRAME_SIZE), render_wrist(world, FRAME_SIZE)], axis=1)
