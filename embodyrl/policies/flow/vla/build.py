"""Construction of pi0, pi0.5 and SmolVLA: build on the meta device, load weights from a folder, freeze some weights.

Weights are safetensors in any published layout. They are strictly checked, and no code is executed. Adapters and other
files are in the same folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.layouts import (
    HEADS,
    OPENPI,
    SMOLVLA_LEROBOT,
    Layout,
    StorageFormat,
    build_storage_format,
    to_external_names,
    to_local_names,
)
from embodyrl.policies.flow.model import BACKBONE
from embodyrl.policies.flow.policy import FlowModule, FlowPolicy
from embodyrl.policies.flow.settings import ValueFrom
from embodyrl.policies.flow.specs import FlowSpec, Pi0Spec, SmolVlaSpec
from embodyrl.policies.flow.steering import select_policy_class
from embodyrl.policies.flow.vla.folder import read_side_files
from embodyrl.policies.flow.vla.network import Pi0, SmolVla, VlaNetwork, VlaProcessor
from embodyrl.policies.flow.vla.settings import VlaSettings
from embodyrl.policies.flow.vla.statistics import STATISTIC_PATTERN
from embodyrl.policies.openvla_oft.checkpoint import (
    SHARD_BYTES,
    WeightTransform,
    get_base_state,
    map_weights,
)
from embodyrl.policies.openvla_oft.lora import build_merge_transform, inject_adapters, load_adapter, save_adapter
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.vla.adapter import AdapterSpec, find_adapter, get_initial_adapter, get_lora_spec
from embodyrl.policies.vla.folder import STATISTICS_FILE, has_random_init
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.policies.weights import check_weights, fill_weights
from embodyrl.text.model_folder import list_weight_files
from embodyrl.types import PolicySpec


def load_weights(target: Mapping[str, Tensor], folder: Path, transform: WeightTransform | None = None) -> StorageFormat:
    """Copy a folder's weights into a model's weights in place, cast to the model's dtypes; return the storage format.

    All checks run before the first weight is changed. RL heads are optional in the model and in the folder.

    Args:
        target: weights by embodyrl's names, without adapters.
        folder: safetensors shards in any known layout.
        transform: function of name and weight that is applied to each weight, for example to merge adapters.

    Raises:
        CheckpointError: a file is unreadable or truncated; weights are missing, unexpected or of another shape; or tied
            weights differ.
    """
    files = list_weight_files(folder)
    if not files:
        raise CheckpointError(
            f"{folder} contains no model*.safetensors. Set model.path to a folder with the full checkpoint; weights "
            f"in other formats are not loaded, because loading them can run code."
        )
    stored: dict[str, Tensor] = {}
    for path in files:
        shard = map_weights(path)
        if duplicates := sorted(shard.keys() & stored.keys()):
            raise CheckpointError(f"{path}: weight '{duplicates[0]}' is in two shards; download the folder again.")
        stored |= shard
    weights, storage = to_local_names(stored, folder)
    # RLinf's value heads have another architecture: ignore them.
    to_external = storage.layout.to_external
    check_weights(
        target,
        weights,
        folder,
        optional_prefixes=HEADS,
        ignored_prefixes=HEADS,
        format_name=lambda key: f"'{to_external(key)}'",
    )
    with torch.no_grad():
        for key, tensor in weights.items():
            if key in target:
                target[key].copy_(transform(key, tensor) if transform else tensor)
    unused = {storage.layout.to_external(key): tensor for key, tensor in weights.items() if key not in target}
    return replace(storage, extra_tensors=dict(storage.extra_tensors) | unused)


def save_weights(weights: Mapping[str, Tensor], folder: Path, target_format: StorageFormat | Layout) -> None:
    """Write weights as safetensors shards into a new folder.

    Args:
        weights: weights by embodyrl's names, without adapters; they keep their dtypes.
        folder: new folder; the caller renames it, which makes the write atomic.
        target_format: storage format returned by `load_weights`, to write the same names and additional weights; or a
            layout, to write the weights for its loader.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: tensor.detach().cpu() for key, tensor in weights.items()}
    storage = build_storage_format(target_format, weights) if isinstance(target_format, Layout) else target_format
    save_torch_state_dict(to_external_names(weights, storage), folder, max_shard_size=SHARD_BYTES)


MODEL_PREFIX = "network.model."
"""Prefix of the model in a `FlowModule`."""
EXTRA_WEIGHTS_FILE = "beside.safetensors"
"""File of the fully trained weights that are saved next to adapters."""


