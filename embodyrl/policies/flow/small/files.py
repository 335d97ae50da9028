"""The weights' file of a small flow policy."""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from embodyrl.policies.flow.policy import RL_HEADS
from embodyrl.policies.flow.small.config import CONFIG_FILE, SmallConfig
from embodyrl.policies.weights import fill_weights

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
        fix = f"Use the {CONFIG_FILE} and the model settings that it was saved with."
        fill_weights(module.state_dict(), folder / WEIGHTS_FILE, optional=RL_HEADS, fix=fix)
