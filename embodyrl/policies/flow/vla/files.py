"""Weights, adapters and side files of pi0, pi0.5 and SmolVLA in a folder."""

from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.checkpoint import load_weights, save_weights
from embodyrl.policies.flow.layouts import HEADS, OPENPI, SMOLVLA_LEROBOT, Layout, Source
from embodyrl.policies.flow.specs import Pi0Spec
from embodyrl.policies.flow.vla.folder import side_files
from embodyrl.policies.flow.vla.network import VlaNetwork
from embodyrl.policies.openvla_oft.adapter import AdapterSpec, find_adapter
from embodyrl.policies.openvla_oft.checkpoint import base_state, weight_files
from embodyrl.policies.weights import fill_weights

MODEL = "network.model."
"""Where the model lies inside of a `FlowModule`."""
BESIDE_FILE = "beside.safetensors"
"""What is trained in full beside adapters."""


class VlaFiles:
    """Public layouts, whole; or adapters with what is trained beside them. Implements `WeightFiles`."""

    def __init__(self, base: Path, network: VlaNetwork, adapter: AdapterSpec | None) -> None:
        """Remember the small files of a checkpoint.

        Args:
            base: `model.path`, whose weights adapters belong to.
            network: takes the statistics of what is loaded.
            adapter: of the adapters that are trained, if any.
        """
        self._base, self._reader, self._adapter = base, network.reader, adapter
        self._side_files = side_files(base)
        paligemma = isinstance(network.model.spec, Pi0Spec)
        self._source: Source | Layout = OPENPI if paligemma else SMOLVLA_LEROBOT

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write the weights under the names they were read by, in the dtypes they are kept in; or only the adapters."""
        if self._adapter is None:
            like = self._source
            if isinstance(like, Source):
                kept = {k: t for k, t in like.aside.items() if not like.layout.ours(k).startswith(HEADS)}
                like = replace(like, aside=kept)
            save_weights(_plain(module), folder, like)
        else:
            from embodyrl.policies.openvla_oft.lora import save_adapter

            save_adapter(module, self._adapter, folder)
            save_file({k: t.detach().cpu().contiguous() for k, t in _beside(module).items()}, folder / BESIDE_FILE)
        for name, content in self._side_files.items():
            (folder / name).write_bytes(content)

    def load(self, module: nn.Module, folder: Path) -> None:
        """Read a public checkpoint, one of ours, or one of adapters, which are merged where none are trained.

        Raises:
            CheckpointError: something is missing, surplus, damaged or of another shape.
        """
        adapter = None if weight_files(folder) else find_adapter(folder)
        if adapter is None:
            self._source = load_weights(_plain(module), folder)
        elif self._adapter is None:
            self.load_merged(module, adapter)
            _load_beside(module, folder)
        else:
            from embodyrl.policies.openvla_oft.lora import load_adapter

            load_adapter(module, adapter)
            _load_beside(module, folder)
        self._reader.adopt(folder)
        self._side_files = side_files(folder)

    def load_merged(self, module: nn.Module, adapter: Path) -> None:
        """Read the weights of `model.path` with an adapter merged into them.

        Raises:
            CheckpointError: the adapter is of another model.
        """
        from embodyrl.policies.openvla_oft.lora import read_adapter

        loaded, state = read_adapter(adapter), _plain(module)
        names = [name.removeprefix(MODEL) for name in loaded.factors]
        if strangers := sorted(name for name in names if f"{name}.weight" not in state):
            raise CheckpointError(f"{adapter} adapts '{strangers[0]}', which {self._base} does not have.")
        self._source = load_weights(state, self._base, lambda key, tensor: loaded.merged(MODEL + key, tensor))


def _plain(module: nn.Module) -> dict[str, Tensor]:
    """Weights of a `FlowModule` by the names of its model; heads keep theirs."""
    return {key.removeprefix(MODEL): tensor for key, tensor in base_state(module).items()}


def _beside(module: nn.Module) -> dict[str, Tensor]:
    """Weights that are trained in full while adapters are: heads, and the projections of the flow."""
    parts = ("vision.", "projector.", "language.", "expert.")
    return {key: tensor for key, tensor in _plain(module).items() if not key.startswith(parts)}


def _load_beside(module: nn.Module, folder: Path) -> None:
    fix = "Use the model.path that it was trained with."
    fill_weights(_beside(module), folder / BESIDE_FILE, optional=HEADS, fix=fix)
