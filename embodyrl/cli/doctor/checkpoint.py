"""Check of a checkpoint by `embodyrl doctor FOLDER`: its inputs, frequent mistakes, and one forward pass."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embodyrl.api.acting import build_policy_of_config, compose_policy_config
from embodyrl.cli.dry_run import run_banner_lines
from embodyrl.commands.held_out import rendering_banner_lines
from embodyrl.commands.run_folder import resolve_initial_weights
from embodyrl.config.compose import dir_flags, format_override, options
from embodyrl.config.paths import resolve_asset, resolve_run
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError
from embodyrl.findings import Finding
from embodyrl.isolation import NoResultError, call_isolated
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import download_repositories, require_ckpt
from embodyrl.plan.environment import env_spec
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.saved import find_run_config, find_weights_config, read_saved
from embodyrl.plan.schema import Config
from embodyrl.policies import POLICIES
from embodyrl.policies.inputs import INPUTS_FILE, read_saved_inputs
from embodyrl.policies.settings import AdapterSettings, ModelSettings
from embodyrl.policies.vla.adapter import find_base_difference
from embodyrl.policies.vla.folder import is_same_data_set
from embodyrl.types import EnvSpec, FloatArray

_TIMEOUT_S = 900.0
"""Deadline of the forward pass in seconds, including the time to load the weights."""


class Mistake(NamedTuple):
    """Frequent mistake in the use of a checkpoint."""

    name: str
    keys: tuple[str, ...]
    """Config keys whose values in training reveal the mistake, or the file with these values."""
    message_parts: tuple[str, ...]
    """Parts of the messages about this mistake."""


MISTAKES = (
    Mistake("flip", (INPUTS_FILE,), ("image_rotation_deg",)),
    Mistake("gripper", (INPUTS_FILE,), ("opens at", "gripper convention")),
    Mistake("proprioception", ("model.use_proprio",), ("proprio", "a state of", "states of", "another robot")),
    Mistake("normalization", ("model.action_normalization", "model.normalization"), ("model.normalization=",)),
    Mistake("statistics key", ("model.unnorm_key",), ("unnorm_key", "statistics")),
    Mistake("crop", ("model.image_pipeline",), ("image_pipeline",)),
    Mistake("channel order", (), ()),
    Mistake("adapter", ("model.lora.path",), ("adapter", "lora")),
    Mistake("chunk length", ("model.num_action_chunks",), ("num_action_chunks",)),
    Mistake("texture colors", ("env.texture_colorspace",), ("texture_colorspace",)),
)


def diagnose(
    folder: str, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Check a run, a checkpoint or a model folder with the code that `embodyrl eval` uses.

    Args:
        folder: path, name of a run in ./runs, or `owner/name[@revision]` of the hub.
        overrides: arguments as for `embodyrl eval`, for example env= and model= for a folder without a saved config.
        config_dirs: additional folders with YAML groups.

    Returns:
        Lines (label, text) about the inputs and outputs of the policy, and the findings. The forward pass is the last
        finding, unless another check fails.

    Raises:
        CheckpointError: the folder does not exist.
        ConfigError: the files show neither the environment nor the model preset.
    """
    require_ckpt([format_override("ckpt", folder)])
    folder = str(download_repositories("ckpt", folder))
    arguments = [*overrides, *_find_options(folder, overrides, config_dirs)]
    try:
        cfg = compose_policy_config(folder, arguments, config_dirs)
        run_plan, weights = _build_plan(cfg)
        lines = run_banner_lines(cfg)
        factory = POLICIES.get(cfg.model.model_type)
        if hasattr(factory, "describe_checkpoint"):
            lines += factory.describe_checkpoint(cfg.model, run_plan.env)
    except (ConfigError, CheckpointError) as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        return [], [Finding(_find_mistake_name(problem) or "checkpoint", "FAIL", problem) for problem in problems]
    warnings = [*cfg.warnings, *run_plan.policy.warnings, *(text for _, text in rendering_banner_lines(run_plan))]
    named = {_find_mistake_name(warning): warning for warning in warnings}
    command = shlex.join(["embodyrl", "eval", format_override("ckpt", folder), *arguments, *dir_flags(config_dirs)])
    lines = [*lines, ("command", command)]
    if cfg.reads_rows:
        return lines, []
    recorded = _read_training_settings(resolve_run(folder), weights)
    findings = [Finding("settings", "warn", named.pop(""))] if "" in named else []
    for mistake in MISTAKES:
        text = named.get(mistake.name)
        findings += [Finding(mistake.name, "FAIL", text)] if text else _compare(mistake, run_plan, recorded)
    if not any(finding.level == "FAIL" for finding in findings):
        findings.append(_check_forward(folder, arguments, config_dirs))
    return lines, findings


