"""Gymnasium environment for robosuite 1.5, which runs in a separate process of another Python environment."""

import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodyrl.envs.robots import robosuite_server
from embodyrl.errors import EmbodyError, MissingDependencyError
from embodyrl.external_python import ExternalScript

_LOAD_S, _STEP_S = 300.0, 120.0


class RobosuiteEnv(gymnasium.Env[Any, np.ndarray]):
    """Environment of one robosuite task with a Panda arm; success terminates an episode.

    The requirements of robosuite 1.5 (numpy 1.26, mink) conflict with LIBERO, which needs robosuite 1.4.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        task: str,
        python: str | None = None,
        camera: str | None = None,
        height: int = 84,
        width: int = 84,
        options: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Start the process and load the task.

        Args:
            task: Lift, Stack, Door, ...
            python: interpreter that has robosuite 1.5; None: this interpreter.
            camera: camera of the observation; None: the observation contains object poses.
            height: height of the image, pixels.
            width: width of the image, pixels.
            options: additional arguments of `robosuite.make`, for example `reward_shaping`.
            render_mode: rgb_array, or None.

        Raises:
            MissingDependencyError: robosuite is missing in the other environment.
            EmbodyError: robosuite reports an error.
        """
        self.render_mode, self._python = render_mode, python or sys.executable
        self._script = ExternalScript(self._python, robosuite_server.__file__, key="env.python", program="robosuite")
        renders = render_mode is not None or camera is not None
        description = self._request(("make", task, camera, (height, width), renders, options or {}), _LOAD_S)
        state = spaces.Box(-np.inf, np.inf, (description["state"],), np.float64)
        image = {} if camera is None else {camera: spaces.Box(0, 255, (height, width, 3), np.uint8)}
        self._camera = camera
        self.observation_space = spaces.Dict({**image, "state": state})
        low, high = (np.array(description[bound], np.float32) for bound in ("low", "high"))
        self.action_space = spaces.Box(low, high)
        if description["expert"]:
            self.expert_action = self._expert_action

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the seed determines the initial state."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        return self._unpack_observation(self._request(("reset", number))), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action [7]: changes of the gripper's position and rotation, and the gripper command."""
        observation, reward, success = self._request(("step", action.tolist()))
        return self._unpack_observation(observation), reward, success, False, {"is_success": success}

    def render(self) -> np.ndarray:
        """Return an image of the front camera, [256, 256, 3] uint8."""
        return _unpack_array(self._request(("render",)))

    def close(self) -> None:
        """Stop the process; idempotent."""
        self._script.close()

    def _expert_action(self) -> np.ndarray:
        return _unpack_array(self._request(("expert",)))

    def _unpack_observation(self, observation: Any) -> dict[str, np.ndarray]:
        state, image = observation
        return {"state": _unpack_array(state)} | ({} if self._camera is None else {self._camera: _unpack_array(image)})

    def _request(self, request: tuple[Any, ...], limit_s: float = _STEP_S) -> Any:
        level, reply = self._script.call(request, limit_s, "a fixed limit")
        if level == "missing":
            raise MissingDependencyError(
                f"{self._python}: {reply}. Fix: pip install robosuite==1.5.2 in a separate environment, and set "
                "env.python to the bin/python of that environment."
            )
        if level == "error":
            raise EmbodyError(f"robosuite in {self._python} failed: {reply}")
        return reply


def _unpack_array(parts: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    kind, shape, data = parts
    return np.frombuffer(data, kind).reshape(shape)