class VlaFiles:
    """Reader and writer of weights in published layouts, or of adapters together with the fully trained weights.

    Implements `WeightIO`.
    """

    def __init__(self, base: Path, network: VlaNetwork, adapter: AdapterSpec | None) -> None:
        """Read config, tokenizer and statistics of a checkpoint.

        Args:
            base: folder of the base weights of adapters (`model.path`).
            network: network whose statistics are replaced when weights are loaded.
            adapter: spec of the trained adapters, if any.
        """
        self._base, self._processor, self._adapter = base, network.processor, adapter
        self._side_files = read_side_files(base, network.processor.cfg)
        paligemma = isinstance(network.model.spec, Pi0Spec)
        self._storage: StorageFormat | Layout = OPENPI if paligemma else SMOLVLA_LEROBOT

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write the weights under the names and dtypes of the loaded checkpoint; with adapters, only the adapters."""
        if self._adapter is None:
            target_format = self._storage
            if isinstance(target_format, StorageFormat):
                is_sft = STATISTICS_FILE in self._side_files  # old statistics among the weights describe other data
                extra_tensors = {
                    k: t
                    for k, t in target_format.extra_tensors.items()
                    if not (
                        target_format.layout.to_local(k).startswith(HEADS)
                        or (is_sft and STATISTIC_PATTERN.fullmatch(k))
                    )
                }
                target_format = replace(target_format, extra_tensors=extra_tensors)
            save_weights(_get_base_weights(module), folder, target_format)
        else:
            save_adapter(module, self._adapter, folder)
            save_file(
                {k: t.detach().cpu().contiguous() for k, t in _get_extra_weights(module).items()},
                folder / EXTRA_WEIGHTS_FILE,
            )
        for name, content in self._side_files.items():
            (folder / name).write_bytes(content)

    def load(self, module: nn.Module, folder: Path) -> None:
        """Load weights from a published checkpoint, a checkpoint of embodyrl, or adapters.

        Adapters are merged if no adapters are trained.

        Raises:
            CheckpointError: a weight is missing, unexpected, damaged or of another shape.
        """
        adapter = None if list_weight_files(folder) else find_adapter(folder)
        if adapter is None:
            self._storage = load_weights(_get_base_weights(module), folder)
        elif self._adapter is None:
            self.load_merged(module, adapter)
            _load_extra_weights(module, folder)
        else:
            load_adapter(module, adapter)
            _load_extra_weights(module, folder)
        self._processor.load_statistics(folder)
        self._side_files = read_side_files(folder, self._processor.cfg)

    def load_merged(self, module: nn.Module, adapter: Path) -> None:
        """Read the weights of `model.path` and merge an adapter into them.

        Raises:
            CheckpointError: the adapter belongs to another model.
        """
        state = _get_base_weights(module)
        self._storage = load_weights(state, self._base, build_merge_transform(adapter, state, self._base, MODEL_PREFIX))


def _get_base_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a `FlowModule` by name, without the prefix `MODEL_PREFIX`; heads keep their names."""
    return {key.removeprefix(MODEL_PREFIX): tensor for key, tensor in get_base_state(module).items()}


def _get_extra_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the fully trained weights, which have no adapters: heads, and input and output projections."""
    parts = ("vision.", "projector.", "language.", "expert.")
    return {key: tensor for key, tensor in _get_base_weights(module).items() if not key.startswith(parts)}


def _load_extra_weights(module: nn.Module, folder: Path) -> None:
    fix = "Set model.path to the folder with which the checkpoint was trained."
    fill_weights(_get_extra_weights(module), folder / EXTRA_WEIGHTS_FILE, optional=HEADS, fix=fix)


def build_policy(
    cfg: VlaSettings, folder: Path, flow_spec: FlowSpec, spec: PolicySpec, shape: ChunkShape, request: PolicyRequest
) -> FlowPolicy:
    """Build the policy of a folder.

    Raises:
        CheckpointError: a file is missing, truncated or does not fit.
        ConfigError: `model.lora.target_modules` matches no layer.
    """
    assert isinstance(flow_spec, Pi0Spec | SmolVlaSpec)
    with torch.device("meta"):
        model = Pi0(flow_spec) if isinstance(flow_spec, Pi0Spec) else SmolVla(flow_spec)
    adapted = cfg.is_lora and request.trainable
    if cfg.precision is Precision.bf16:
        # Frozen weights, including weights with adapters, are stored in bfloat16.
        parts = ("expert", *BACKBONE) if adapted else BACKBONE if cfg.train_expert_only else ()
        for part in parts if request.trainable else ("",):
            model.get_submodule(part).to(torch.bfloat16)
    model.to_empty(device=request.device)
    if request.gradient_checkpointing:
        model.recompute_activations()
    processor = VlaProcessor(cfg, flow_spec, folder, request)
    pools_prefix = request.value_dim > 0 and cfg.value_from is ValueFrom.prefix
    network = VlaNetwork(model, processor, shape, pools_prefix=pools_prefix)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        # The heads use the global generator, which is restored afterwards.
        module = FlowModule(network, cfg, request.value_dim)
    files = VlaFiles(folder, network, get_lora_spec(cfg) if adapted else None)
    # Created before the weights are read, because the policy selects the trained weights and `_add_adapters` changes
    # the selection.
    policy = select_policy_class(cfg)(spec, cfg, module, processor, files, request)
    _load_initial_weights(module, files, cfg, folder, request)
    if request.trainable:
        trained = ("expert",) if cfg.train_expert_only else ("expert", *BACKBONE)
        for part in {"expert", *BACKBONE} - set(trained):
            model.get_submodule(part).requires_grad_(False)
        if adapted:
            _add_adapters(module, cfg, tuple(f"{MODEL_PREFIX}{part}." for part in trained), request)
    return policy


def _load_initial_weights(
    module: FlowModule, files: VlaFiles, cfg: VlaSettings, folder: Path, request: PolicyRequest
) -> None:
    """Load the weights of `model.path`, with the adapter of `model.lora.path` merged unless adapters are trained."""
    adapter = get_initial_adapter(cfg)
    if has_random_init(folder):
        module.network.model.initialize(request.seed)
    elif adapter is not None and not (cfg.is_lora and request.trainable):
        files.load_merged(module, adapter)
    else:
        files.load(module, folder)


def _add_adapters(module: nn.Module, cfg: VlaSettings, prefixes: tuple[str, ...], request: PolicyRequest) -> None:
    inject_adapters(module, cfg, seed=request.seed, prefixes=prefixes)
    if (adapter := get_initial_adapter(cfg)) is not None:
        load_adapter(module, adapter)
