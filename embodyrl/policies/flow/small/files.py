"""The weights' file of a small flow policy."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.policy import RL_HEADS
from embodyrl.policies.flow.small.config import CONFIG_FILE, SmallConfig

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """`model.safetensors` and `config.json`; implements `WeightFiles`."""

    config: SmallConfig

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write weights and config into a folder."""
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE)
        self.config.save(folder)

    def load(self, module: nn.Module, folder: Path) -> None:
        """Read the weights of a folder into a module.

        Raises:
            CheckpointError: they are missing, damaged or of another shape; names them.
        """
        path = folder / WEIGHTS_FILE
        try:
            saved = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. It is incomplete or damaged.") from error
        mine = module.state_dict()
        wrong = {key for key in mine.keys() & saved.keys() if mine[key].shape != saved[key].shape}
        wrong |= {key for key in mine.keys() ^ saved.keys() if not key.startswith(RL_HEADS)}
        if wrong:
            raise CheckpointError(
                f"{path} does not fit in {', '.join(sorted(wrong)[:8])}: missing, surplus or of another shape. Use the "
                f"{CONFIG_FILE} and the model settings that it was saved with."
            )
        with torch.no_grad():
            for key in mine.keys() & saved.keys():
                mine[key].copy_(saved[key])
