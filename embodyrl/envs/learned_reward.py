"""NumPy inference of reward models trained by `embodyrl sft objective.name=success`, for workers without torch."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from embodyrl.envs.reward_step import RewardStep
from embodyrl.errors import CheckpointError, UnknownNameError
from embodyrl.files import read_json
from embodyrl.types import ObservationOut

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


class LearnedReward:
    """Reward function from a success classifier trained by `embodyrl sft objective.name=success`.

    The reward is the increase of the success probability over its maximum in the episode so far. The return is the
    highest probability, so staying close to success gives no further reward.
    """

    components = ("learned",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config: dict[str, Any] = read_json(folder / CONFIG_FILE)
        if not {"num_images", "state_dim", "hidden"} <= self._config.keys():
            raise UnknownNameError(
                f"{folder} does not contain a reward model. Train one with `embodyrl sft objective.name=success`."
            )
        self.cameras = int(self._config["num_images"])
        """Number of cameras that the classifier uses."""
        self.camera_names = tuple(self._config.get("cameras", ()))
        self._weights: dict[str, np.ndarray] = {}
        self._highest: dict[int, list[float]] = {}
        """By environment: the highest probability up to each step; a loaded state continues at an earlier step."""

    def __call__(self, step: RewardStep) -> float:
        """Return the reward of an env step.

        Raises:
            CheckpointError: the weights expect other observations.
        """
        probability = self.probability(step.observation)
        highest = self._highest.setdefault(step.env_index, [])
        del highest[step.step - 1 :]
        best = highest[-1] if highest else 0.0
        highest.append(max(best, probability))
        return max(0.0, probability - best)

    def probability(self, observation: ObservationOut) -> float:
        """Return the predicted probability that the goal is reached in an observation."""
        if not self._weights:
            self._load(observation)
        x, config = observation.state.astype(np.float64), self._config
        if config["normalized"]:
            w = self._weights
            x = ((x - w["states.mean"]) / np.sqrt(w["states.var"] + 1e-8)).clip(-10, 10)
        if config["num_images"]:
            x = np.concatenate([self._encode(observation.images[: config["num_images"]]), x])
        activation = np.tanh if config["activation"] == "tanh" else _relu
        last = 2 * len(config["hidden"])
        for layer in range(0, last + 1, 2):
            x = self._apply_dense(f"value_head.{layer}", x)
            x = x if layer == last else activation(x)
        return float(1.0 / (1.0 + np.exp(-x[0])))

    def _encode(self, images: np.ndarray) -> np.ndarray:
        """Encode images [C, H, W, 3] to features [F]."""
        x = images.transpose(0, 3, 1, 2).reshape(-1, *images.shape[1:3]).astype(np.float32) / 255.0
        layers = [
            weight_name.removesuffix(".weight")
            for weight_name in self._weights
            if weight_name.startswith("encoder.") and weight_name.endswith(".weight")
        ]
        *convolutions, dense = sorted(layers, key=lambda name: int(name.split(".")[1]))
        for name in convolutions:
            windows = sliding_window_view(np.pad(x, ((0, 0), (1, 1), (1, 1))), (3, 3), (1, 2))[:, ::2, ::2]
            kernel, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
            x = _relu(np.einsum("chwij,ocij->ohw", windows, kernel, optimize=True) + bias[:, None, None])
        return _relu(self._apply_dense(dense, x.reshape(-1)))

    def _apply_dense(self, name: str, x: np.ndarray) -> np.ndarray:
        return self._weights[f"{name}.weight"] @ x + self._weights[f"{name}.bias"]

    def _load(self, observation: ObservationOut) -> None:
        from safetensors.numpy import load_file

        weights, config = load_file(self._folder / WEIGHTS_FILE), self._config
        images = (config["num_images"], *config["image_size"]) if config["num_images"] else None
        observed_images = (
            (min(len(observation.images), config["num_images"]), *observation.images.shape[1:3]) if images else None
        )
        if (config["state_dim"], images) != (
            len(observation.state),
            observed_images,
        ) or "value_head.0.weight" not in weights:
            raise CheckpointError(
                f"reward.path={self._folder}: the model has no value head, or its inputs ({config['state_dim']} state "
                f"numbers, images {images}) differ from the environment ({len(observation.state)} state numbers, "
                f"images {observed_images}). Train a model with `embodyrl sft objective.name=success` on episodes of "
                "this environment with these cameras."
            )
        self._weights = weights


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def load_reward(folder: Path) -> LearnedReward | None:
    """Return the reward model in a folder, or None if the folder contains no model.

    Raises:
        UnknownNameError: the folder contains another model.
    """
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        return None
    return LearnedReward(folder)
