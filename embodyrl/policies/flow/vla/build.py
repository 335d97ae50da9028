"""Construction of pi0, pi0.5 and SmolVLA: build on the meta device, load weights from a folder, freeze some weights.

Weights are safetensors in any published layout, strictly checked; no code is executed. Adapters and other files are in
the same folder.
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
    Source,
    fresh_source,
    to_ours,
    to_theirs,
)
from embodyrl.policies.flow.model import BACKBONE
from embodyrl.policies.flow.policy import FlowModule, FlowPolicy
from embodyrl.policies.flow.settings import ValueFrom
from embodyrl.policies.flow.specs import FlowSpec, Pi0Spec, SmolVlaSpec
from embodyrl.policies.flow.steering import policy_class
from embodyrl.policies.flow.vla.folder import side_files
from embodyrl.policies.flow.vla.network import Pi0, SmolVla, VlaNetwork, VlaReader
from embodyrl.policies.flow.vla.settings import VlaSettings
from embodyrl.policies.openvla_oft.checkpoint import SHARD_BYTES, Change, base_state, map_weights, weight_files
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.vla.adapter import AdapterSpec, find_adapter, given_adapter, lora_spec
from embodyrl.policies.vla.conditioning import read_conditioning
from embodyrl.policies.vla.folder import starts_random
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.policies.weights import check_weights, fill_weights
from embodyrl.types import PolicySpec


def load_weights(target: Mapping[str, Tensor], folder: Path, change: Change | None = None) -> Source:
    """Copy a folder's weights into a model's weights in place, cast to the model's dtypes; return the storage format.

    All checks run before the first weight is changed. RL heads are optional in the model and in the folder.

    Args:
        target: weights by embodyrl's names, without adapters.
        folder: safetensors shards in any known layout.
        change: function of name and weight, applied to each weight; merges adapters.

    Raises:
        CheckpointError: a file is unreadable or truncated; weights are missing, unexpected, misshaped or untied.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(
            f"{folder} contains no model*.safetensors. Set model.path to a folder with the full checkpoint; weights "
            f"in other formats are not loaded, because loading them can run code."
        )
    stored: dict[str, Tensor] = {}
    for path in files:
        found = map_weights(path)
        if twice := sorted(found.keys() & stored.keys()):
            raise CheckpointError(f"{path}: weight '{twice[0]}' is in two shards; download the folder again.")
        stored |= found
    weights, source = to_ours(stored, folder)
    # RLinf's value heads have another architecture: ignore them.
    theirs = source.layout.theirs
    check_weights(target, weights, folder, may_lack=HEADS, may_hold=HEADS, shown=lambda key: f"'{theirs(key)}'")
    with torch.no_grad():
        for key, tensor in weights.items():
            if key in target:
                target[key].copy_(change(key, tensor) if change else tensor)
    unread = {source.layout.theirs(key): tensor for key, tensor in weights.items() if key not in target}
    return replace(source, aside=dict(source.aside) | unread)


def save_weights(weights: Mapping[str, Tensor], folder: Path, like: Source | Layout) -> None:
    """Write weights as safetensors shards into a new folder.

    Args:
        weights: weights by embodyrl's names, without adapters; they keep their dtypes.
        folder: new folder; the caller renames it, which makes the write atomic.
        like: storage format returned by `load_weights`, to write the same names and additional weights; or a layout,
            to write the weights for its loader.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: tensor.detach().cpu() for key, tensor in weights.items()}
    source = fresh_source(like, weights) if isinstance(like, Layout) else like
    save_torch_state_dict(_apart(to_theirs(weights, source)), folder, max_shard_size=SHARD_BYTES)


def _apart(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory, because the writer would keep only one of the names."""
    seen: set[int] = set()
    apart = {}
    for key, tensor in stored.items():
        apart[key] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    return apart


MODEL = "network.model."
"""Prefix of the model in a `FlowModule`."""
BESIDE_FILE = "beside.safetensors"
"""File of the fully trained weights that are saved next to adapters."""


