"""Policy server, run as a script by a Python that has embodyrl but not necessarily LeRobot."""

from typing import Any

import numpy as np


class Policy:
    """One policy of embodyrl."""

    def __init__(self) -> None:
        self._loaded: Any = None

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request: `load` (run, overrides) describes the policy, `act` returns chunks [B, K, A]."""
        if request["request"] == "load":
            return self._load(request["run"], request["overrides"])
        seen: dict[str, Any] = {name: request[name] for name in ("images", "state") if name in request}
        if request["instructions"]:
            seen["instruction"] = request["instructions"]
        if "images" in seen and self._loaded.run_plan.env.cameras.rotation_deg == 180:
            seen["images"] = seen["images"][:, :, ::-1, ::-1]
        return {"actions": np.ascontiguousarray(self._loaded.act(seen))}

    def _load(self, run: str, overrides: list[str]) -> dict[str, Any]:
        import embodyrl

        self._loaded = embodyrl.load_policy(run, *overrides)
        inputs, env = self._loaded.policy.spec.inputs, self._loaded.run_plan.env
        return {
            "cameras": tuple(env.cameras.names) if inputs.num_images else (),
            "state_dim": env.state_dim if inputs.state else 0,
        }


HANDLER = Policy