def _build_plan(cfg: Config) -> tuple[RunPlan, Path]:
    """Return the run plan of an evaluation and the folder of its weights, after all checks of a run."""
    check_components(cfg)
    run_plan = build_run_plan(cfg, training=False)
    weights = resolve_initial_weights(cfg, run_plan.env)
    return run_plan, weights or resolve_asset(str(cfg.model.weights))


def _find_options(folder: str, overrides: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """Return the missing overrides env=, model= and model.path= for a folder without the config of its training."""
    groups = {override.partition("=")[0] for override in overrides}
    if find_run_config(resolve_run(folder)) or "experiment" in groups:
        return []
    added, path = [], format_override("model.path", folder)
    if "env" not in groups:
        recorded = _read_training_settings(resolve_run(folder), resolve_run(folder))
        keys = ("env.task_suite_name", "environment", "env.robot", "env.env_type")
        names, text = [recorded.get(key) for key in keys], Path(folder).name.lower().replace("-", "_")
        names += sorted((name for name in options("env", config_dirs) if name in text), key=len, reverse=True)
        added += [f"env={name}" for name in names if name in options("env", config_dirs)][:1]
        if not added:
            raise ConfigError(f"The files in {folder} do not contain the training environment. Add env=NAME.")
    arguments = [*overrides, *added]
    if "model" in groups:
        with suppress(EmbodyError):  # `diagnose` reports the error
            model = compose_policy_config(folder, arguments, config_dirs, fetch=False).model
            added += [path] if "path" in type(model).model_fields and "model.path" not in groups else []
        return added
    env_spec(
        compose_policy_config(folder, [*arguments, "model=random"], config_dirs, fetch=False)
    )  # for its errors only
    fitting: dict[str, dict[str, Any]] = {}
    for name in options("model", config_dirs):
        with suppress(EmbodyError):
            cfg = compose_policy_config(folder, [*arguments, f"model={name}", path], config_dirs, fetch=False)
            _build_plan(cfg)
            fitting[name] = dict(cfg.model.leaves())
    if len(fitting) == 1:
        return [*added, f"model={next(iter(fitting))}", path]
    if not fitting:
        raise ConfigError(f"{folder} fits no model= option with {' '.join(arguments)}. For the reason, add model=NAME.")
    first, *others = fitting.values()
    different = [key for key in first if any(other.get(key) != first[key] for other in others)]
    raise ConfigError(
        f"{folder} fits model={'|'.join(fitting)}. The files do not show {', '.join(different)}. Add model=NAME."
    )


def _read_training_settings(folder: Path, weights: Path) -> Mapping[str, Any]:
    """Return the settings of the training by config key, from the saved config and the file of policy inputs."""
    file = find_weights_config(folder)
    inputs = {INPUTS_FILE: ""} if (weights / INPUTS_FILE).is_file() else {}
    return read_saved_inputs(weights) | inputs | ({} if file is None else read_saved(file))


def _find_mistake_name(problem: str) -> str:
    """Return the name of the mistake that a message describes; empty for any other message."""
    return next((mistake.name for mistake in MISTAKES if any(part in problem for part in mistake.message_parts)), "")


def _compare(mistake: Mistake, run_plan: RunPlan, recorded: Mapping[str, Any]) -> list[Finding]:
    """Compare the settings of a run plan with those of the training, to find mistakes that no check of a run detects.

    The result is empty if the run has no key of the mistake.
    """
    model, env = run_plan.cfg.model, run_plan.env
    values = {key: value for key, value in run_plan.cfg.leaves() if key in mistake.keys}
    if not values and mistake.keys and INPUTS_FILE not in mistake.keys:
        return []
    text = " ".join(format_override(key, value) for key, value in values.items())
    trained = [format_override(key, recorded[key]) for key in values if recorded.get(key, values[key]) != values[key]]
    key, own = values.get("model.unnorm_key"), env.benchmark.unnorm_key
    problem = f"{text}, but the checkpoint was trained with {' '.join(trained)}" if trained else ""
    if key and own and not is_same_data_set(key, own):
        with suppress(ConfigError, CheckpointError):  # without statistics of the environment, another key may be right
            POLICIES.get(model.model_type).spec(model.model_copy(update={"unnorm_key": own}), env, 0)
            problem = problem or f"{text}, but the checkpoint has statistics of env '{env.name}': {own}"
    if "model.lora.path" in values and isinstance(model, AdapterSettings):
        problem = problem or find_base_difference(model) or ""
    if problem:
        return [Finding(mistake.name, "FAIL", problem, "the settings of the training")]
    if recorded.keys() & {*mistake.keys}:
        return [Finding(mistake.name, "ok", f"as in training {text}".strip())]
    return [Finding(mistake.name, "?", f"not visible in the files{f'; {text}' if text else ''}")]


def _check_forward(folder: str, arguments: Sequence[str], config_dirs: Sequence[Path]) -> Finding:
    """Compute one action chunk for a rendered frame in a separate process, which may fail or hang."""
    function = f"{__name__}:run_forward"
    try:
        return call_isolated(function, folder, arguments, config_dirs, kind=Finding, timeout_s=_TIMEOUT_S)
    except EmbodyError as error:
        return Finding("forward pass", "FAIL", " ".join(str(error).splitlines()))
    except NoResultError as error:
        return Finding("forward pass", "FAIL", str(error), "a GPU, a smaller model, or another checkpoint")


def run_forward(folder: str, arguments: Sequence[str], config_dirs: Sequence[Path]) -> Finding:
    """Run a forward pass in this process and return its finding."""
    policy = build_policy_of_config(compose_policy_config(folder, arguments, config_dirs))
    model, env = policy.run_plan.cfg.model, policy.make_env()
    observation, _ = env.reset(options={"episode": 0})
    started = time.monotonic()
    actions = policy.act(observation)
    duration = time.monotonic() - started
    return _describe_forward(model, env.layout, observation.get("state"), actions, duration)


def _describe_forward(
    model: ModelSettings, env: EnvSpec, state: FloatArray | None, actions: FloatArray, duration: float
) -> Finding:
    """Return the finding about actions [K, A] for an observation with `state` [S]."""
    if not np.isfinite(actions).all():
        return Finding("forward pass", "FAIL", "the actions are not finite", "another checkpoint")
    limits = getattr(POLICIES.get(model.model_type), "state_limits", lambda *_: None)(model, env)
    if limits is not None and state is not None:
        outside = np.flatnonzero((state < limits[0]) | (state > limits[1])).tolist()
        if 2 * len(outside) > len(limits[0]):
            text = f"state dimensions {outside} of env '{env.name}' are far outside the statistics of the checkpoint"
            return Finding("proprioception", "FAIL", text, "the robot and the environment of the training")
    text = f"{len(actions)} actions from {actions.min():.3g} to {actions.max():.3g} in {duration:.1f} s"
    return Finding("forward pass", "ok", text)
