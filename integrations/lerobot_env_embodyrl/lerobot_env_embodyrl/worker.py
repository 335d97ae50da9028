"""Environment server, run as a script by a Python that has embodyrl but not necessarily LeRobot."""

from typing import Any

import numpy as np


class Simulator:
    """One environment of embodyrl."""

    def __init__(self) -> None:
        self._env: Any = None

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request.

        `make` (task, overrides) describes the environment; `reset` (episode) and `step` (action) return an observation;
        `render` returns a frame.
        """
        kind = request["request"]
        if kind == "make":
            return self._make(request["task"], request["overrides"])
        if kind == "render":
            return {"frame": np.ascontiguousarray(self._env.render())}
        if kind == "reset":
            seen, info = self._env.reset(options={"episode": request["episode"]})
            return self._seen(seen) | info
        seen, reward, terminated, truncated, info = self._env.step(request["action"])
        ended = {"reward": float(reward), "terminated": bool(terminated), "truncated": bool(truncated)}
        return self._seen(seen) | ended | info

    def _make(self, task: str, overrides: list[str]) -> dict[str, Any]:
        import embodyrl

        self._env = env = embodyrl.make_env(task, *overrides)
        layout = env.layout
        return {
            "name": layout.name,
            "cameras": tuple(layout.cameras.names),
            "size": tuple(layout.cameras.size),
            "state_dim": layout.state_dim,
            "action_low": np.asarray(layout.action.bounds[0], np.float32),
            "action_high": np.asarray(layout.action.bounds[1], np.float32),
            "max_episode_steps": env.max_episode_steps,
            "kind": str(layout.action.kind),
        }

    def _seen(self, seen: dict[str, Any]) -> dict[str, Any]:
        """Return the observation with upright images, as in the public data sets of a benchmark."""
        if "images" in seen and self._env.layout.cameras.rotation_deg == 180:
            seen = seen | {"images": np.ascontiguousarray(seen["images"][:, ::-1, ::-1])}
        return seen


HANDLER = Simulator
