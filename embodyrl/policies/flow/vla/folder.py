"""Config, prompts and normalization in a checkpoint folder of pi0, pi0.5 or SmolVLA. Does not import torch."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from embodyrl.config.settings import format_value
from embodyrl.errors import CheckpointError, ConfigError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.flow.prompts import PI0_PROMPT, PI05_PROMPT, SMOLVLA_PROMPT, FlowPromptEncoder, PromptFormat
from embodyrl.policies.flow.specs import FlowSpec, Pi0Spec, read_spec
from embodyrl.policies.flow.vla.processors import MODES, read_checked_processors, read_prompt_limit
from embodyrl.policies.flow.vla.settings import Normalization, Pi05Settings, VlaSettings, reads_state
from embodyrl.policies.flow.vla.statistics import (
    LEROBOT_EPS,
    OPENPI_EPS,
    OPENPI_FILE,
    STATISTIC_PATTERN,
    Affine,
    FlowStatistics,
    read_lerobot,
    read_openpi,
    to_statistics,
)
from embodyrl.policies.steering.settings import SHAPE_FILE
from embodyrl.policies.vla.folder import (
    CONFIG_FILE,
    STATISTICS_FILE,
    TOKENIZER_FILE,
    find_data_set,
    has_random_init,
    read_sft_statistics,
    read_side_file,
    remove_random_init_key,
)
from embodyrl.policies.vla.processors import POSTPROCESSOR, PREPROCESSOR
from embodyrl.types import FloatArray


def pad_dims(x: npt.ArrayLike, size: int) -> FloatArray:
    """Pad the last dimension [..., D] with zeros."""
    x = np.asarray(x, np.float32)
    assert x.shape[-1] <= size, f"{x.shape[-1]} dimensions do not fit into the {size} of the model"
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def to_deltas(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int) -> FloatArray:
    """Subtract the state [B, S] from the first `dims` dimensions of actions [B, H, A], both unnormalized."""
    return from_deltas(actions, -np.asarray(state, np.float32), dims)


def from_deltas(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int) -> FloatArray:
    """Add the state [B, S] to the first `dims` dimensions of actions [B, H, A]: the inverse of `to_deltas`."""
    out = np.array(actions, np.float32)
    out[..., :dims] += np.asarray(state, np.float32)[..., None, :dims]
    return out


_STATISTIC_NAMES = ("mean", "std", "min", "max", "q01", "q99")
_NORMALIZER = "policy_preprocessor*normalizer*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """Conversion between the units of states and actions and the units of the model."""

    state: Affine | None
    """State conversion; None: states are unchanged."""
    actions: Affine


def get_model_type(spec: FlowSpec) -> str:
    """Return the model type with these sizes: pi0, pi05 or smolvla."""
    if isinstance(spec, Pi0Spec):
        return "pi05" if spec.adaptive else "pi0"
    return "smolvla"


def read_flow_spec(folder: Path, cfg: VlaSettings) -> FlowSpec:
    """Read the sizes of a checkpoint; `horizon` in the settings overrides the checkpoint's horizon.

    Raises:
        CheckpointError: config.json is missing, malformed, or of another model.
    """
    spec = read_spec(folder, adaptive=isinstance(cfg, Pi05Settings))
    if get_model_type(spec) != cfg.model_type:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} describes a {get_model_type(spec)} model, not {cfg.model_type}; set "
            f"model={get_model_type(spec)}."
        )
    return spec if cfg.horizon is None else replace(spec, horizon=cfg.horizon)


def find_contradictions(folder: Path, cfg: VlaSettings) -> list[str]:
    """Return contradictions between LeRobot's config.json and the settings."""
    config: dict[str, Any] = read_json(folder / CONFIG_FILE)
    modes: dict[str, str] = config.get("normalization_mapping") or {}
    trained_modes = {modes[part] for part in ("ACTION", *(["STATE"] if reads_state(cfg) else [])) if part in modes}
    problems = []
    known = {str(mode).upper(): str(mode) for mode in Normalization}
    if trained_modes - {str(cfg.normalization).upper()}:
        fix = [known[mode] for mode in known if {mode} == trained_modes]
        fix = f"set model.normalization={fix[0]}" if fix else f"only {', '.join(known.values())} are supported"
        problems.append(
            f"model.normalization={cfg.normalization}: {folder / CONFIG_FILE} was trained with "
            f"{' and '.join(sorted(trained_modes))} (normalization_mapping); {fix}."
        )
    if isinstance(cfg, Pi05Settings) and config.get("discrete_state_input", cfg.state_in_prompt) != cfg.state_in_prompt:
        stored = format_value(not cfg.state_in_prompt)
        problems.append(
            f"model.state_in_prompt={format_value(cfg.state_in_prompt)}: {folder / CONFIG_FILE} has "
            f"discrete_state_input={stored}; set model.state_in_prompt={stored}."
        )
    if config.get("use_relative_actions") and not cfg.delta_dims:
        problems.append(
            f"model.delta_dims=0: {folder / CONFIG_FILE} was trained on actions relative to the state "
            f"(use_relative_actions); set model.delta_dims to the number of relative dimensions (all except the "
            f"gripper: 6 on LIBERO)."
        )
    return problems


