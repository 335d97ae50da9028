"""Low-rank adapters, which peft injects for training and which are otherwise merged into the weights."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft.checkpoint import WeightTransform, map_weights
from embodyrl.policies.openvla_oft.llama import apply_linears
from embodyrl.policies.settings import AdapterSettings
from embodyrl.policies.vla.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    ALL_LINEAR,
    AdapterSpec,
    check_module_names,
    get_lora_spec,
    read_adapter_spec,
)

ADAPTABLE_MODULES = ("vision_backbone.", "projector.", "language_model.")
"""Prefixes of the modules that may have adapters. Other modules, such as the value head, are fully trained."""
_PUBLIC_PREFIX = "base_model.model."
_PEFT_INFIX = ".default."


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank adapter loaded from a folder."""

    spec: AdapterSpec
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """LoRA factors (A [r, in...], B [out, r...]) by module path."""
    replaced: Mapping[str, Tensor]
    """Full weights by parameter name that replace the model's weights (peft adds the output matrix)."""

    def merge(self, key: str, tensor: Tensor) -> Tensor:
        """Return a weight with its adapter added, in float32: W + alpha/r * B A (reshaped for patch embeddings)."""
        tensor = self.replaced.get(key, tensor)
        pair = self.factors.get(key.removesuffix(".weight"))
        if pair is None:
            return tensor
        low, high = (factor.float().flatten(1) for factor in pair)
        if (high.shape[0], low.shape[1]) != (tensor.shape[0], tensor[0].numel()):
            raise CheckpointError(
                f"The adapter of '{key}' belongs to a weight [{high.shape[0]}, {low.shape[1]}], but this model has "
                f"{list(tensor.shape)}; the adapter is from another model. "
                "Set model.lora.path to an adapter of this model."
            )
        return tensor.float() + (high @ low).reshape(tensor.shape) * self.spec.scale


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in peft's layout.

    Raises:
        CheckpointError: a file is missing, truncated, or has keys of another kind of adapter.
    """
    spec, path = read_adapter_spec(folder), folder / ADAPTER_WEIGHTS
    low: dict[str, Tensor] = {}
    high: dict[str, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for key, tensor in map_weights(path).items():
        name = key.removeprefix(_PUBLIC_PREFIX)
        if name.endswith(".lora_A.weight"):
            low[name.removesuffix(".lora_A.weight")] = tensor
        elif name.endswith(".lora_B.weight"):
            high[name.removesuffix(".lora_B.weight")] = tensor
        elif ".base_layer." in name:
            replaced[name.replace(".base_layer.", ".")] = tensor
        else:
            raise CheckpointError(
                f"{path} has a weight '{key}'; only plain LoRA adapters are supported. Use another adapter."
            )
    if low.keys() != high.keys():
        mismatched = sorted(low.keys() ^ high.keys())[0]
        raise CheckpointError(
            f"{path}: module '{mismatched}' has only one of its two LoRA matrices; download the file again."
        )
    if mismatched := next((name for name in low if low[name].shape[0] != spec.r or high[name].shape[1] != spec.r), ""):
        raise CheckpointError(
            f"{path}: module '{mismatched}' does not have the rank {spec.r} of {ADAPTER_CONFIG}. Download both files "
            "again."
        )
    return Adapter(spec, {name: (low[name], high[name]) for name in low}, replaced)


def build_merge_transform(adapter: Path, known: Container[str], base: Path, prefix: str = "") -> WeightTransform:
    """Return a function that merges an adapter into weights of `base` during loading, without a second copy.

    Args:
        adapter: folder of the adapter.
        known: names of the model's weights.
        base: folder of the base weights.
        prefix: prefix of the names in the adapter, which the names in `known` lack.

    Raises:
        CheckpointError: a file does not fit, or the adapter belongs to another model.
    """
    loaded = read_adapter(adapter)
    names = (name.removeprefix(prefix) for name in loaded.factors)
    weights = {f"{name}.weight" for name in names} | {name.removeprefix(prefix) for name in loaded.replaced}
    if unknown := sorted(name for name in weights if name not in known):
        raise CheckpointError(
            f"{adapter} adapts '{unknown[0]}', which {base} does not have; the adapter is from another model. "
            "Use an adapter of this model."
        )
    return lambda key, tensor: loaded.merge(prefix + key, tensor)


def inject_adapters(
    module: nn.Module, cfg: AdapterSettings, *, seed: int, prefixes: tuple[str, ...] = ADAPTABLE_MODULES
) -> None:
    """Add adapters to the selected linear layers and patch embeddings.

    All other weights of the modules in `prefixes` are frozen. Adapters of layers that do not influence the output are
    frozen too, but kept, because public adapters contain adapters of these layers.

    Raises:
        ConfigError: no layer has one of the target names.
        CheckpointError: see `get_lora_spec`.
    """
    # Importing peft takes seconds.
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    spec = get_lora_spec(cfg)
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and name.startswith(prefixes)
    ]
    suffixes = tuple(f".{name}" for name in spec.target_modules)
    target_names = [n for n in layers if spec.target_modules == (ALL_LINEAR,) or n.endswith(suffixes)]
    # The folder of an adapter may name layers of other models.
    if not target_names or (cfg.lora.path is None and spec.target_modules != (ALL_LINEAR,)):
        check_module_names("target_modules", spec.target_modules, layers)
    init_lora_weights = "gaussian" if cfg.lora.init_lora_weights == "gaussian" else True
    config = _build_config(spec, target_names, init_lora_weights=init_lora_weights)
    with torch.random.fork_rng(devices=[]):  # peft initializes the adapters on the CPU
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, module)
    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer):
            # Autocast casts inputs to the compute precision; a cast to float32 and back would only cost time.
            setattr(layer, "cast_input_dtype_enabled", False)  # noqa: B010  (a plain flag, no parameter)
            if isinstance(layer.get_base_layer(), nn.Linear):
                layer.forward = MethodType(_forward_adapted, layer)
    for name, parameter in module.named_parameters():
        base, is_adapter, _ = name.partition(".lora_")
        if is_adapter:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(trained[f"{base}.weight"])
        else:
            # peft has frozen all weights, including those without an adapter.
            parameter.requires_grad_(not name.startswith(prefixes) and trained[name])


def _build_config(spec: AdapterSpec, targets: list[str] | str, **kwargs: Any) -> Any:
    from peft import LoraConfig

    alpha: Any = spec.lora_alpha  # peft also scales by fractions
    return LoraConfig(r=spec.r, lora_alpha=alpha, use_rslora=spec.use_rslora, target_modules=targets, **kwargs)


def _forward_adapted(layer: Any, x: Tensor) -> Tensor:
    """Return outputs [..., out] of a linear layer with an adapter, for inputs [..., in]."""
    return apply_linears([layer], x)[0] if x.is_cuda else type(layer).forward(layer, x)


def load_adapter(module: nn.Module, where: Path) -> None:
    """Copy the LoRA factors in an adapter folder into the injected adapters.

    Raises:
        CheckpointError: the adapters belong to other layers, or have another rank.
    """
    adapter, state = read_adapter(where), module.state_dict()
    local_modules = {name.partition(".lora_A.")[0] for name in state if ".lora_A." in name}
    if local_modules != adapter.factors.keys():
        mismatched = sorted(local_modules ^ adapter.factors.keys())[0]
        raise CheckpointError(
            f"{where}: the adapter and this model differ in module '{mismatched}'. Use the model.lora.target_modules "
            f"and model.path of the adapter's run."
        )
    with torch.no_grad():
        for name, pair in adapter.factors.items():
            for part, factor in zip("AB", pair, strict=True):
                target = state[f"{name}.lora_{part}{_PEFT_INFIX}weight"]
                if target.shape != factor.shape:
                    raise CheckpointError(
                        f"{where}: adapter of '{name}' has shape {list(factor.shape)}, but this run needs "
                        f"{list(target.shape)}; set model.lora.r={adapter.spec.r}."
                    )
                target.copy_(factor)
        for key, tensor in adapter.replaced.items():
            state[key.removesuffix("weight") + "base_layer.weight"].copy_(tensor)


def save_adapter(module: nn.Module, spec: AdapterSpec, folder: Path) -> None:
    """Write the injected adapters as `folder/lora_adapter` in peft's layout."""
    target = folder / ADAPTER_FOLDER
    target.mkdir(parents=True)
    state = {
        _PUBLIC_PREFIX + key.replace(_PEFT_INFIX, "."): tensor.detach().cpu().contiguous()
        for key, tensor in module.state_dict().items()
        if ".lora_" in key
    }
    save_file(state, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    targets = ALL_LINEAR if spec.target_modules == (ALL_LINEAR,) else list(spec.target_modules)
    _build_config(spec, targets).save_pretrained(str(target))
