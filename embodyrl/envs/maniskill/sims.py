"""Simulators and scripted experts for ManiSkill tasks; simulators on the CPU share the renderer and shaders."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.envs.maniskill.settings import ManiSkillSettings
from embodyrl.envs.maniskill.simulator import build, restart, restart_rows, state
from embodyrl.envs.simulators import PerSlot, SimStep, SimSteps, Simulators
from embodyrl.types import ByteArray, DoubleArray, EnvSpec, FloatArray, IntArray, ObservationOut

_UNIT = 0.1
"""Metres and radians per unit of an action."""

_ABOVE = 0.06
"""Travel height of the hand above a cube, metres."""

_OPEN, _CLOSED = 1.0, -1.0


class Expert:
    """Scripted expert for one episode; needs at most 50 steps, the time limit of the tasks."""

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
        """True if the hand is behind the cube (push and pull tasks), or if the cube is on the other cube
        (StackCube)."""
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
        # A cube is symmetric under a quarter turn; the hand points down, so it turns the other way round.
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
        # The side of a cube is 0.04 m.
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
        """Return the action that moves the closed hand behind the cube, then pushes the cube along x to the target."""
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
    """Return an action [7] that moves the hand towards `goal`, with each component limited to `speed`."""
    delta = (np.asarray(goal) - start) / _UNIT
    largest = np.abs(delta).max()
    action = np.zeros(7)
    action[:3] = delta if largest <= speed else delta * (speed / largest)
    action[6] = gripper
    return action


def _position(body: Any) -> DoubleArray:
    return body.pose.p[0].double().numpy()


def _yaw(body: Any) -> float:
    """Return the heading of the body's x axis, rad."""
    w, x, y, z = body.pose.q[0].tolist()
    return float(np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z)))


class _Slots(Simulators):
    """Base class of ManiSkillSims and BatchSims, which render a frame only if it is observed or recorded."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings) -> None:
        super().__init__(spec)
        self._cfg = cfg

    def _outcomes(self, env: Any, reward: Any, terminated: Any, info: dict[str, Any]) -> SimSteps:
        """Return the results of a step for all environments of a batch."""
        success = info.get("success", terminated & False)
        # Some tasks have no reward, or only on request.
        earned = success if env.reward_mode == "none" else reward
        ended, reached = terminated.cpu().numpy(), success.cpu().numpy()
        return SimSteps(
            reward=earned.cpu().numpy().astype(np.float64),
            terminated=ended,
            success=reached,
            truncated=np.zeros(len(ended), np.bool_),
        )

    def _read(self, env: Any, info: dict[str, Any]) -> list[np.ndarray]:
        """Return a list: the states [N, S], then the images [N, H, W, 3] of each camera."""
        pictures = env._get_obs_sensor_data() if self.spec.cameras.names else {}
        seen = [state(env, self._cfg.obs_mode, info), *(pictures[camera]["rgb"] for camera in self.spec.cameras.names)]
        return [part.cpu().numpy() for part in seen]


class ManiSkillSims(_Slots, PerSlot):
    """Simulators of one task, one per slot."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings) -> None:
        super().__init__(spec, cfg)
        self._envs: dict[int, Any] = {}
        self._infos: dict[int, dict[str, Any]] = {}
        self._experts: dict[int, Expert] = {}

    def reset_slot(self, slot: int, reset_id: int, seed: int) -> None:
        """Start the episode of the reset id, which is the seed of all randomness."""
        if slot not in self._envs:
            self._envs[slot] = build(self._cfg, self._cfg.obs_mode)
        self._infos[slot] = restart(self._cfg, self._envs[slot], reset_id, self.spec.cameras.names)
        self.note_start(slot, solved=bool(_row(self._infos[slot], 0).get("success", False)))
        self._experts.pop(slot, None)

    def step_slot(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [A], clipped by ManiSkill to the action bounds."""
        _, reward, terminated, _, self._infos[slot] = self._envs[slot].step(action)
        step = self._outcomes(self._envs[slot], reward, terminated, self._infos[slot])
        return SimStep(reward=float(step.reward[0]), terminated=bool(step.terminated[0]), success=bool(step.success[0]))

    def expert(self, slot: int) -> FloatArray:
        """Return the expert's next action [7]; a new expert is created at the start of each episode."""
        if slot not in self._experts:
            self._experts[slot] = Expert(self._envs[slot], self.spec.name)
        return self._experts[slot].act()

    def observe_slot(self, slot: int, out: ObservationOut) -> None:
        """Write the camera images and the state vector into the arrays of `out`."""
        seen = self._read(self._envs[slot], self._infos[slot])
        out.state[:] = seen[0][0]
        for view, picture in zip(out.images, seen[1:], strict=True):
            view[...] = picture[0]

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's video camera."""
        return self._envs[slot].render_rgb_array()[0].numpy()

    def info(self, slot: int) -> dict[str, Any]:
        """Return the values of ManiSkill's `evaluate()` by name."""
        return _row(self._infos[slot], 0)

    def close(self) -> None:
        """Free the simulators; idempotent."""
        while self._envs:
            self._envs.popitem()[1].close()


class BatchSims(_Slots):
    """Simulators whose slots are one batched simulation, which steps all slots together."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings, num_slots: int) -> None:
        super().__init__(spec, cfg)
        self._env: Any = build(cfg, cfg.obs_mode, num_slots)
        self._actions = np.zeros((num_slots, spec.action.dim), np.float32)
        self._info: dict[str, Any] = {}
        self._seen: list[np.ndarray] = []

    def reset(self, slots: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Start the episodes of the reset ids, which are the seeds of all randomness."""
        chosen = dict(zip(slots.tolist(), reset_ids.tolist(), strict=True))
        self._info = restart_rows(self._cfg, self._env, chosen, self.spec.cameras.names)
        for slot in chosen:
            self.note_start(slot, solved=bool(_row(self._info, slot).get("success", False)))
        self._seen = []

    def step(self, slots: IntArray, actions: FloatArray) -> SimSteps:
        """Step the whole batch; slots without an action repeat their last action."""
        self._actions[slots] = actions
        _, reward, terminated, _, self._info = self._env.step(self._actions)
        self._seen = []
        step = self._outcomes(self._env, reward, terminated, self._info)
        return SimSteps(
            reward=step.reward[slots],
            terminated=step.terminated[slots],
            success=step.success[slots],
            truncated=step.truncated[slots],
        )

    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observations of the slots; images are rendered once for all slots."""
        if not self._seen:
            self._seen = self._read(self._env, self._info)
        state[rows] = self._seen[0][slots]
        for camera, pictures in enumerate(self._seen[1:]):
            images[rows, camera] = pictures[slots]

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's video camera."""
        return self._env.render_rgb_array()[slot].cpu().numpy()

    def info(self, slot: int) -> dict[str, Any]:
        """Return the values of ManiSkill's `evaluate()` for the slot, by name."""
        return _row(self._info, slot)

    def close(self) -> None:
        """Free the batch; idempotent."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _row(info: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: value[row].tolist() if getattr(value, "ndim", 0) else value for name, value in info.items()}
