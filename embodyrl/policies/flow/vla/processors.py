"""Checks of LeRobot's processors in a folder of pi0, pi0.5 or SmolVLA. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodyrl.errors import CheckpointError
from embodyrl.files import read_json
from embodyrl.policies.flow.vla.settings import Normalization, Pi05Settings, VlaSettings, reads_state
from embodyrl.policies.vla.folder import CONFIG_FILE, STATISTICS_FILE, read_side_file
from embodyrl.policies.vla.processors import (
    ABSOLUTE,
    POSTPROCESSOR,
    PREPROCESSOR,
    RELATIVE,
    Processors,
    read_processors,
)

TOKENIZER = "tokenizer_processor"
_STATE_PROMPT, _NORMALIZER = "pi05_prepare_state_tokenizer_processor_step", "normalizer_processor"
_STEPS = {
    "smolvla": (TOKENIZER, "smolvla_new_line_processor"),
    "pi0": (TOKENIZER, "pi0_new_line_processor", *RELATIVE),
    "pi05": (TOKENIZER, _STATE_PROMPT, *RELATIVE),
}
"""Additional processor steps of LeRobot 0.4 and 0.5 by model; `vla/processors.py` lists the common steps."""
MODES = {Normalization.mean_std: "MEAN_STD", Normalization.quantiles: "QUANTILES"}
_LEROBOT_HINT = "or set model=lerobot to run the policy in LeRobot."


def read_checked_processors(folder: Path, cfg: VlaSettings, action_dim: int) -> Processors:
    """Read the processors of a folder, and check that their steps match this implementation and the settings.

    Raises:
        CheckpointError: a file is damaged, or a processor does not match this implementation or the settings.
    """
    names = [f"{PREPROCESSOR}.json", f"{POSTPROCESSOR}.json"]
    paths = [*(folder / name for name in names), *sorted(folder.glob("policy_*processor*.safetensors"))]
    files = {path.name: read_side_file(folder, path.name) for path in paths if path.is_file()}
    # After SFT, the normalization is that of the settings, which `read_side_files` writes into the processors.
    mode = None if (folder / STATISTICS_FILE).exists() else MODES[cfg.normalization]
    modes = {"action": mode, "observation.state": mode if reads_state(cfg) else None}
    mapped, extra_preprocessors = cfg.cameras is not None, _STEPS[cfg.model_type]
    processors = read_processors(folder, files, modes, mapped=mapped, before=extra_preprocessors, after=(ABSOLUTE,))
    if problem := _find_problem(processors, cfg, action_dim):
        raise CheckpointError(f"{folder}/{PREPROCESSOR}.json {problem}")
    return processors


def read_prompt_limit(folder: Path) -> int | None:
    """Return the maximum number of prompt tokens, read from the checkpoint's files; None if the files set no limit.

    The tokenizer step of LeRobot's preprocessor overrides config.json (lerobot: tokenizer_max_length, openpi:
    max_token_len).
    """
    config: dict[str, Any] = read_json(folder / CONFIG_FILE)
    path = folder / f"{PREPROCESSOR}.json"
    steps = read_json(path).get("steps", []) if path.is_file() else []
    step = next((step for step in steps if step.get("registry_name") == TOKENIZER), {})
    limits = [step.get("config", {}).get("max_length"), *map(config.get, ("tokenizer_max_length", "max_token_len"))]
    return next((int(limit) for limit in limits if limit is not None), None)


def _find_problem(processors: Processors, cfg: VlaSettings, action_dim: int) -> str | None:
    kinds = [step.get("registry_name") for step in processors.steps.get(PREPROCESSOR, ())]
    if _STATE_PROMPT in kinds and isinstance(cfg, Pi05Settings):
        if not cfg.state_in_prompt:
            return "writes the state into the prompt, but model.state_in_prompt=false. Set model.state_in_prompt=true."
        if kinds.index(_STATE_PROMPT) < kinds.index(_NORMALIZER):
            return (
                f"writes the state into the prompt before it is normalized, which is not supported. Correct the order "
                f"of its steps, {_LEROBOT_HINT}"
            )
    prompt = processors.get_config(TOKENIZER) or {}
    if prompt.get("task_key", "task") != "task":
        return f"reads the instruction from '{prompt['task_key']}' instead of 'task'. Use 'task', {_LEROBOT_HINT}"
    return _find_relative_problem(processors, cfg, action_dim)


def _find_relative_problem(processors: Processors, cfg: VlaSettings, action_dim: int) -> str | None:
    """Return an error if the relative action dimensions differ from `model.delta_dims`."""
    steps = processors.get_config(*RELATIVE) or {}
    after = bool((processors.get_config(ABSOLUTE) or {}).get("enabled"))
    relative = bool(steps.get("enabled"))
    if relative != after:
        other = f"{POSTPROCESSOR}.json has enabled={after}"
        return f"has enabled={relative} for relative actions, but {other}. Download both files again."
    if not relative:
        # openpi's models also predict relative actions, but convert them outside the processors.
        return None
    mask = _get_relative_dims(steps, action_dim)
    count = sum(mask)
    if mask != [True] * count + [False] * (action_dim - count):
        return f"has relative dimensions after absolute dimensions: {mask}. Use another checkpoint, {_LEROBOT_HINT}"
    if count != cfg.delta_dims:
        return (
            f"has {count} relative action dimensions, but model.delta_dims={cfg.delta_dims}. "
            f"Set model.delta_dims={count}."
        )
    return None


def _get_relative_dims(steps: Mapping[str, Any], action_dim: int) -> list[bool]:
    """Return for each action dimension whether the dimension is relative to the state."""
    names, excluded = steps.get("action_names"), [str(name).lower() for name in steps.get("exclude_joints") or ()]
    if not names or not excluded:
        return [True] * action_dim
    return [not any(part in str(name).lower() for part in excluded) for name in names[:action_dim]]
