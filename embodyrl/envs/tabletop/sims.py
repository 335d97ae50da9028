"""Tabletop as slot simulators: plain Python per table, which at a few microseconds a step needs no batching."""

import numpy as np

from embodyrl.envs.simulators import SimStep, SlotSimulators
from embodyrl.envs.tabletop.expert import expert_action
from embodyrl.envs.tabletop.views import FRONT, WRIST, draw_front, draw_wrist
from embodyrl.envs.tabletop.world import TASKS, World, new_world
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut

CAMERAS = (FRONT, WRIST)

STATE_DIM = 4
"""Gripper position x, y, z (m) and opening (1 open, 0 closed)."""

FRAME_SIZE = 288
"""P: side of each picture in a frame to look at, pixels."""


class TabletopSims(SlotSimulators):
    """Slots of the tabletop environment. It has no randomness beside the reset id."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self._worlds: dict[int, World] = {}

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Lay the table of `reset_id`; the seed has nothing to decide."""
        self._worlds[slot] = new_world(TASKS[self.spec.task_of(reset_id)[0]], reset_id)

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
