"""Processor files of LeRobot policies, which contain steps, kinds of normalization and statistics.

Does not import torch.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load

from embodyrl.errors import CheckpointError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.files import check_keys
from embodyrl.policies.vla.folder import CONFIG_FILE

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
RENAMING, RELATIVE = "rename_observations_processor", ("relative_actions_processor", "delta_actions_processor")
ABSOLUTE = "absolute_actions_processor"
IDENTITY = "IDENTITY"
_ACTION, _IMAGES = "action", "observation.image"
_COMMON_PREPROCESSOR_STEPS = (RENAMING, "to_batch_processor", "device_processor", "normalizer_processor")
_COMMON_POSTPROCESSOR_STEPS = ("unnormalizer_processor", "device_processor")
_FIX = "Set model=lerobot to run the policy in LeRobot."
_STEP_FIELDS = (
    *("action_names", "device", "enabled", "eps", "exclude_joints", "features", "max_length", "max_state_dim"),
    *("norm_map", "normalize_observation_keys", "padding", "rename_map", "task_key", "tokenizer_name", "truncation"),
)
_STEP_VALUES = {"float_dtype": (None, "float32"), "padding_side": ("right",)}
ArrayStatistics = Mapping[str, Mapping[str, npt.NDArray[Any]]]
"""Normalization statistics by feature and name (mean, std, min, max)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """Contents of the preprocessor and the postprocessor of a folder."""

    steps: Mapping[str, Sequence[Mapping[str, Any]]]
    """Steps of each processor by its name, in the order of execution."""
    statistics: ArrayStatistics
    """Statistics of the preprocessor's normalizer."""
    eps: float
    """Minimum denominator in the normalizer."""

    def get_config(self, *kinds: str) -> Mapping[str, Any] | None:
        """Return the config of the first step with one of the names, or None."""
        rows = (step for steps in self.steps.values() for step in steps if step.get("registry_name") in kinds)
        return next((step.get("config", {}) for step in rows), None)


def read_processors(
    folder: Path,
    file_contents: Mapping[str, bytes],
    modes: Mapping[str, str | None],
    *,
    mapped: bool,
    before: Collection[str] = (),
    after: Collection[str] = (),
) -> Processors:
    """Read the processors of a folder; a folder without processors has no steps and no statistics.

    Args:
        folder: folder of the policy, for messages.
        file_contents: contents of the folder's small files by name.
        modes: the policy's kind of normalization by feature; None: the policy does not read the feature. Other features
            must have IDENTITY.
        mapped: True if `model.cameras` names the environment's cameras in the order of the checkpoint.
        before: names of preprocessor steps that the policy implements, in addition to the common steps.
        after: names of postprocessor steps that the policy implements, in addition to the common steps.

    Raises:
        CheckpointError: a file is damaged, or a processor does something that the policy does not implement.
    """
    kinds = {
        PREPROCESSOR: {*_COMMON_PREPROCESSOR_STEPS, *before},
        POSTPROCESSOR: {*_COMMON_POSTPROCESSOR_STEPS, *after},
    }
    contents: dict[str, tuple[ArrayStatistics, float]] = {}
    steps_by_processor: dict[str, list[Mapping[str, Any]]] = {}
    for name in kinds:
        if f"{name}.json" not in file_contents:
            continue
        files, fix = f"{folder}/{name}.json or the file of its normalizer", "Download both files again."
        with reject_malformed(files, fix, SafetensorError):
            content = json.loads(file_contents[f"{name}.json"])
            check_keys(content, f"{folder}/{name}.json", ignored=("name", "steps"), fix=_FIX)
            steps = steps_by_processor[name] = content["steps"]
            (step,) = (step for step in steps if str(step.get("registry_name")).endswith("normalizer_processor"))
            tensors = load(file_contents[step["state_file"]]) if "state_file" in step else {}
            contents[name] = _group_by_feature(tensors), float(step["config"].get("eps", 1e-8))
            problem = _find_unknown_step(steps, kinds[name]) or next(
                _find_differences(name, step["config"], contents[name][0], modes), None
            )
            problem = problem or _find_renaming_problem(steps, mapped=mapped)
            for step in () if problem else steps:
                where = f"{folder}/{name}.json: {step['registry_name']}"
                check_keys(step, where, ignored=("config", "registry_name", "state_file"), fix=_FIX)
                check_keys(step.get("config", {}), where, ignored=_STEP_FIELDS, supported=_STEP_VALUES, fix=_FIX)
        if problem:
            raise CheckpointError(f"{folder}/{name}.json {problem} {_FIX}")
    first, second = (contents[name][0].get(_ACTION) if name in contents else None for name in kinds)
    if first and second and any(key in second and not np.array_equal(second[key], first[key]) for key in first):
        raise CheckpointError(
            f"{folder}: {PREPROCESSOR} and {POSTPROCESSOR} have different statistics of '{_ACTION}'. Download both "
            f"files again, or {_FIX[0].lower()}{_FIX[1:]}"
        )
    statistics, eps = contents.get(PREPROCESSOR, ({}, 1e-8))
    return Processors(steps=steps_by_processor, statistics=statistics, eps=eps)


