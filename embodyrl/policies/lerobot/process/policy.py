"""Client of a LeRobot process: one request per batch, and a timeout for every reply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import EmbodyError, MissingDependencyError
from embodyrl.external_python import ExternalScript
from embodyrl.policies.inputs import rotate_upright
from embodyrl.policies.lerobot.process import worker
from embodyrl.policies.lerobot.process.checkpoint import Checkpoint
from embodyrl.policies.lerobot.process.settings import LeRobotProcessSettings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.untrained.policy import InferenceOnlyPolicy
from embodyrl.types import FloatArray, Observation, PolicyOutput, PolicySpec


class LeRobotPolicy(InferenceOnlyPolicy):
    """Inference-only policy that requests chunks from a LeRobot process; implements `Policy`."""

    def __init__(
        self,
        cfg: LeRobotProcessSettings,
        spec: PolicySpec,
        request: PolicyRequest,
        folder: Path,
        saved: Checkpoint,
        views: tuple[int, ...],
    ) -> None:
        """Start the LeRobot process and load the weights there.

        Args:
            cfg: keys under `model`.
            spec: policy spec.
            request: environment, device and seed.
            folder: LeRobot's folder.
            saved: keys of config.json.
            views: index of each camera of the checkpoint among the environment's cameras of one step.

        Raises:
            ConfigError: training was requested.
            MissingDependencyError: the interpreter does not exist, or cannot import LeRobot.
            EmbodyError: LeRobot cannot load the policy.
        """
        super().__init__(spec, request)
        self._env, self._saved, self._views = request.env, saved, views
        self._python, self._timeout_s = cfg.python or sys.executable, cfg.answer_timeout_s
        # Policies have no `close` method; the LeRobot process ends with this object or this process.
        self._script = ExternalScript(self._python, worker.__file__, key="model.python", program="LeRobot")
        load_request = {"path": str(folder.resolve()), "device": request.device, "seed": request.seed}
        self._request(load_request, cfg.load_timeout_s, "model.load_timeout_s")

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Request chunks for a batch of observations (see `Policy.act`); LeRobot samples the noise.

        Raises:
            EmbodyError: LeRobot reports an error, exited, or exceeded the time limit.
        """
        count = self.spec.num_action_chunks
        request = {"tasks": list(obs.instructions), "actions": count, "steps": self._build_steps(obs)}
        return self.build_output(self._request(request, self._timeout_s, "model.answer_timeout_s")["chunk"])

    def _build_steps(self, obs: Observation) -> list[dict[str, Any]]:
        """Return the observation of each step as a dict of LeRobot features, oldest step first."""
        count = self._saved.n_obs_steps
        images = rotate_upright(obs.images, self._env.cameras.rotation_deg)
        images = images.reshape(len(obs), count, -1, *images.shape[2:]) if self._views else images
        states = obs.state.reshape(len(obs), count, -1)
        steps = []
        for step in range(count):
            pairs = zip(self._saved.cameras, self._views, strict=True)
            features: dict[str, Any] = {name: np.ascontiguousarray(images[:, step, view]) for name, view in pairs}
            start = 0
            for name, size in self._saved.states:
                features[name] = np.ascontiguousarray(states[:, step, start : start + size])
                start += size
            steps.append(features)
        return steps

    def _request(self, request: dict[str, Any], timeout_s: float, key: str) -> dict[str, Any]:
        reply = self._script.call(request, timeout_s, key)
        if "missing" in reply:
            raise MissingDependencyError(
                f"{self._python}: {reply['missing']}. Fix: pip install lerobot in a separate virtual "
                f"environment, and set model.python=<its bin/python>."
            )
        if "error" in reply:
            raise EmbodyError(
                f"model.python={self._python}: LeRobot failed: {reply['error'].rstrip('.')}. Check model.path."
            )
        return reply
