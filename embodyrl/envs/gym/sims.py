"""Simulators for Gymnasium environments, with one instance per environment."""

import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.error import Error as GymnasiumError

from embodyrl.envs.gym.api import begin_episode, require_step, to_bool, to_float
from embodyrl.envs.gym.create import GL_FIX, AnyEnv
from embodyrl.envs.gym.episode_info import get_final_step, get_success_keys, read_instruction, read_success
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import ObservationWriter, make_action_converter, make_action_flattener
from embodyrl.envs.simulators import SequentialSimulators, SimStep, Simulators
from embodyrl.errors import EnvError, NoImageError, format_error
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measured properties of an environment; for a vector environment, the properties of one of its environments."""

    spec: EnvSpec
    observation_space: Space[Any]
    action_space: Space[Any]
    kwargs: dict[str, Any]
    """Constructor arguments: `env.kwargs`, and the render mode if the constructor accepts a render mode."""


class GymSimulators(Simulators):
    """Base class of Gymnasium simulators, which stores the last observations and renders frames."""

    def __init__(self, cfg: GymSettings, probe: Probe) -> None:
        super().__init__(probe.spec)
        self._cfg = cfg
        self._success_keys = get_success_keys(cfg)
        self._instructions: dict[int, str | None] = {}
        self._convert_action = make_action_converter(self.spec.name, probe.action_space)
        self._writer = ObservationWriter(self.spec.name, probe.observation_space)
        self._observations: dict[int, Any] = {}

    def render(self, env_index: int) -> ByteArray:
        """Return a rendered frame, or the image observation of an environment that does not render.

        Raises:
            EnvError: the environment has neither a render mode nor an image observation.
        """
        try:
            frame = self._render_frame(env_index)
        except GymnasiumError as error:
            raise NoImageError(
                f"env '{self.spec.name}' cannot render: {error}. To record no video, set video=none."
            ) from error
        except Exception as error:
            if not re.search(r"OpenGL|gl\w*Context|GLFW|DISPLAY|EGL|OSMesa", f"{type(error)} {error}"):
                raise
            problem = f"cannot render on this machine: {format_error(error)}. {GL_FIX}"
            raise NoImageError(f"env '{self.spec.name}' {problem}") from error
        if frame is None and not self.spec.cameras.names:
            problem = "add the render mode 'rgb_array' or an image observation, or set video=none"
            raise NoImageError(f"env '{self.spec.name}' has no image to record: {problem}.")
        return self._writer.get_latest_frame(self._observations[env_index]) if frame is None else to_single_frame(frame)

    def instruction(self, env_index: int) -> str | None:
        """Return the instruction of the environment's episode (see `Simulators.instruction`)."""
        return self._instructions.get(env_index)

    def _read_instruction(self, env_index: int, info: Mapping[str, Any], env: Any = None) -> None:
        if not self.spec.text.prompt_bytes:
            return
        text = read_instruction(self._cfg, self._writer.texts, self._observations[env_index], info, env)
        if text is not None and len(text.encode("utf-8", errors="replace")) > self.spec.text.prompt_bytes:
            raise EnvError(
                f"env '{self.spec.name}': the instruction {text!r:.60} is longer than "
                f"{self.spec.text.prompt_bytes} bytes, the limit of its Text space or the bytes reserved for it. "
                "Fix: declare a longer Text space, or set env.instruction."
            )
        self._instructions[env_index] = text

    @abstractmethod
    def _render_frame(self, env_index: int) -> Any:
        """Render a frame; return None without a render mode."""


class GymSims(GymSimulators, SequentialSimulators):
    """Simulators that create a separate Gymnasium environment for each `env_index`."""

    def __init__(self, cfg: GymSettings, probe: Probe, create: Callable[..., Any]) -> None:
        super().__init__(cfg, probe)
        self._flatten_action = make_action_flattener(self.spec.name, probe.action_space)
        self._create = create
        self._envs: dict[int, AnyEnv] = {}
        self._infos: dict[int, dict[str, Any]] = {}

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        """Reset the environment with the reset id as seed, which determines the initial state and all randomness."""
        if env_index not in self._envs:
            self._envs[env_index] = self._create()
        env = self._envs[env_index]
        self._observations[env_index], self._infos[env_index] = begin_episode(self.spec.name, env, reset_id)
        self._read_instruction(env_index, self._infos[env_index], env)
        success = read_success(self._infos[env_index], self._success_keys)
        self.record_solved_start(env_index, solved=bool(to_bool(self.spec.name, "success in info", success)))

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        """Execute one action [A]; read success from `info`."""
        name = self.spec.name
        result = require_step(name, self._envs[env_index].step(self._convert_action(action)))
        observation, reward, terminated, truncated, info = result
        terminated, truncated = to_bool(name, "terminated", terminated), to_bool(name, "truncated", truncated)
        if terminated or truncated:
            observation, info = get_final_step(observation, info)
        self._observations[env_index], self._infos[env_index] = observation, info
        return SimStep(
            reward=to_float(name, reward),
            terminated=terminated,
            success=to_bool(name, "success in info", read_success(info, self._success_keys)),
            truncated=truncated,
        )

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        """Write the environment's last observation into the arrays of `out`."""
        self._writer.write(self._observations[env_index], out)

    def expert(self, env_index: int) -> FloatArray:
        """Return the action of the environment's own `expert_action()`."""
        return self._flatten_action(self._envs[env_index].get_wrapper_attr("expert_action")())

    def info(self, env_index: int) -> dict[str, Any]:
        """Return the environment's `info` of the last step."""
        return self._infos[env_index]

    def close(self) -> None:
        """Close the environments; idempotent.

        An error of the environment's `close` is only logged, because the results are complete.
        """
        while self._envs:
            try:
                self._envs.popitem()[1].close()
            except Exception as error:
                log.warning("close() of env '%s' failed: %s", self.spec.name, format_error(error))

    def _render_frame(self, env_index: int) -> Any:
        env = self._envs[env_index]
        frame = env.render() if env.render_mode == "rgb_array" else None
        if frame is None and env.render_mode == "rgb_array" and not self.spec.cameras.names:
            raise EnvError(f"env '{self.spec.name}': render() returned None, expected an image [H, W, 3].")
        return frame


def to_single_frame(frame: Any) -> ByteArray:
    """Return a rendered image [H, W, 3]; images of several cameras are placed side by side."""
    if isinstance(frame, Mapping):
        frame = list(frame.values())
    if isinstance(frame, (list, tuple)):
        same_shape = [item for item in frame if np.shape(item) == np.shape(frame[0])]
        return to_single_frame(np.stack(same_shape) if same_shape else np.zeros((1, 1, 1, 3), np.uint8))
    array = np.asarray(frame)
    if array.ndim == 4:
        array = np.concatenate([*array], axis=1)
    if array.ndim == 2 or (array.ndim == 3 and array.shape[-1] == 1):
        array = np.repeat(array.reshape(*array.shape[:2], 1), 3, axis=2)
    if array.ndim != 3 or array.shape[-1] not in (3, 4):
        raise EnvError(f"render returned an image of shape {array.shape}, expected [H, W, 3].")
    if array.dtype.kind in "fb":  # values in 0..1, as in Matplotlib, or in 0..255
        array = np.rint(np.clip(array * (255.0 if array.max(initial=0) <= 1 else 1.0), 0, 255))
    return array[..., :3].astype(np.uint8, copy=False)
