"""Read-only view of the simulation for scripted experts: poses, sizes, free space and goals of a loaded task."""

from dataclasses import dataclass
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from embodyrl.types import DoubleArray

mujoco: Any = _mujoco


_COLLISION_GROUP = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Predicate of a task's goal: `relation` (in, on) between `subject` and `target`."""

    relation: str
    subject: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Bounding box of a body's collision geometry, in meters in the world frame."""

    center: DoubleArray
    """Center [3] of the box."""
    axes: DoubleArray
    """Unit vectors [3, 3] of the box in columns; for an upright body, two are horizontal and one is vertical."""
    half: DoubleArray
    """Half extents [3] of the box along the axes."""

    @property
    def up(self) -> int:
        """Index of the axis that points up or down."""
        return int(np.argmax(np.abs(self.axes[2])))

    @property
    def top(self) -> float:
        """Height of the highest corner, meters."""
        return float(self.center[2] + np.abs(self.axes[2]) @ self.half)

    @property
    def bottom(self) -> float:
        """Height of the lowest corner, meters."""
        return float(self.center[2] - np.abs(self.axes[2]) @ self.half)


class Scene:
    """Read-only view of one task model; all lengths are in meters, in the world frame."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._model, self._data = env.sim.model._model, env.sim.data._data
        model = self._model
        solid = model.geom_group == _COLLISION_GROUP
        self._solid = np.flatnonzero(solid & (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE))
        self._hand = env.robots[0].eef_site_id
        self._robot_bodies = {i for i in range(model.nbody) if model.body(i).name.startswith(("robot0", "gripper0"))}
        self._base = model.body("robot0_base").id
        self._fingers = [model.body(f"gripper0_{side}finger").id for side in ("left", "right")]
        self.goals = tuple(
            Goal(relation=state[0].lower(), subject=state[1], target=state[2])
            for state in env.parsed_problem["goal_state"]
            if len(state) == 3
        )

    def refresh(self) -> None:
        """Compute body poses from the current joint positions, without affecting the next simulation step."""
        mujoco.mj_kinematics(self._model, self._data)

    def is_reached(self, goal: Goal) -> bool:
        """Return True if the goal's predicate is true in the current state."""
        # Contacts may still be those of another environment on the same model.
        mujoco.mj_fwdPosition(self._model, self._data)
        return bool(self._env._eval_predicate([goal.relation, goal.subject, goal.target]))

    @property
    def hand(self) -> DoubleArray:
        """Position [3] of the point between the fingertips."""
        return self._data.site_xpos[self._hand].copy()

    @property
    def hand_axis(self) -> DoubleArray:
        """Unit vector [3] in the direction of the hand."""
        return self._data.site_xmat[self._hand].reshape(3, 3)[:, 2].copy()

    @property
    def finger_axis(self) -> DoubleArray:
        """Horizontal unit vector [2] from one finger to the other."""
        left, right = (self._data.xpos[body][:2] for body in self._fingers)
        return (left - right) / np.linalg.norm(left - right)

    def get_box(self, name: str) -> Box:
        """Return the bounding box of an object or fixture."""
        body = self._env.obj_body_id[name]
        rotation, position = self._data.xmat[body].reshape(3, 3), self._data.xpos[body]
        geoms = self._solid[np.isin(self._model.geom_bodyid[self._solid], list(self._get_subtree(body)))]
        centers, halves = self._compute_extents(geoms, rotation)
        # In the body's own frame, in which the box is tight for any rotation.
        centers = (centers - position) @ rotation
        low, high = (centers - halves).min(axis=0), (centers + halves).max(axis=0)
        return Box(center=position + rotation @ (low + high) / 2, axes=rotation.copy(), half=(high - low) / 2)

    def get_owner(self, name: str) -> str:
        """Return the object or fixture that a region belongs to; return the name of an object or fixture as is."""
        return name if name in self._env.obj_body_id else self._env.object_sites_dict[name].parent_name

    def get_position(self, name: str) -> DoubleArray:
        """Return the horizontal position [2] of an object's center, or of a region."""
        if name in self._env.obj_body_id:
            return self.get_box(name).center[:2]
        return self._data.site_xpos[self._model.site(name).id][:2].copy()

    def get_obstacle_heights(self, points: DoubleArray, radius: float, excluded: tuple[str, ...]) -> DoubleArray:
        """Return the height of the highest solid within `radius` of each horizontal point [P, 2]; -inf without solids.

        Excludes the robot and the bodies in `excluded`. Shapes are approximated by bounding boxes.
        """
        ignored = self._robot_bodies.union(*(self._get_subtree(self._env.obj_body_id[name]) for name in excluded))
        geoms = self._solid[~np.isin(self._model.geom_bodyid[self._solid], list(ignored))]
        centers, halves = self._compute_extents(geoms, np.eye(3))
        is_near = (np.abs(points[:, None] - centers[None, :, :2]) < halves[None, :, :2] + radius).all(axis=2)
        return np.where(is_near, (centers + halves)[None, :, 2], -np.inf).max(axis=1, initial=-np.inf)

    def get_max_height_between(
        self, start: DoubleArray, end: DoubleArray, radius: float, excluded: tuple[str, ...]
    ) -> float:
        """Return the height of the highest solid within `radius` of a line between two points; -inf if none."""
        fractions = np.linspace(0.0, 1.0, 12)[:, None]
        return float(self.get_obstacle_heights(start + fractions * (end - start), radius, excluded).max())

    def get_distance_from_base(self, point: DoubleArray) -> float:
        """Return the horizontal distance of a point from the robot's base."""
        return float(np.linalg.norm(point[:2] - self._data.xpos[self._base][:2]))

    def _compute_extents(self, geoms: npt.NDArray[np.int64], frame: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
        """Return centers [G, 3] of the geoms' bounding boxes, and half extents [G, 3] along the columns of `frame`."""
        rotation = self._data.geom_xmat[geoms].reshape(-1, 3, 3)
        local, half = self._model.geom_aabb[geoms, :3], self._model.geom_aabb[geoms, 3:]
        centers = self._data.geom_xpos[geoms] + np.einsum("gij,gj->gi", rotation, local)
        return centers, np.einsum("gij,gj->gi", np.abs(frame.T @ rotation), half)

    def _get_subtree(self, body: int) -> set[int]:
        """Return the ids of a body and of all its descendants."""
        subtree = {body}
        for child in range(body + 1, self._model.nbody):  # parents come before their children
            if int(self._model.body_parentid[child]) in subtree:
                subtree.add(child)
        return subtree