def get_prompt_format(cfg: VlaSettings, spec: FlowSpec, folder: Path) -> PromptFormat:
    """Return the prompt format; pi0.5 without the state uses pi0's prompts.

    The checkpoint's files may limit the length.
    """
    prompt_format = SMOLVLA_PROMPT
    if isinstance(spec, Pi0Spec):
        prompt_format = PI05_PROMPT if isinstance(cfg, Pi05Settings) and cfg.state_in_prompt else PI0_PROMPT
    return replace(prompt_format, max_tokens=read_prompt_limit(folder) or prompt_format.max_tokens)


def check_prompts(prompt_format: PromptFormat, folder: Path, tasks: Sequence[str], state_dim: int) -> None:
    """Check that no instruction exceeds the model's maximum length.

    Raises:
        ConfigError: an instruction has too many tokens; the message contains the instruction.
    """
    state = np.zeros(state_dim, np.float32) if prompt_format.reads_state else None
    # A token is at least one byte, so most instructions need no tokenizer.
    max_short_bytes = (
        prompt_format.max_tokens
        - len(prompt_format.template)
        - len(prompt_format.suffix)
        - 4 * state_dim * prompt_format.reads_state
        - 2
    )
    if long_tasks := [task for task in tasks if len(task.encode()) > max_short_bytes]:
        prompts = FlowPromptEncoder(folder / TOKENIZER_FILE, prompt_format)
        for task in long_tasks:
            prompts.encode(task, state)


def find_warnings(folder: Path, cfg: VlaSettings) -> tuple[str, ...]:
    """Return warnings about settings that differ from the checkpoint's, such as the number of executed actions."""
    config: dict[str, Any] = read_json(folder / CONFIG_FILE)
    settings = {
        "n_action_steps": ("executes {} actions per query", "model.num_action_chunks", cfg.num_action_chunks),
        "num_steps": ("uses {} denoising steps", "model.num_steps", cfg.num_steps),
        "num_inference_steps": ("uses {} denoising steps", "model.num_steps", cfg.num_steps),
    }
    return tuple(
        f"the checkpoint {text.format(config[name])} ({name}), but {key}={value} is set"
        for name, (text, key, value) in settings.items()
        if config.get(name, value) != value and not (folder / STATISTICS_FILE).exists()
    )


