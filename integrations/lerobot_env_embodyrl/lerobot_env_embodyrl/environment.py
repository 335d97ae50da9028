"""Gymnasium environment whose simulator runs in a process with embodyrl."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lerobot_env_embodyrl.process import Worker

FIRST_SEED = 1000
"""Default seed of LeRobot's evaluation, the seed of the first episode."""
_WORKER = Path(__file__).parent / "worker.py"


def start_simulator(task: str, overrides: list[str], python: str | None, timeout_s: float) -> Worker:
    """Start the process of an environment; `description` of the result has its sizes.

    Raises:
        WorkerError: embodyrl is missing, or rejects the task or an override.
    """
    arguments = {"request": "make", "task": task, "overrides": overrides}
    return Worker(_WORKER, arguments, python=python, timeout_s=timeout_s)


class SimulatorEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Environment with LeRobot's observations: `pixels` (by camera) and `agent_pos`.

    Seed 1000 + i starts episode i of `embodyrl eval` with the same settings.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    render_mode = "rgb_array"

    def __init__(self, task: str, overrides: list[str], python: str | None, timeout_s: float) -> None:
        """Start the simulator."""
        self._worker = start_simulator(task, overrides, python, timeout_s)
        layout = self._worker.description
        self._cameras, self._episode = layout["cameras"], -1
        self._max_episode_steps: int = layout["max_episode_steps"]
        self.task, self.task_description = task, ""
        self.action_space = spaces.Box(layout["action_low"], layout["action_high"], dtype=np.float32)
        parts: dict[str, spaces.Space[Any]] = {}
        if self._cameras:
            image = spaces.Box(0, 255, (*layout["size"], 3), np.uint8)
            parts["pixels"] = spaces.Dict(dict.fromkeys(self._cameras, image))
        if layout["state_dim"]:
            parts["agent_pos"] = spaces.Box(-np.inf, np.inf, (layout["state_dim"],), np.float32)
        self.observation_space = spaces.Dict(parts)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: 1000 + i, or i below 1000, starts episode i; None: the next episode.
            options: not used.
        """
        super().reset(seed=seed)
        self._episode = self._episode + 1 if seed is None else seed - FIRST_SEED if seed >= FIRST_SEED else seed
        reply = self._worker.ask(request="reset", episode=self._episode)
        self.task_description = reply["instruction"]
        return self._seen(reply), {"is_success": False, "reset_id": reply["reset_id"], "task_id": reply["task"]}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        reply = self._worker.ask(request="step", action=np.asarray(action, np.float32))
        info = {"is_success": reply["success"]}
        return self._seen(reply), reply["reward"], reply["terminated"], reply["truncated"], info

    def render(self) -> Any:
        """Return a video frame [H, W, 3] uint8."""
        return self._worker.ask(request="render")["frame"]

    def close(self) -> None:
        """End the process of the simulator."""
        self._worker.close()

    def _seen(self, reply: dict[str, Any]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        if self._cameras:
            seen["pixels"] = dict(zip(self._cameras, reply["images"], strict=True))
        if "state" in reply:
            seen["agent_pos"] = reply["state"]
        return seen
