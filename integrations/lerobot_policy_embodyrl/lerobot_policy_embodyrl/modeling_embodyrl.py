"""LeRobot policy whose network runs in a process with embodyrl."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_IMAGES, OBS_STATE
from lerobot_env_embodyrl.process import Worker
from torch import Tensor

from lerobot_policy_embodyrl.configuration_embodyrl import EmbodyrlConfig

_WORKER = Path(__file__).parent / "worker.py"


class EmbodyrlPolicy(PreTrainedPolicy):
    """Greedy policy of embodyrl: a chunk of K actions per query, executed one by one."""

    config_class = EmbodyrlConfig
    name = "embodyrl"

    def __init__(self, config: EmbodyrlConfig, **_: Any) -> None:
        """Start the process and load the policy.

        Raises:
            WorkerError: embodyrl is missing, or cannot load the policy.
        """
        super().__init__(config)
        config.validate_features()
        arguments = {"request": "load", "run": config.run, "overrides": config.overrides}
        self._worker = Worker(_WORKER, arguments, python=config.python, timeout_s=config.timeout_s)
        self._layout = self._worker.description
        self.reset()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: EmbodyrlConfig | None = None, **kwargs: Any
    ) -> "EmbodyrlPolicy":
        """Build the policy of a folder of `save_pretrained`, which has no weights of its own."""
        found: Any = config or EmbodyrlConfig.from_pretrained(pretrained_name_or_path, **kwargs)
        return cls(found).eval()

    def _save_pretrained(self, save_directory: Path) -> None:
        self.config._save_pretrained(save_directory)

    def reset(self) -> None:
        """Discard the rest of a chunk."""
        self._queue: deque[Tensor] = deque()

    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """Return the next action [B, A]; a new chunk is requested when the last one ends."""
        if not self._queue:
            self._queue.extend(self.predict_action_chunk(batch).transpose(0, 1))
        return self._queue.popleft()

    def predict_action_chunk(self, batch: dict[str, Any], **_: Any) -> Tensor:
        """Return chunks [B, K, A] in the environment's units.

        Raises:
            ValueError: the observation lacks a camera or the state.
        """
        request: dict[str, Any] = {"request": "act", "instructions": list(batch.get("task", ()))}
        names = [f"{OBS_IMAGES}.{name}" for name in self._layout["cameras"]]
        wanted = [*names, *([OBS_STATE] if self._layout["state_dim"] else [])]
        if missing := [name for name in wanted if name not in batch]:
            found = ", ".join(sorted(name for name in batch if name.startswith("observation")))
            raise ValueError(f"The policy reads {', '.join(missing)}; the observation has {found}. Set --rename_map.")
        if names:
            request["images"] = np.stack([_bytes_of(batch[name]) for name in names], 1)
        if self._layout["state_dim"]:
            request["state"] = batch[OBS_STATE].cpu().numpy()
        return torch.from_numpy(self._worker.ask(**request)["actions"])

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict | None]:
        """Raise an error: LeRobot does not train the policy."""
        self.config.get_optimizer_preset()
        raise AssertionError

    def get_optim_params(self) -> dict:
        """Return no parameters: the weights are in another process."""
        return {}


def _bytes_of(images: Tensor) -> np.ndarray:
    """Convert images [B, 3, H, W] in 0..1 to bytes [B, H, W, 3]; exact for images that were bytes."""
    return (images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