def _group_by_feature(tensors: Mapping[str, npt.NDArray[Any]]) -> ArrayStatistics:
    contents: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key, tensor in tensors.items():
        feature, _, statistic = key.rpartition(".")
        contents.setdefault(feature, {})[statistic] = tensor
    return contents


def _find_unknown_step(steps: Sequence[Mapping[str, Any]], known: Collection[str]) -> str | None:
    kinds = [step.get("registry_name", step.get("class")) for step in steps]
    unknown = [kind for kind in kinds if kind not in known]
    return f"has the step '{unknown[0]}', which is not supported." if unknown else None


def _find_differences(
    name: str, scaling: Mapping[str, Any], statistics: ArrayStatistics, modes: Mapping[str, str | None]
) -> Iterator[str]:
    """Yield an error for each feature whose kind of normalization differs from the policy's kind."""
    normalized_features = scaling.get("normalize_observation_keys")
    for feature in statistics:
        if name == POSTPROCESSOR and feature != _ACTION:
            continue
        expected = modes.get(feature, IDENTITY)
        actual = scaling["norm_map"].get(scaling["features"].get(feature, {}).get("type"), IDENTITY)
        if normalized_features is not None and feature != _ACTION and feature not in normalized_features:
            actual = IDENTITY
        if expected is not None and expected != actual:
            yield f"normalizes '{feature}' by {actual}, and normalization_mapping in {CONFIG_FILE} contains {expected}."


def _find_renaming_problem(steps: Sequence[Mapping[str, Any]], *, mapped: bool) -> str | None:
    """Return an error if a step renames observations, unless `model.cameras` maps the renamed cameras."""
    for step in steps:
        renamed = step.get("config", {}).get("rename_map", {}) if step.get("registry_name") == RENAMING else {}
        pairs = {old: new for old, new in renamed.items() if old != new}
        if all(name.startswith(_IMAGES) for pair in pairs.items() for name in pair):
            if pairs and not mapped:
                text = ", ".join(f"{old} to {new}" for old, new in pairs.items())
                return f"renames cameras ({text}). Set model.cameras to your cameras in the order of {CONFIG_FILE}."
        else:
            return f"renames observations ({', '.join(pairs)}), which is not supported."
    return None


def read_image_features(folder: Path) -> list[str]:
    """Return the names of the image features in LeRobot's config.json, in order; empty for other formats."""
    config: dict[str, Any] = read_json(folder / CONFIG_FILE)
    features = config.get("input_features") or {}
    return [name for name, row in features.items() if isinstance(row, dict) and row.get("type") == "VISUAL"]


def find_camera_order_problem(features: Sequence[str], known: Sequence[str], read: Sequence[str]) -> str | None:
    """Return an error if the environment's camera order differs from the checkpoint's.

    Args:
        features: image features of the checkpoint, in order.
        known: names of all cameras of the environment.
        read: names of the cameras that the policy reads, in order.
    """
    names = [name.removeprefix(f"{_IMAGES}s.") for name in features]
    if names[: len(read)] == [*read] or not {*known} & {*names}:
        return None
    return (
        f"the checkpoint has the cameras [{','.join(names)}], but the policy would read [{','.join(read)}]. Set "
        f"env.init_params.camera_names=[{','.join(names[: len(read)])}], or, if only the names of the views differ, "
        f"model.cameras=[{','.join(read)}]."
    )
