"""Scripted expert for PushT, and observations and actions of PushT in the frame of the block."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import shapely  # pyright: ignore[reportMissingModuleSource]
from scipy.sparse.csgraph import dijkstra

from embodyrl.envs.robots.pusht_pushes import GAP, RADIUS, Push, PushTable, rotation
from embodyrl.types import DoubleArray, FloatArray

_TARGET_DISTANCE, _PUSH_TARGET_DISTANCE = 40.0, 20.0
"""Distance in pixels between the agent and its target position; determines the agent's speed."""
_MARGIN, _CLEARANCE = 8.0, 2.0
"""Distances in pixels between agent and block at the corners of a path and on its lines."""
_START_RADIUS, _END_MARGIN, _LINE_LOOKAHEAD_S, _END_LOOKAHEAD_S = 12.0, 2.0, 0.1, 0.05
"""A push begins 12 pixels from its start and ends 2 pixels before its end. The agent's position is extrapolated by its
velocity: by 0.1 s to follow the line of the push, by 0.05 s to detect the end."""
_LINE_TOLERANCE, _SLOWDOWN = 2.0, 2.0
"""Beyond 2 pixels, each pixel between agent and line brings the target position 2 pixels closer."""
_MAX_BLOCK_SHIFT, _MAX_BLOCK_ROTATION, _MAX_LINE_DISTANCE = 3.0, 0.05, 6.0
"""The push is discarded if the block moves by 3 pixels or 0.05 rad before the push, or the agent leaves the line."""
_MAX_PUSH_STEPS = 40
"""Maximum number of env steps to reach or to execute a push."""


_MAX_DISPLACEMENT = 60.0
"""Largest displacement of the target position in pixels, for actions in the block's frame."""


