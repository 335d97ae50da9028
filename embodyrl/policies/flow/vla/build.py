"""A flow policy around pi0, pi0.5 or SmolVLA: built without memory, filled from a folder, then partly frozen."""

from pathlib import Path

import torch
from torch import nn

from embodyrl.config.paths import resolve_asset
from embodyrl.config.shared import Precision
from embodyrl.policies.flow.model import BACKBONE
from embodyrl.policies.flow.pi0 import Pi0
from embodyrl.policies.flow.policy import FlowModule, FlowPolicy
from embodyrl.policies.flow.record import ChunkShape
from embodyrl.policies.flow.settings import ValueFrom
from embodyrl.policies.flow.smolvla import SmolVla
from embodyrl.policies.flow.specs import FlowSpec, Pi0Spec, SmolVlaSpec
from embodyrl.policies.flow.vla.files import MODEL, VlaFiles
from embodyrl.policies.flow.vla.folder import starts_random
from embodyrl.policies.flow.vla.network import VlaNetwork, VlaReader
from embodyrl.policies.flow.vla.settings import VlaSettings
from embodyrl.policies.openvla_oft.adapter import find_adapter, lora_spec
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import PolicySpec


def build_policy(
    cfg: VlaSettings, folder: Path, sizes: FlowSpec, spec: PolicySpec, shape: ChunkShape, request: PolicyRequest
) -> FlowPolicy:
    """Build the policy of a folder.

    Raises:
        CheckpointError: a file is missing, truncated or does not fit.
        ConfigError: `model.lora.target_modules` fits no layer.
    """
    assert isinstance(sizes, Pi0Spec | SmolVlaSpec)
    with torch.device("meta"):
        model = Pi0(sizes) if isinstance(sizes, Pi0Spec) else SmolVla(sizes)
    adapted = cfg.is_lora and request.trainable
    if cfg.precision is Precision.bf16:
        # What is not trained is kept in half, and so is what adapters are put on.
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
        module = FlowModule(network, cfg, request.value_dim)
    files = VlaFiles(folder, network, lora_spec(cfg) if adapted else None)
    policy = FlowPolicy(spec, cfg, module, reader, files, request)
    _fill(module, files, cfg, folder, request)
    if request.trainable:
        trained = ("expert",) if cfg.train_expert_only else ("expert", *BACKBONE)
        for part in {"expert", *BACKBONE} - set(trained):
            model.get_submodule(part).requires_grad_(False)
        if adapted:
            _adapt(module, cfg, tuple(f"{MODEL}{part}." for part in trained), request)
    return policy


def _fill(module: FlowModule, files: VlaFiles, cfg: VlaSettings, folder: Path, request: PolicyRequest) -> None:
    """Read the weights of `model.path`, with the adapter of `model.lora.path` merged where none is trained."""
    adapter = None if cfg.lora.path is None else find_adapter(resolve_asset(cfg.lora.path))
    if starts_random(folder):
        module.network.model.initialise(request.seed)
    elif adapter is not None and not (cfg.is_lora and request.trainable):
        files.load_merged(module, adapter)
    else:
        files.load(module, folder)


def _adapt(module: nn.Module, cfg: VlaSettings, within: tuple[str, ...], request: PolicyRequest) -> None:
    from embodyrl.policies.openvla_oft.lora import inject, load_adapter

    inject(module, lora_spec(cfg), init=cfg.lora.init_lora_weights, seed=request.seed, within=within)
    adapter = None if cfg.lora.path is None else find_adapter(resolve_asset(cfg.lora.path))
    if adapter is not None:
        load_adapter(module, adapter)
