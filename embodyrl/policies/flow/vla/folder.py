"""What a checkpoint folder of pi0, pi0.5 or SmolVLA says beside its weights. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.flow.configs import CONFIG_FILE, read_spec
from embodyrl.policies.flow.prompts import PI0_PROMPT, PI05_PROMPT, SMOLVLA_PROMPT, PromptForm
from embodyrl.policies.flow.specs import FlowSpec, Pi0Spec
from embodyrl.policies.flow.statistics import (
    LEROBOT_EPS,
    OPENPI_EPS,
    STATISTICS_FILE,
    Affine,
    FlowStatistics,
    read_lerobot,
    read_openpi,
)
from embodyrl.policies.flow.vla.settings import Normalization, Pi05Settings, VlaSettings

OWN_STATISTICS_FILE = "dataset_statistics.json"
"""`embodyrl sft` writes it; it counts before the checkpoint's own."""
TOKENIZER_FILE = "tokenizer.json"
RANDOM_INIT_KEY = "embodyrl_init"
"""config.json of a folder without weights says {"embodyrl_init": "random"}."""
_OWN_PARTS = {"proprio": "state", "action": "actions"}
_TOLD = ("mean", "std", "min", "max", "q01", "q99")
_NORMALIZER = "policy_preprocessor*normalizer*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Between the units of states and actions and those of the model."""

    state: Affine | None
    """None: states pass as they are."""
    actions: Affine


def kind_of(spec: FlowSpec) -> str:
    """Which of the models has these sizes."""
    if isinstance(spec, Pi0Spec):
        return "pi05" if spec.adaptive else "pi0"
    return "smolvla"


def read_folder(folder: Path, cfg: VlaSettings) -> FlowSpec:
    """Sizes of a checkpoint, with the horizon of the config.

    Raises:
        CheckpointError: config.json is missing, malformed, or of another model.
    """
    spec = read_spec(folder, adaptive=isinstance(cfg, Pi05Settings))
    if kind_of(spec) != cfg.model_type:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} is of {kind_of(spec)}, not of {cfg.model_type}; set model={kind_of(spec)}."
        )
    return spec if cfg.horizon is None else replace(spec, horizon=cfg.horizon)


def starts_random(folder: Path) -> bool:
    """Whether the folder asks for random initial weights instead of holding some."""
    try:
        return json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get(RANDOM_INIT_KEY) == "random"
    except (OSError, ValueError, AttributeError):
        return False


def prompt_form(cfg: VlaSettings, spec: FlowSpec) -> PromptForm:
    """How instructions are written; pi0.5 without the state reads pi0's prompts."""
    if not isinstance(spec, Pi0Spec):
        return SMOLVLA_PROMPT
    return PI05_PROMPT if reads_state_as_text(cfg) else PI0_PROMPT


def reads_state_as_text(cfg: VlaSettings) -> bool:
    """The state is a part of the prompt."""
    return isinstance(cfg, Pi05Settings) and cfg.state_in_prompt


def reads_state(cfg: VlaSettings) -> bool:
    """pi0.5 may do without."""
    return not isinstance(cfg, Pi05Settings) or cfg.state_in_prompt


def read_units(folder: Path, cfg: VlaSettings, state_dim: int, action_dim: int) -> Units:
    """Statistics of a folder as the config uses them, cut to the environment's dimensions.

    They are those of `dataset_statistics.json` (ours), else of openpi's `norm_stats.json` (also below `assets`), else
    of lerobot's preprocessor or older weights. A folder without weights may have none: then numbers pass as they are.

    Raises:
        CheckpointError: there are none, several, or too few dimensions.
        ConfigError: our statistics are of actions that are not relative.
    """
    found, eps = _find_statistics(folder)
    if not found:
        if starts_random(folder):
            return Units(state=None, actions=Affine(shift=(0.0,) * action_dim, scale=(1.0,) * action_dim))
        raise CheckpointError(
            f"{folder} has no statistics of states and actions: neither {STATISTICS_FILE} (openpi; also below assets/) "
            f"nor {_NORMALIZER} (lerobot) nor {OWN_STATISTICS_FILE}. Fetch them with the weights; without them actions "
            f"mean nothing."
        )
    if cfg.delta_dims and (folder / OWN_STATISTICS_FILE).exists():
        raise ConfigError(
            f"model.delta_dims={cfg.delta_dims}: the statistics that `embodyrl sft` wrote to {folder} are of actions "
            "as they are; set model.delta_dims=0."
        )
    sizes = {"actions": action_dim} | ({"state": state_dim} if reads_state(cfg) else {})
    units: dict[str, Affine] = {}
    for part, size in sizes.items():
        if part not in found:
            raise CheckpointError(f"{folder} has no statistics of {part}; it was made from data without them.")
        statistics = found[part]
        quantiles = cfg.normalization is Normalization.quantiles
        affine = statistics.quantiles(eps) if quantiles else statistics.mean_std(eps)
        if len(affine.shift) < size:
            raise CheckpointError(
                f"{statistics.where} has {len(affine.shift)} dimensions, the environment gives {size}. The checkpoint "
                f"was trained on another robot; choose another one, or train it with `embodyrl sft`."
            )
        units[part] = Affine(shift=affine.shift[:size], scale=affine.scale[:size])
    return Units(state=units.get("state"), actions=units["actions"])


