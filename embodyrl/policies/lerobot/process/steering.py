"""Actors on a frozen LeRobot policy.

`CorrectedLeRobot` corrects the actions (residual policy, arXiv 2407.16677, 2412.13630); `NoisedLeRobot` chooses the
initial noise (DSRL, arXiv 2506.15799).
"""

import os
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.policies.lerobot.process.checkpoint import Checkpoint
from embodyrl.policies.lerobot.process.policy import LeRobotPolicy
from embodyrl.policies.lerobot.process.settings import GRID, LeRobotProcessSettings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.steering.actor import HeadedModule, Seen, Steered, executed
from embodyrl.policies.steering.settings import SHAPE_FILE, SteeringShape
from embodyrl.policies.tensors import on_device
from embodyrl.policies.vla.sampling import seeds_of_observations
from embodyrl.policies.weights import fill_weights
from embodyrl.types import FloatArray, IntArray, Observation, PolicySpec

HEADS_FILE = "embodyrl_heads.safetensors"
"""File of the actor and the value head, which LeRobot does not read."""


class SteeredLeRobot(Steered, LeRobotPolicy):
    """Policy with a frozen LeRobot policy and a trained actor; implements `SoftActor`."""

    def __init__(
        self,
        cfg: LeRobotProcessSettings,
        spec: PolicySpec,
        request: PolicyRequest,
        folder: Path,
        saved: Checkpoint,
        views: tuple[int, ...],
        shape: SteeringShape,
    ) -> None:
        """Start the process and build the actor; load the actor's weights if the folder has an actor."""
        super().__init__(cfg, spec, request, folder, saved, views)
        self._folder, self._device = folder, torch.device(request.device)
        self._temperature = request.temperature
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            self._module = HeadedModule(nn.Identity())
            self._module.add_value_head(shape.features, spec.value_dim)
            self._module.add_actor(shape)
        self.module = self._module.to(self._device).requires_grad_(request.trainable).eval()
        self.load_weights(folder)

    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V]."""
        with torch.no_grad():
            return self._see(obs).value.cpu().numpy()

    def save(self, folder: Path) -> None:
        """Write actor and value head, and link or copy LeRobot's files, which stay unchanged."""
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and path.name not in (HEADS_FILE, SHAPE_FILE):
                _duplicate(path.resolve(), folder / path.name)
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in self._module.state_dict().items()}
        save_file(state, folder / HEADS_FILE)
        self._actor.shape.save(folder)

    def load_weights(self, folder: Path) -> None:
        """Load actor and value head in place, if the folder contains them.

        Raises:
            CheckpointError: the file is damaged or does not fit.
        """
        if (path := folder / HEADS_FILE).is_file():
            fix = "Use the model settings of the training."
            fill_weights(self._module.state_dict(), path, optional=("value_head.",), fix=fix)

    def _seen(self, *parts: Tensor) -> Seen:
        features = torch.cat(parts, 1)
        head = self._module.value_head
        return Seen(features, features.new_zeros(len(features), 0) if head is None else head(features), None)

    def _normalised(self, actions: FloatArray, obs: Observation) -> Tensor:
        middle, half = self._range
        return on_device(((actions - middle) / half).astype(np.float32), self._device)

    @property
    def _range(self) -> tuple[FloatArray, FloatArray]:
        """Return the centre and the half-width of the action range, [A] each."""
        low, high = np.asarray(self._env.action.bounds, np.float64)
        bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
        return np.where(bounded, (low + high) / 2, 0.0), np.where(bounded, (high - low) / 2, 1.0)

    def _means(self, obs: Observation) -> Tensor:
        """Return image means [B, views x 3 x rows x columns] in -1..1, for the newest step."""
        if not self._views:
            return torch.zeros(len(obs), 0, device=self._device)
        newest = obs.images.shape[1] // self._saved.n_obs_steps
        frames = obs.images[:, -newest:][:, list(self._views)]
        pixels = on_device(np.ascontiguousarray(frames), self._device).flatten(0, 1).permute(0, 3, 1, 2)
        means = F.adaptive_avg_pool2d(pixels.float() / 127.5 - 1, GRID)
        return means.unflatten(0, (len(obs), -1)).flatten(1)


class CorrectedLeRobot(SteeredLeRobot):
    """Residual policy: the actor corrects the actions of the frozen policy.

    Corrections are relative to the environment's action bounds, which are -1..1 for unbounded dimensions. The actor
    reads the states of LeRobot's preprocessor, means of the newest images, and the proposed actions.
    """

    def _see(self, obs: Observation) -> Seen:
        found = self._requested(obs, seeds=seeds_of_observations(obs).tolist())
        proposed = self._normalised(found["chunk"], obs).flatten(1)
        return self._seen(on_device(found["state"], self._device), self._means(obs), proposed)

    def _execute(
        self, obs: Observation, seen: Seen, choice: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        rows = executed(seen.features, choice.tanh().flatten(1), self._actor.shape).cpu().numpy()
        middle, half = self._range
        return (rows * half + middle).astype(np.float32)


class NoisedLeRobot(SteeredLeRobot):
    """DSRL: the actor's output, scaled to `noise_bound`, is the initial noise of the frozen policy.

    The actor reads the states of LeRobot's preprocessor and means of the newest images. Noise that LeRobot samples in
    addition is a function of the observation.
    """

    def _see(self, obs: Observation) -> Seen:
        return self._seen(on_device(self._requested(obs, actions=0)["state"], self._device), self._means(obs))

    def _execute(
        self, obs: Observation, seen: Seen, choice: Tensor, seeds: IntArray | None, temperature: float
    ) -> FloatArray:
        rows = (self._cfg.noise_bound * choice.tanh()).unflatten(2, (-1, self._saved.noise_dim))[:, 0]
        noise = rows.expand(-1, self._saved.horizon_length, -1).cpu().numpy()
        return self._requested(obs, seeds=seeds_of_observations(obs).tolist(), noise=noise)["chunk"]


def _duplicate(source: Path, target: Path) -> None:
    """Create a hard link if the file contains weights, which are never changed in place; copy any other file."""
    if source.suffix == ".safetensors":
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            pass
        else:
            return
    shutil.copy2(source, target)