def read_normalizer(folder: Path, cfg: VlaSettings, state_dim: int, action_dim: int) -> Normalizer:
    """Read the statistics of a folder that the settings select, truncated to the environment's dimensions.

    Sources are `dataset_statistics.json` (embodyrl), openpi's `norm_stats.json` (also in `assets`), and LeRobot's
    preprocessor or older weights. A folder without weights may lack statistics; then values are not normalized.

    Raises:
        CheckpointError: the statistics are missing, ambiguous, or have too few dimensions.
        ConfigError: the settings contradict config.json, or `embodyrl sft` wrote statistics of absolute actions.
    """
    is_sft = (folder / STATISTICS_FILE).exists()
    if not is_sft and (problems := find_contradictions(folder, cfg)):
        raise ConfigError(problems)
    statistics_by_part, eps = _find_statistics(folder, cfg, action_dim)
    if not statistics_by_part:
        if has_random_init(folder):
            return Normalizer(state=None, actions=Affine(shift=(0.0,) * action_dim, scale=(1.0,) * action_dim))
        raise CheckpointError(
            f"{folder} has no statistics of states and actions: neither {OPENPI_FILE} (openpi; also in assets/) "
            f"nor {_NORMALIZER} (lerobot) nor {STATISTICS_FILE}. Download them with the weights; without them actions "
            f"cannot be unnormalized."
        )
    if is_sft and (cfg.delta_dims or read_json(folder / CONFIG_FILE).get("use_relative_actions")):
        key = f"model.delta_dims={cfg.delta_dims}" if cfg.delta_dims else f"use_relative_actions=true in {CONFIG_FILE}"
        raise ConfigError(
            f"{key}: `embodyrl sft` trains absolute actions, which its {STATISTICS_FILE} describes. Set "
            "model.delta_dims=0, and use a checkpoint without use_relative_actions."
        )
    sizes = {"actions": action_dim} | ({"state": state_dim} if reads_state(cfg) else {})
    converters: dict[str, Affine] = {}
    for part, size in sizes.items():
        if part not in statistics_by_part:
            raise CheckpointError(
                f"{folder} has no statistics of {part}, because its data set has none. Use another checkpoint."
            )
        statistics = statistics_by_part[part]
        quantiles = cfg.normalization is Normalization.quantiles
        affine = statistics.quantiles(eps) if quantiles else statistics.mean_std(eps)
        # Published statistics may be padded with constant dimensions.
        padded = all(scale <= OPENPI_EPS for scale in affine.scale[size:])
        if len(affine.shift) < size or not padded:
            raise CheckpointError(
                f"{statistics.where} has {len(affine.shift)} dimensions, but the environment has {size}. The "
                f"checkpoint was trained on another robot. Use another checkpoint, or fine-tune it with `embodyrl sft`."
            )
        clip = statistics.clip(size) if is_sft else ()
        converters[part] = Affine(shift=affine.shift[:size], scale=affine.scale[:size], clip=clip)
    return Normalizer(state=converters.get("state"), actions=converters["actions"])


def _find_statistics(folder: Path, cfg: VlaSettings, action_dim: int) -> tuple[Mapping[str, FlowStatistics], float]:
    """Return statistics by part (state, actions), and the epsilon that is added to the denominators."""
    key = cfg.unnorm_key
    processors = read_checked_processors(folder, cfg, action_dim)
    if (folder / STATISTICS_FILE).exists():
        sft_statistics = read_sft_statistics(folder / STATISTICS_FILE)
        parts = {"proprio": "state", "action": "actions"}
        return {
            name: to_statistics(sft_statistics[part], f"{folder}: {name}")
            for part, name in parts.items()
            if part in sft_statistics
        }, OPENPI_EPS
    if (openpi := _find_openpi_file(folder, key)) is not None:
        return read_openpi(openpi), OPENPI_EPS
    if processors.statistics:
        flat = {f"{part}.{name}": row for part, rows in processors.statistics.items() for name, row in rows.items()}
        return read_lerobot(flat, folder / f"{PREPROCESSOR}.json", key), processors.eps
    # Older models have no processors and store the statistics with the weights.
    for path in (*sorted(folder.glob(_NORMALIZER)), *sorted(folder.glob("model*.safetensors"))):
        tensors = _read_statistics(path)
        if tensors or path.name.startswith("policy_"):
            return read_lerobot(tensors, path, key), LEROBOT_EPS
    return {}, OPENPI_EPS


def _find_openpi_file(folder: Path, key: str | None) -> Path | None:
    """Return openpi's statistics file in the folder or in assets/<data set>; `key` selects the data set."""
    if (folder / OPENPI_FILE).exists():
        return folder / OPENPI_FILE
    assets = {p.parent.relative_to(folder / "assets").as_posix(): p for p in folder.glob(f"assets/**/{OPENPI_FILE}")}
    return assets[find_data_set(key, assets, folder / "assets")] if assets else None