def _find_statistics(folder: Path) -> tuple[Mapping[str, FlowStatistics], float]:
    """By part; and what is added to their denominators."""
    if (folder / OWN_STATISTICS_FILE).exists():
        return _read_own(folder / OWN_STATISTICS_FILE), OPENPI_EPS
    openpi = [p for p in (folder / STATISTICS_FILE, *sorted(folder.glob(f"assets/**/{STATISTICS_FILE}"))) if p.exists()]
    if len(openpi) > 1 and openpi[0].parent != folder:
        raise CheckpointError(
            f"{folder} has statistics of {len(openpi)} data sets: {', '.join(str(p) for p in openpi)}. Copy the one "
            f"that is meant to {folder / STATISTICS_FILE}."
        )
    if openpi:
        return read_openpi(openpi[0]), OPENPI_EPS
    for path in (*sorted(folder.glob(_NORMALIZER)), *sorted(folder.glob("model*.safetensors"))):
        tensors = _vectors(path)
        if tensors or path.name.startswith("policy_"):
            return read_lerobot(tensors, path), LEROBOT_EPS
    return {}, OPENPI_EPS


def _vectors(path: Path) -> dict[str, np.ndarray]:
    """Statistics among the tensors of a file; no weight is read."""
    old = ("normalize_inputs.", "unnormalize_outputs.", "observation.state.", "action.")
    try:
        with safe_open(path, "np") as file:
            return {key: file.get_tensor(key) for key in file.keys() if key.startswith(old)}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error}); fetch it again.") from error


def _read_own(path: Path) -> dict[str, FlowStatistics]:
    try:
        (entry,) = json.loads(path.read_text(encoding="utf-8")).values()
        return {
            ours: FlowStatistics(
                numbers={name: tuple(map(float, entry[part][name])) for name in ("mean", "std", "q01", "q99")},
                where=f"{path}: {part}",
            )
            for part, ours in _OWN_PARTS.items()
            if part in entry
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is malformed ({error!r}); `embodyrl sft` writes it.") from error


def side_files(folder: Path) -> dict[str, bytes]:
    """Configuration, tokenizer, processors and statistics, to be written beside weights again.

    The marker that asks for random weights is dropped: a saved folder has weights, and losing them must be an error.
    """
    small = [p for p in sorted(folder.glob("*.json")) if not p.name.endswith(".index.json")]
    found = {p.name: p.read_bytes() for p in [*small, *sorted(folder.glob("policy_*.safetensors"))]}
    if STATISTICS_FILE not in found:
        found |= {p.name: p.read_bytes() for p in sorted(folder.glob(f"assets/**/{STATISTICS_FILE}"))[:1]}
    config: dict[str, Any] = json.loads(found[CONFIG_FILE])
    if config.pop(RANDOM_INIT_KEY, None) is not None:
        found[CONFIG_FILE] = (json.dumps(config, indent=2) + "\n").encode()
    return _told_to_lerobot(found) if OWN_STATISTICS_FILE in found else found


def _told_to_lerobot(files: dict[str, bytes]) -> dict[str, bytes]:
    """Our statistics in lerobot's files too, where the folder came from there: it reads no others."""
    (entry,), config = json.loads(files[OWN_STATISTICS_FILE]).values(), json.loads(files[CONFIG_FILE])
    parts = {"observation.state": ("proprio", "input_features"), "action": ("action", "output_features")}
    numbers = {theirs: entry[ours] for theirs, (ours, _) in parts.items() if ours in entry}
    for name in [name for name in files if fnmatch(name, "policy_*normalizer*.safetensors")]:
        kept = {k: t for k, t in load(files[name]).items() if k.rpartition(".")[0] not in numbers}
        told = {f"{part}.{n}": row[n] for part, row in numbers.items() for n in _TOLD if n in row}
        files[name] = save(kept | {key: np.asarray(row, np.float32) for key, row in told.items()})
    for part, (_, features) in parts.items():
        if part in numbers and part in config.get(features, {}):
            config[features][part]["shape"] = [len(numbers[part]["mean"])]
    return files | {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode()}
