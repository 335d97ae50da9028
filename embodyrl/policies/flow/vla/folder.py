"""What a checkpoint folder of pi0, pi0.5 or SmolVLA says beside its weights: prompts, statistics, units. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.flow.prompts import PI0_PROMPT, PI05_PROMPT, SMOLVLA_PROMPT, PromptForm
from embodyrl.policies.flow.specs import FlowSpec, Pi0Spec, read_spec
from embodyrl.policies.flow.vla.settings import Normalization, Pi05Settings, VlaSettings
from embodyrl.policies.folder import CONFIG_FILE, STATISTICS_FILE, saved_config, starts_random
from embodyrl.types import FloatArray

OPENPI_FILE = "norm_stats.json"
"""openpi's file: {"norm_stats": {"state": {"mean": [...], "std": ..., "q01": ..., "q99": ...}, "actions": ...}}."""
OPENPI_EPS, LEROBOT_EPS = 1e-6, 1e-8
"""lerobot adds its own to fewer of the denominators, which is 1e-8 of a difference where the spread is not zero."""
PARTS = ("state", "actions")
_LEROBOT_PARTS = {"observation.state": "state", "action": "actions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """normalised = (x - shift) / scale for the first D dimensions; further ones pass through."""

    shift: tuple[float, ...]
    scale: tuple[float, ...]

    def normalise(self, x: npt.ArrayLike) -> FloatArray:
        """Map [..., >= D] to the units of training."""
        out = np.array(x, np.float64)
        size = len(self.shift)
        out[..., :size] = (out[..., :size] - np.asarray(self.shift)) / np.asarray(self.scale)
        return out.astype(np.float32)

    def unnormalise(self, x: npt.ArrayLike) -> FloatArray:
        """The inverse."""
        out = np.array(x, np.float64)
        size = len(self.shift)
        out[..., :size] = out[..., :size] * np.asarray(self.scale) + np.asarray(self.shift)
        return out.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatistics:
    """Numbers per dimension of a data set's states or actions: mean and std, q01 and q99, or all four."""

    numbers: Mapping[str, tuple[float, ...]]
    where: str

    def mean_std(self, eps: float = OPENPI_EPS) -> Affine:
        """(x - mean) / (std + eps): pi0 and SmolVLA.

        Raises:
            CheckpointError: there are no mean and std.
        """
        mean, std = self._pair("mean", "std")
        return Affine(shift=mean, scale=tuple(s + eps for s in std))

    def quantiles(self, eps: float = OPENPI_EPS) -> Affine:
        """(x - q01) / (q99 - q01 + eps) * 2 - 1: pi0.5.

        Raises:
            CheckpointError: there are no q01 and q99.
        """
        low, high = self._pair("q01", "q99")
        half = tuple((b - a + eps) / 2 for a, b in zip(low, high, strict=True))
        return Affine(shift=tuple(a + h for a, h in zip(low, half, strict=True)), scale=half)

    def _pair(self, first: str, second: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        found = [self.numbers.get(name, ()) for name in (first, second)]
        if not found[0] or len(found[0]) != len(found[1]):
            raise CheckpointError(
                f"{self.where} has no usable {first} and {second}; only: {', '.join(sorted(self.numbers)) or 'none'}. "
                f"Fetch the file again, or choose the normalisation that the checkpoint was trained with."
            )
        return found[0], found[1]


def read_openpi(path: Path) -> dict[str, FlowStatistics]:
    """Read openpi's `norm_stats.json`: statistics of `state` and `actions`.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["norm_stats"]
        return {part: _statistics(content[part], f"{path}: {part}") for part in PARTS}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is missing or malformed ({error!r}). It holds the statistics of the training data; take it from "
            f"the checkpoint's assets."
        ) from error


def read_lerobot(tensors: Mapping[str, Any], where: Path) -> dict[str, FlowStatistics]:
    """Statistics among the tensors of a lerobot file: its normaliser's, or an older model's own weights.

    Names are `observation.state.mean`, or `normalize_inputs.buffer_observation_state.mean`, where older models put the
    name of a robot before `buffer_`.

    Raises:
        CheckpointError: states or actions have none, or those of several robots.
    """
    found: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for key, tensor in tensors.items():
        name, _, number = key.rpartition(".")
        name = name.rpartition("buffer_")[2].replace("observation_", "observation.")
        if name in _LEROBOT_PARTS:
            row = np.asarray(tensor, np.float64).reshape(-1)
            if not np.array_equal(found[_LEROBOT_PARTS[name]].setdefault(number, row), row):
                raise CheckpointError(
                    f"{where} holds the {number} of {name} of several robots ('{key}' is not the first): nothing says "
                    f"which is meant. Write the right ones to {OPENPI_FILE} beside it."
                )
    if empty := [part for part, numbers in found.items() if not numbers]:
        raise CheckpointError(
            f"{where} holds no statistics of {' and '.join(empty)}; it is of another step, or damaged."
        )
    return {part: _statistics(numbers, f"{where}: {part}") for part, numbers in found.items()}


def _statistics(numbers: Mapping[str, Any], where: str) -> FlowStatistics:
    rows = {name: tuple(map(float, row)) for name, row in numbers.items() if np.ndim(row) == 1}
    if any(not np.isfinite(row).all() for row in rows.values()):
        raise CheckpointError(f"{where} has numbers that are not finite; the data set it was made of is damaged.")
    return FlowStatistics(numbers=rows, where=where)


def pad_dims(x: npt.ArrayLike, size: int) -> FloatArray:
    """Fill the last dimension [..., D] up with zeros."""
    x = np.asarray(x, np.float32)
    assert x.shape[-1] <= size, f"{x.shape[-1]} dimensions do not fit into the {size} of the model"
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def to_deltas(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int) -> FloatArray:
    """Subtract the state [B, S] from the first `dims` dimensions of actions [B, H, A], both in their own units."""
    return _shift(actions, state, dims, -1.0)


def from_deltas(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int) -> FloatArray:
    """Add the state again: the inverse of `to_deltas`."""
    return _shift(actions, state, dims, 1.0)


def _shift(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int, sign: float) -> FloatArray:
    out = np.array(actions, np.float32)
    out[..., :dims] += sign * np.asarray(state, np.float32)[..., None, :dims]
    return out


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


def contradictions(folder: Path, cfg: VlaSettings) -> list[str]:
    """Where lerobot's config.json says that the model was trained on other numbers than the settings give it."""
    try:
        told: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        modes: dict[str, str] = told.get("normalization_mapping") or {}
        relative = bool(told.get("use_relative_actions"))
        found = {modes[part] for part in ("ACTION", *(["STATE"] if reads_state(cfg) else [])) if part in modes}
    except (OSError, ValueError, AttributeError, TypeError):
        return []
    # What `embodyrl sft` trained has the units of its own file, and of its own settings.
    own = (folder / STATISTICS_FILE).exists()
    problems = []
    known = {str(mode).upper(): str(mode) for mode in Normalization}
    if not own and found - {str(cfg.normalization).upper()}:
        fix = [known[mode] for mode in known if {mode} == found]
        fix = f"set model.normalization={fix[0]}" if fix else f"only {', '.join(known.values())} are supported"
        problems.append(
            f"model.normalization={cfg.normalization}: {folder / CONFIG_FILE} was trained with "
            f"{' and '.join(sorted(found))} (normalization_mapping); {fix}."
        )
    if not own and relative and not cfg.delta_dims:
        problems.append(
            f"model.delta_dims=0: {folder / CONFIG_FILE} was trained on actions relative to the state "
            "(use_relative_actions); set it to the number of those (all but the gripper's: 6 on LIBERO)."
        )
    return problems


def prompt_form(cfg: VlaSettings, spec: FlowSpec) -> PromptForm:
    """How instructions are written; pi0.5 without the state reads pi0's prompts."""
    if not isinstance(spec, Pi0Spec):
        return SMOLVLA_PROMPT
    return PI05_PROMPT if isinstance(cfg, Pi05Settings) and cfg.state_in_prompt else PI0_PROMPT


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
            f"{folder} has no statistics of states and actions: neither {OPENPI_FILE} (openpi; also below assets/) "
            f"nor {_NORMALIZER} (lerobot) nor {STATISTICS_FILE}. Fetch them with the weights; without them actions "
            f"mean nothing."
        )
    if cfg.delta_dims and (folder / STATISTICS_FILE).exists():
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
    if (folder / STATISTICS_FILE).exists():
        return _read_own(folder / STATISTICS_FILE), OPENPI_EPS
    openpi = [p for p in (folder / OPENPI_FILE, *sorted(folder.glob(f"assets/**/{OPENPI_FILE}"))) if p.exists()]
    if len(openpi) > 1 and openpi[0].parent != folder:
        raise CheckpointError(
            f"{folder} has statistics of {len(openpi)} data sets: {', '.join(str(p) for p in openpi)}. Copy the one "
            f"that is meant to {folder / OPENPI_FILE}."
        )
    if openpi:
        return read_openpi(openpi[0]), OPENPI_EPS
    # Processors of their own came later: older models keep the numbers among their weights.
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
    """Configuration, tokenizer, processors and statistics, to be written beside weights again."""
    small = [p for p in sorted(folder.glob("*.json")) if not p.name.endswith(".index.json")]
    found = {p.name: p.read_bytes() for p in [*small, *sorted(folder.glob("policy_*.safetensors"))]}
    if OPENPI_FILE not in found:
        found |= {p.name: p.read_bytes() for p in sorted(folder.glob(f"assets/**/{OPENPI_FILE}"))[:1]}
    found[CONFIG_FILE] = saved_config(found[CONFIG_FILE])
    return _told_to_lerobot(found) if STATISTICS_FILE in found else found


def _told_to_lerobot(files: dict[str, bytes]) -> dict[str, bytes]:
    """Our statistics in lerobot's files too, where the folder came from there: it reads no others."""
    (entry,), config = json.loads(files[STATISTICS_FILE]).values(), json.loads(files[CONFIG_FILE])
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
