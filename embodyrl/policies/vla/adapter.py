"""Configuration of low-rank adapter folders (peft's layout); does not import torch or peft."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.files import (
    ADAPTER_FIELDS,
    BASE_PRESERVING_INITS,
    check_keys,
    find_merged_adapter_problem,
)
from embodyrl.policies.settings import AdapterSettings, LoraSettings

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FOLDER = "lora_adapter"
ALL_LINEAR = "all-linear"

_SUPPORTED_VALUES = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": BASE_PRESERVING_INITS}
"""Supported values of fields that change the meaning of an adapter; other fields must be off (see `check_keys`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Size and targets of low-rank adapters."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    """Last parts of the names of adapted modules; `("all-linear",)` for all linear layers."""
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """Factor that multiplies B A: alpha / r, or alpha / sqrt(r)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def find_adapter(folder: Path) -> Path | None:
    """Return the adapter folder, which is `folder` or a subfolder; None: there is no adapter."""
    return next(
        (candidate for candidate in (folder, folder / ADAPTER_FOLDER) if (candidate / ADAPTER_CONFIG).exists()), None
    )


def get_initial_adapter(cfg: AdapterSettings) -> Path | None:
    """Return the folder of the initial adapter, in `model.lora.path`; None: no initial adapter."""
    return None if cfg.lora.path is None else find_adapter(resolve_asset(cfg.lora.path))


def find_base_difference(cfg: AdapterSettings) -> str | None:
    """Return an error if the adapter of `model.lora.path` was trained on another base model than `model.path`."""
    adapter = get_initial_adapter(cfg)
    base = None if adapter is None else read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or cfg.path is None or Path(str(base)).name == Path(cfg.path.partition("@")[0]).name:
        return None
    return f"model.lora.path={cfg.lora.path} was trained on {base}, but model.path={cfg.path}"


def read_adapter_spec(folder: Path) -> AdapterSpec:
    """Read `adapter_config.json`.

    Raises:
        CheckpointError: the file is missing, malformed, or of an unsupported kind.
    """
    where = folder / ADAPTER_CONFIG
    files = f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
    with reject_malformed(where, f"model.lora.path must be a folder with {files}, as peft writes it."):
        raw = read_json(where)
        targets = raw["target_modules"]
        spec = AdapterSpec(
            r=_check_number(raw["r"], int),
            lora_alpha=_check_number(raw["lora_alpha"], int | float),
            target_modules=(targets,) if isinstance(targets, str) else tuple(sorted(map(str, targets))),
            use_rslora={True: True, False: False, None: False}[raw.get("use_rslora", False)],
        )
    fix = "Use a plain LoRA adapter with the same rank in all modules, for example one that peft converted to LoRA."
    check_keys(raw, where, ignored=ADAPTER_FIELDS, supported=_SUPPORTED_VALUES, fix=fix)
    return spec


def _check_number(value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a valid rank or scale")
    return value


def get_lora_spec(cfg: AdapterSettings) -> AdapterSpec:
    """Return rank, scale and targets of the initial adapter, or of the config if there is no initial adapter.

    Raises:
        CheckpointError: see `read_adapter_spec`.
    """
    if cfg.lora.path is not None:
        folder = resolve_asset(cfg.lora.path)
        return read_adapter_spec(find_adapter(folder) or folder)
    lora = cfg.lora
    targets = split_target_names(lora)
    return AdapterSpec(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=targets, use_rslora=lora.use_rslora)


def split_target_names(lora: LoraSettings) -> tuple[str, ...]:
    """Return the sorted names in `target_modules`."""
    return tuple(sorted(name.strip() for name in lora.target_modules.split(",")))


def check_module_names(key: str, names: Collection[str], modules: Collection[str]) -> None:
    """Check that each name of a key of `model.lora` is the path of a module, or its last parts.

    Raises:
        ConfigError: a name matches none of the paths in `modules`.
    """
    for name in names:
        if not any(f".{module}".endswith(f".{name}") for module in modules):
            last_parts = {module.rpartition(".")[2] for module in modules}
            known = ", ".join(sorted(part for part in last_parts if part and not part.isdigit()))
            raise ConfigError(f"model.lora.{key}={','.join(names)}: '{name}' matches no layer. Known names: {known}.")


def find_unused_adapter_keys(lora: LoraSettings) -> list[str]:
    """Return an error if the adapter in `model.lora.path` replaces values of other keys."""
    defaults = type(lora)()
    changed = [name for name, value in lora.leaves() if name != "path" and value != defaults.get(name)]
    if lora.path is None or not changed:
        return []
    return [
        "model.lora.path is set, so all other values are those of that adapter. Remove "
        f"{', '.join(f'model.lora.{name}' for name in changed)}."
    ]


def find_adapter_problems(cfg: AdapterSettings) -> list[str]:
    """Return errors of adapter keys: keys without effect, and missing adapters."""
    lora = cfg.lora
    problems = find_unused_adapter_keys(lora)
    if lora.path is None and lora != type(lora)() and not cfg.is_lora:
        problems.append("model.lora has values but model.is_lora=false; set model.is_lora=true, or remove them.")
    if lora.path is not None:
        folder = resolve_asset(lora.path)
        adapter = find_adapter(folder)
        if adapter is None:
            problems.append(f"model.lora.path: {folder} contains no {ADAPTER_CONFIG}; use a folder written by peft.")
        else:
            try:
                read_adapter_spec(adapter)
            except CheckpointError as error:
                problems.append(f"model.lora.path: {error}")
            if merged := find_merged_adapter_problem(adapter):
                problems.append(f"model.lora.path: {merged}")
            # Weights of modules that a run fully trained in addition to its adapters; inference does not need a value
            # head.
            other_weights = [
                p.name for p in folder.glob("*.safetensors") if p.parent != adapter and p.stem != "value_head"
            ]
            if other_weights and not merged:
                problems.append(
                    f"model.lora.path: {folder} also contains {', '.join(sorted(other_weights))}, trained together "
                    "with its adapter; load both with ckpt= of that run, or name its folder lora_adapter."
                )
    return problems