def _read_statistics(path: Path) -> dict[str, np.ndarray]:
    """Read the normalization statistics from a safetensors file, without reading the weights."""
    with reject_malformed(path, "Download it again.", SafetensorError), safe_open(path, "np") as file:
        return {key: file.get_tensor(key) for key in file.keys() if STATISTIC_PATTERN.fullmatch(key)}  # noqa: SIM118


def read_side_files(folder: Path, cfg: VlaSettings) -> dict[str, bytes]:
    """Read configuration, tokenizer, processors and the selected statistics, to save them with new weights."""
    # The steering policy writes the shape of its own actor.
    small = [p for p in sorted(folder.glob("*.json")) if not p.name.endswith((".index.json", SHAPE_FILE))]
    files = {p.name: read_side_file(folder, p.name) for p in [*small, *sorted(folder.glob("policy_*.safetensors"))]}
    files[CONFIG_FILE] = remove_random_init_key(files[CONFIG_FILE])
    if STATISTICS_FILE in files:
        files.pop(OPENPI_FILE, None)  # statistics of other data
        return _with_lerobot_statistics(files, MODES[cfg.normalization])
    if (openpi := _find_openpi_file(folder, cfg.unnorm_key)) is not None:
        files[OPENPI_FILE] = read_side_file(folder, openpi.relative_to(folder))
    return files


def _with_lerobot_statistics(files: dict[str, bytes], mode: str) -> dict[str, bytes]:
    """Copy embodyrl's statistics and normalization into the LeRobot files among `files`; return all files."""
    (entry,), config = json.loads(files[STATISTICS_FILE]).values(), json.loads(files[CONFIG_FILE])
    parts = {"observation.state": ("proprio", "input_features"), "action": ("action", "output_features")}
    numbers = {
        external_name: entry[local_name] for external_name, (local_name, _) in parts.items() if local_name in entry
    }
    names = [name for name in (PREPROCESSOR, POSTPROCESSOR) if f"{name}.json" in files]
    processors = {name: json.loads(files[f"{name}.json"]) for name in names}
    for name, content in processors.items():
        files |= _add_statistics_files(name, content["steps"], numbers)
    for name in [name for name in files if fnmatch(name, "policy_*normalizer*.safetensors")]:
        other_tensors = {k: t for k, t in load(files[name]).items() if not (numbers and STATISTIC_PATTERN.fullmatch(k))}
        tensors = {f"{part}.{n}": row[n] for part, row in numbers.items() for n in _STATISTIC_NAMES if n in row}
        files[name] = save(other_tensors | {key: np.asarray(row, np.float32) for key, row in tensors.items()})
    modes = dict.fromkeys((part.rpartition(".")[2].upper() for part in numbers), mode)
    if config.get("normalization_mapping"):
        config["normalization_mapping"] |= modes
    steps = [step.get("config") or {} for content in processors.values() for step in content["steps"]]
    for step in steps:
        if "norm_map" in step:
            step["norm_map"] |= modes
    feature_maps = [*(config.get(name) for _, name in parts.values()), *(step.get("features") for step in steps)]
    for features in filter(None, feature_maps):
        for part in numbers.keys() & features.keys():
            features[part]["shape"] = [len(numbers[part]["mean"])]
    changed = {CONFIG_FILE: config} | {f"{name}.json": content for name, content in processors.items()}
    return files | {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in changed.items()}


def _add_statistics_files(processor: str, steps: Sequence[dict[str, Any]], parts: Collection[str]) -> dict[str, bytes]:
    """Declare a statistics file in each normalizer without one (lerobot/pi05_base has none); return the new files."""
    new_files: dict[str, bytes] = {}
    for index, step in enumerate(steps):
        kind = str(step.get("registry_name"))
        if not kind.endswith("normalizer_processor") or "state_file" in step:
            continue
        step["state_file"] = f"{processor}_step_{index}_{kind}.safetensors"
        new_files[step["state_file"]] = save({})
        normalized = parts if processor == PREPROCESSOR else {"action"}
        step["config"]["features"] |= {part: {"type": part.rpartition(".")[2].upper()} for part in normalized}
    return new_files