class PushTExpert(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds `expert_action` to gym-pusht: moves around the block to the next push, then pushes.

    The expert reads the simulator's state, not observations.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._table: PushTable | None = None
        self._push: Push | None = None
        self._planned_pose = np.zeros(3)
        self._pushing, self._steps = False, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and discard the current push."""
        self._push = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Execute an action of any policy."""
        self._steps += 1
        return self.env.step(action)

    def expert_action(self) -> FloatArray:
        """Return the target position [2] of the agent; plans the next push if necessary."""
        state: Any = self.env.unwrapped
        agent = np.array(state.agent.position)
        pose = np.array([*state.block.position, state.block.angle])
        table = self._table = self._table or PushTable()
        if self._push is None or self._is_finished(self._push, pose, agent, np.array(state.agent.velocity)):
            self._push = table.find(pose, agent, np.array(state.goal_pose))
            self._planned_pose, self._pushing, self._steps = pose, False, 0
        push = self._push
        if push is None:  # the block is out of reach, next to the walls
            return np.clip(agent, 0.0, 512.0).astype(np.float32)
        if not self._pushing and np.linalg.norm(agent - push.start) < _START_RADIUS:
            self._pushing, self._steps = True, 0
        if self._pushing:
            # The target depends continuously on the agent's position: policies hardly learn to stop before a push.
            distance, line_distance = push.project(agent + _LINE_LOOKAHEAD_S * np.array(state.agent.velocity))
            target_distance = distance + _PUSH_TARGET_DISTANCE - _SLOWDOWN * max(0.0, line_distance - _LINE_TOLERANCE)
            target = push.start + push.direction * float(np.clip(target_distance, 0.0, push.length))
        else:
            target = _get_next_target(_find_path_around(_place_outline(table, pose), agent, push.start))
        return target.astype(np.float32)

    def _is_finished(self, push: Push, pose: DoubleArray, agent: DoubleArray, velocity: DoubleArray) -> bool:
        """Return True if the push is finished or can no longer be executed."""
        if self._steps > _MAX_PUSH_STEPS:
            return True
        if not self._pushing:
            change = np.abs(pose - self._planned_pose)
            return bool(change[:2].max() > _MAX_BLOCK_SHIFT or change[2] > _MAX_BLOCK_ROTATION)
        distance, line_distance = push.project(agent)
        final_distance = push.project(agent + _END_LOOKAHEAD_S * velocity)[0]
        return bool(
            (line_distance > _MAX_LINE_DISTANCE and distance > GAP) or final_distance > push.length - _END_MARGIN
        )


class BlockFrame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper with observations [8] and actions [2] in the frame of the block, in pixels and pixels/s.

    Observation: position of the agent, velocity of the agent, position of the goal, cosine and sine of the goal's
    angle. Action: displacement from the agent to its target position.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (8,), np.float64)
        self.action_space = gymnasium.spaces.Box(-_MAX_DISPLACEMENT, _MAX_DISPLACEMENT, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; return the observation in the block's frame."""
        _, info = self.env.reset(seed=seed, options=options)
        return self._build_observation(), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Execute a displacement [2] in the block's frame."""
        agent, rotation_matrix = self._get_agent()
        target = np.clip(agent + rotation_matrix @ np.asarray(action, np.float64), 0.0, 512.0).astype(np.float32)
        _, reward, terminated, truncated, info = self.env.step(target)
        return self._build_observation(), reward, terminated, truncated, info

    def expert_action(self) -> FloatArray:
        """Return the expert's action, a displacement [2] in the block's frame."""
        agent, rotation_matrix = self._get_agent()
        action = rotation_matrix.T @ (self.env.get_wrapper_attr("expert_action")() - agent)
        return np.clip(action, -_MAX_DISPLACEMENT, _MAX_DISPLACEMENT).astype(np.float32)

    def _get_agent(self) -> tuple[DoubleArray, DoubleArray]:
        """Return the agent's position [2] and the rotation [2, 2] from the block's frame to the window."""
        state: Any = self.env.unwrapped
        return np.array(state.agent.position), rotation(np.array(state.block.angle))

    def _build_observation(self) -> DoubleArray:
        state: Any = self.env.unwrapped
        (agent, rotation_matrix), block, goal = self._get_agent(), np.array(state.block.position), state.goal_pose
        angle = goal[2] - state.block.angle
        velocity = rotation_matrix.T @ np.array(state.agent.velocity)
        return np.array(
            [
                *(rotation_matrix.T @ (agent - block)),
                *velocity,
                *(rotation_matrix.T @ (goal[:2] - block)),
                np.cos(angle),
                np.sin(angle),
            ]
        )


def _place_outline(table: PushTable, pose: DoubleArray) -> shapely.Polygon:
    return shapely.Polygon(table.outline @ rotation(pose[2]).T + pose[:2])


def _find_path_around(block: shapely.Polygon, start: DoubleArray, end: DoubleArray) -> DoubleArray:
    """Return the shortest path [P, 2] around the block, by a visibility graph; a straight line if there is no path."""
    corners = np.array(block.buffer(RADIUS + _MARGIN, join_style="mitre").exterior.coords)[:-1]
    corners = corners[((corners > RADIUS + 3) & (corners < 512 - RADIUS - 3)).all(1)]
    points = np.concatenate([start[None], end[None], corners])
    # An agent in contact may leave the block.
    margin = min(RADIUS + _CLEARANCE, block.distance(shapely.Point(*start)) - 0.5)
    pairs = np.array(np.triu_indices(len(points), 1))
    blocked = shapely.intersects(block.buffer(max(0.1, margin)), shapely.linestrings(points[pairs.T]))
    lengths = np.zeros((len(points), len(points)))  # 0: no edge
    rows, columns = pairs[:, ~blocked]
    lengths[rows, columns] = np.linalg.norm(points[rows] - points[columns], axis=1)
    _, previous = dijkstra(lengths, directed=False, indices=0, return_predecessors=True)
    path, node = [1], int(previous[1])
    while node > 0:
        path.append(node)
        node = int(previous[node])
    return points[[0, *reversed(path)]]


def _get_next_target(path: DoubleArray) -> DoubleArray:
    """Return the target position [2]: the next corner of the path, or a point before this corner."""
    position, corner = path[0], path[1]
    if len(path) > 2 and np.linalg.norm(corner - position) < 12.0:
        position, corner = corner, path[2]
    distance = float(np.linalg.norm(corner - position))
    return corner if distance <= _TARGET_DISTANCE else position + (corner - position) * (_TARGET_DISTANCE / distance)