class VlaFiles:
    """Reads and writes weights in published layouts, or adapters together with the fully trained weights.

    Implements `WeightFiles`.
    """

    def __init__(self, base: Path, network: VlaNetwork, adapter: AdapterSpec | None) -> None:
        """Read config, tokenizer and statistics of a checkpoint.

        Args:
            base: `model.path`, the folder of the base weights of adapters.
            network: network that adopts the statistics of loaded weights.
            adapter: spec of the trained adapters, if any.
        """
        self._base, self._reader, self._adapter = base, network.reader, adapter
        self._side_files = side_files(base, network.reader.cfg)
        paligemma = isinstance(network.model.spec, Pi0Spec)
        self._source: Source | Layout = OPENPI if paligemma else SMOLVLA_LEROBOT

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write the weights under the names and dtypes of the loaded checkpoint; with adapters, only the adapters."""
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
        """Load weights from a published checkpoint, a checkpoint of embodyrl, or adapters.

        Adapters are merged if no adapters are trained.

        Raises:
            CheckpointError: a weight is missing, unexpected, damaged or of another shape.
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
        self._side_files = side_files(folder, self._reader.cfg)

    def load_merged(self, module: nn.Module, adapter: Path) -> None:
        """Read the weights of `model.path` and merge an adapter into them.

        Raises:
            CheckpointError: the adapter belongs to another model.
        """
        from embodyrl.policies.openvla_oft.lora import merging

        state = _plain(module)
        self._source = load_weights(state, self._base, merging(adapter, state, self._base, MODEL))


def _plain(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a `FlowModule` by name, without the prefix `MODEL`; heads keep their names."""
    return {key.removeprefix(MODEL): tensor for key, tensor in base_state(module).items()}


def _beside(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights without adapters, which are trained in full: heads, and input and output projections."""
    parts = ("vision.", "projector.", "language.", "expert.")
    return {key: tensor for key, tensor in _plain(module).items() if not key.startswith(parts)}


def _load_beside(module: nn.Module, folder: Path) -> None:
    fix = "Set model.path to the folder with which the checkpoint was trained."
    fill_weights(_beside(module), folder / BESIDE_FILE, optional=HEADS, fix=fix)


def build_policy(
    cfg: VlaSettings, folder: Path, sizes: FlowSpec, spec: PolicySpec, shape: ChunkShape, request: PolicyRequest
) -> FlowPolicy:
    """Build the policy of a folder.

    Raises:
        CheckpointError: a file is missing, truncated or does not fit.
        ConfigError: `model.lora.target_modules` matches no layer.
    """
    assert isinstance(sizes, Pi0Spec | SmolVlaSpec)
    with torch.device("meta"):
        model = Pi0(sizes) if isinstance(sizes, Pi0Spec) else SmolVla(sizes)
    adapted = cfg.is_lora and request.trainable
    if cfg.precision is Precision.bf16:
        # Frozen weights, also those with adapters, are stored in half precision.
        parts = ("expert", *BACKBONE) if adapted else BACKBONE if cfg.train_expert_only else ()
        for part in parts if request.trainable else ("",):
            model.get_submodule(part).to(torch.bfloat16)
    model.to_empty(device=request.device)
    if request.gradient_checkpointing:
        model.recompute_activations()
    reader = VlaReader(cfg, sizes, folder, request)
    pools = request.value_dim > 0 and cfg.value_from is ValueFrom.prefix
    network = VlaNetwork(model, reader, shape, pools=pools)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        # The heads use the global generator, which is restored afterwards.
        module = FlowModule(network, cfg, request.value_dim)
    files = VlaFiles(folder, network, lora_spec(cfg) if adapted else None)
    # Before the weights are read: this selects the trained weights, and `_adapt` changes the selection.
    policy = policy_class(cfg)(spec, cfg, module, reader, files, request)
    _fill(module, files, cfg, folder, request)
    policy.conditioning = read_conditioning(folder)
    if request.trainable:
        trained = ("expert",) if cfg.train_expert_only else ("expert", *BACKBONE)
        for part in {"expert", *BACKBONE} - set(trained):
            model.get_submodule(part).requires_grad_(False)
        if adapted:
            _adapt(module, cfg, tuple(f"{MODEL}{part}." for part in trained), request)
    return policy


def _fill(module: FlowModule, files: VlaFiles, cfg: VlaSettings, folder: Path, request: PolicyRequest) -> None:
    """Load the weights of `model.path`, with the adapter of `model.lora.path` merged unless adapters are trained."""
    adapter = given_adapter(cfg)
    if starts_random(folder):
        module.network.model.initialise(request.seed)
    elif adapter is not None and not (cfg.is_lora and request.trainable):
        files.load_merged(module, adapter)
    else:
        files.load(module, folder)


def _adapt(module: nn.Module, cfg: VlaSettings, within: tuple[str, ...], request: PolicyRequest) -> None:
    from embodyrl.policies.openvla_oft.lora import inject, load_adapter

    inject(module, lora_spec(cfg), init=cfg.lora.init_lora_weights, seed=request.seed, within=within)
    if (adapter := given_adapter(cfg)) is not None:
        load_adapter(module, adapter)
