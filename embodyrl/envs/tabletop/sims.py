"""Tabletop as slot simulators: plain Python per table, which at a few microseconds a step needs no batching."""

import numpy as np

from embodyrl.envs.simulators import SimStep, SlotSimulators
from embodyrl.envs.tabletop.expert import expert_action
from embodyrl.envs.tabletop.views import FRONT, WRIST, draw_front, draw_wrist
from embodyrl.envs.tabletop.world import TASKS, Axis, World, new_world
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut

CAMERAS = (FRONT, WRIST)

STATE_DIM = 4
"""Gripper position x, y, z (m) and opening (1 open, 0 closed)."""

FRAME_SIZE = 288
"""P: side of each picture in a frame to look at, pixels."""


def suite_name(axis: Axis) -> str:
    """What the suite of an axis is called: `tabletop` without change, else `tabletop_<axis>`."""
    return "tabletop" if axis is Axis.base else f"tabletop_{axis}"


def axis_of(suite: str) -> Axis:
    """Inverse of `suite_name`."""
    return next(axis for axis in Axis if suite_name(axis) == suite)


class TabletopSims(SlotSimulators):
    """Slots of the tabletop environment. It has no randomness beside the reset id."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self._worlds: dict[int, World] = {}

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Lay the table of `reset_id`; the seed has nothing to decide."""
        task, _ = self.spec.task_of(reset_id)
        # The same tables on every axis: reset ids of other suites count on from those of the first.
        table = reset_id % self.spec.reset_ids_of(len(TASKS) - 1).stop
        self._worlds[slot] = new_world(TASKS[task % len(TASKS)], table, axis_of(self.spec.suite_of(task)))

    def step(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [7]: position deltas in -1..1 (0.04 m), rotations (ignored), gripper (positive closes)."""
        dx, dy, dz, *_, gripper = action.tolist()
        world = self._worlds[slot]
        world.step(dx, dy, dz, gripper > 0.0)
        success = world.success()
        return SimStep(reward=float(success), terminated=success, success=success)

    def expert(self, slot: int) -> FloatArray:
        """Return the expert's next action [7]."""
        return expert_action(self._worlds[slot])

    def observe(self, slot: int, out: ObservationOut) -> None:
        """Draw the cameras of the spec and write proprioception [4] into the views."""
        world = self._worlds[slot]
        for view, camera in zip(out.images, self.spec.cameras, strict=True):
            view[...] = (draw_front if camera == FRONT else draw_wrist)(world, len(view))
        out.state[:] = world.x, world.y, world.z, float(not world.closed)

    def render(self, slot: int) -> ByteArray:
        """Return a frame [P, 2P, 3]: front view and wrist view side by side."""
        world = self._worlds[slot]
        return np.concatenate([draw_front(world, FRAME_SIZE), draw_wrist(world, FRAME_SIZE)], axis=1)
