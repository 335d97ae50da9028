"""Scripted experts of four tasks: reactive, privileged, straight in hand displacements."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.types import DoubleArray, FloatArray

_UNIT = 0.1
"""Metres and radians of an action of 1."""

_ABOVE = 0.06
"""Height over a cube at which the hand travels, metres."""

_OPEN, _CLOSED = 1.0, -1.0


class Expert:
    """Plays one episode; stays within the tasks' 50 steps."""

    def __init__(self, env: Any, name: str) -> None:
        self._env = env
        plans: dict[str, Callable[[], DoubleArray]] = {
            "PickCube-v1": self._pick,
            "StackCube-v1": self._stack,
            "PushCube-v1": lambda: self._slide(forward=1.0),
            "PullCube-v1": lambda: self._slide(forward=-1.0),
        }
        self._plan = plans[name]
        self._in_place = False
        """Sliding: behind the cube; stacking: the cube lies on the other one."""
        self._waited = 0

    def act(self) -> FloatArray:
        """Return the next action [7] in -1..1."""
        return np.clip(self._plan(), -1.0, 1.0).astype(np.float32)

    @property
    def _hand(self) -> DoubleArray:
        return _position(self._env.agent.tcp)

    def _pick(self) -> DoubleArray:
        env = self._env
        if bool(env.agent.is_grasping(env.cube)[0]):
            return _move(_position(env.cube), _position(env.goal_site), _CLOSED, speed=0.6)
        return self._grasp(env.cube)

    def _grasp(self, cube: Any) -> DoubleArray:
        hand, target = self._hand, _position(cube)
        # A cube looks the same after a quarter turn; the hand points down, so it turns the other way round.
        turn = (_yaw(cube) - _yaw(self._env.agent.tcp) + np.pi / 4) % (np.pi / 2) - np.pi / 4
        aside = np.linalg.norm(hand[:2] - target[:2]) > 0.012
        if aside and hand[2] < target[2] + 0.04:
            action = _move(hand, [*hand[:2], target[2] + _ABOVE], _OPEN)
        elif aside:
            action = _move(hand, [*target[:2], target[2] + _ABOVE], _OPEN)
        elif hand[2] > target[2] + 0.008:
            action = _move(hand, target, _OPEN)
        else:
            return _move(hand, hand, _CLOSED)
        action[5] = 0.5 * np.clip(turn / _UNIT, -1.0, 1.0)
        return action

    def _stack(self) -> DoubleArray:
        env, hand = self._env, self._hand
        cube, base = _position(env.cubeA), _position(env.cubeB)
        offset = cube - base
        centred = np.linalg.norm(offset[:2])
        # 0.04 m is the side of a cube.
        lies = centred < 0.012 and abs(offset[2] - 0.04) < 0.006
        held = bool(env.agent.is_grasping(env.cubeA)[0])
        if self._in_place or (lies and held):
            self._in_place = True
            self._waited += 1
            up = [0.0, 0.0, 0.05 if self._waited > 2 else 0.0]
            return _move(hand, hand + up, _OPEN, speed=0.5)
        if not held:
            return self._grasp(env.cubeA)
        if centred > 0.008 and offset[2] < 0.055:
            goal = [cube[0], cube[1], base[2] + 0.075]
        elif centred > 0.008:
            goal = [base[0], base[1], base[2] + 0.07]
        else:
            goal = [base[0], base[1], base[2] + 0.042]
        return _move(cube, goal, _CLOSED, speed=0.5)

    def _slide(self, forward: float) -> DoubleArray:
        """Get behind the cube with a closed hand, then take it along +x or -x to its target."""
        hand, cube, goal = self._hand, _position(self._env.obj), _position(self._env.goal_region)
        height = 0.02 if forward > 0 else 0.03
        start = np.array([cube[0] - forward * 0.06, cube[1], height])
        if not self._in_place:
            distance = np.linalg.norm(hand[:2] - start[:2])
            behind = (hand[0] - cube[0]) * forward < -0.03
            self._in_place = bool(np.linalg.norm(hand - start) < 0.02)
            high = distance > (0.025 if behind else 0.02)
            return _move(hand, [start[0], start[1], 0.11] if high else start, _CLOSED)
        return _move(hand, [hand[0] + goal[0] - cube[0], cube[1], height], _CLOSED, speed=0.5)


def _move(start: DoubleArray, goal: npt.ArrayLike, gripper: float, *, speed: float = 1.0) -> DoubleArray:
    """Action [7] towards `goal`, no component of it faster than `speed`."""
    delta = (np.asarray(goal) - start) / _UNIT
    largest = np.abs(delta).max()
    action = np.zeros(7)
    action[:3] = delta if largest <= speed else delta * (speed / largest)
    action[6] = gripper
    return action


def _position(body: Any) -> DoubleArray:
    return body.pose.p[0].double().numpy()


def _yaw(body: Any) -> float:
    """Heading of the body's x axis, rad."""
    w, x, y, z = body.pose.q[0].tolist()
    return float(np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z)))
