"""Saved configs of runs: writing, reading, and use as the base of another config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodyrl.channels.messages import POLICY_FOLDER
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.config.compose import Setting, flatten, format_override, parse_override
from embodyrl.config.paths import is_on_hub, resolve_asset, resolve_run
from embodyrl.config.plain_yaml import dump_plain_yaml, read_plain_yaml
from embodyrl.config.settings import format_value, is_key_or_subkey, to_builtin
from embodyrl.config.trust import find_untrusted_values
from embodyrl.envs import ENVS
from embodyrl.errors import ConfigError, mask_hidden_values
from embodyrl.files import write_atomically
from embodyrl.hub import download
from embodyrl.parts import ENVIRONMENTS
from embodyrl.plan.schema import Config
from embodyrl.policies.inputs import INPUTS_FILE, read_saved_inputs
from embodyrl.registry import FORMER_NAMES
from embodyrl.text.model_folder import find_missing_weights

_REMOVED = ("rollout.dump", "eval.baseline")
"""Removed keys of version 0.1, which are ignored in configs of old runs."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_REPLY = "algorithm.sampling_params.max_new_tokens"
EXPORTED_CONFIG = "embodyrl_config.yaml"
"""Name of the run's config in an exported folder."""
ENVIRONMENT_FILE = "environment.yaml"
"""Name of the file of an SFT run that contains the settings of the demonstrations' environment."""
START_FOLDER = "start"
"""Name of the folder of an SFT run that contains the initial weights with the statistics of the run's data."""
_RUN_KEYS = (
    *("trust", "ckpt", "runner.experiment_name", "runner.on_existing", "runner.resume_dir", "runner.only_eval"),
    *("eval.protocol.settled", "serve", "video_cfg.base_dir", "collect.out"),
)
"""Keys that a command does not inherit from the run whose weights it uses."""
_BASE_WEIGHTS = frozenset({"model.path", "model.lora.path"})
_PROTOCOL_KEYS = ("env", "eval", "runner.val_suites")
"""Keys that `eval.protocol.settings` may set."""
_ENV_KEYS = ("env", "data", "reward", "eval", "runner.val_suites", _REPLY)
"""Keys that are not inherited from a run if the command line selects another environment."""


def find_run_config(path: Path) -> Path | None:
    """Return the config of the run that contains a path or exported a folder; None: the path belongs to no run."""
    exported = path / EXPORTED_CONFIG
    if exported.is_file() and "launcher" in read_plain_yaml(exported):
        return exported
    for folder in (path, *path.parents):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return folder / "config.yaml"
    return None


def find_weights_config(path: Path) -> Path | None:
    """Return the saved config of a checkpoint: that of its run, or the partial config of an included checkpoint."""
    return path / EXPORTED_CONFIG if (path / EXPORTED_CONFIG).is_file() else find_run_config(path)


def find_ckpt_config(arguments: Sequence[str]) -> Path | None:
    """Return the path of the config.yaml of the run that `ckpt=` selects; None: `ckpt=` selects no run."""
    ckpt_arguments = [argument for argument in arguments if argument.startswith("ckpt=")]
    if not ckpt_arguments:
        return None
    with suppress(ConfigError):  # invalid arguments are reported later, with all other errors
        return find_run_config(_resolve_weights_folder("ckpt", str(parse_override(ckpt_arguments[-1])[1])))
    return None


def save_config(cfg: Config, path: Path) -> None:
    """Write all keys and values of a config as YAML, from which `load_saved_config` loads an equal config."""
    write_atomically(path, dump_config(cfg))


def dump_config(cfg: Config, group: str | None = None) -> str:
    """Return all keys and values of a config, or of the group `group`, as YAML.

    Values of environment variables are written as `${oc.env:NAME}`.
    """
    values = to_builtin(cfg) if group is None else {group: to_builtin(getattr(cfg, group))}
    return dump_plain_yaml(_mask_values(values))


def _mask_values(node: Any) -> Any:
    """Return the tree with hidden values masked and `${` in other text escaped, before YAML quotes the values."""
    if isinstance(node, dict):
        return {_mask_values(key): _mask_values(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_mask_values(item) for item in node]
    return mask_hidden_values(_INTERPOLATION.sub(r"\1\1\\${", node)) if isinstance(node, str) else node


_MAX_KEYS = 5000


def read_saved(file: Path) -> dict[str, Any]:
    """Return the values in the `config.yaml` of a run, by dotted key.

    Raises:
        ConfigError: the file is missing or malformed, or contains YAML tags (which could construct objects).
    """
    saved = {key: value for key, value in flatten(read_plain_yaml(file)).items() if key not in _REMOVED}
    if len(saved) > _MAX_KEYS:
        raise ConfigError(f"{file} has {len(saved)} keys; a config has at most {_MAX_KEYS}. Use another file.")
    if "env.env_type" in saved:
        env_type = str(saved["env.env_type"])
        saved["env.env_type"] = env_type = FORMER_NAMES.get(env_type, env_type)
        if env_type in ENVIRONMENTS:  # another package is imported only if the config is trusted
            former_values = ENVS.get(env_type).settings.former_values
            saved = {f"env.{key}": value for key, value in former_values.items()} | saved
    return saved


def changed_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of each changed key of a saved config, formatted as on the command line."""
    return [
        (name, format_value(value), format_value(defaults[name]) if name in defaults else "")
        for name, value in flatten(config).items()
        if name not in defaults or value != to_builtin(defaults[name])
    ]


def infer_command(saved: Iterable[str]) -> str:
    """Return the command that wrote a saved config, inferred from the sections of the keys `saved`."""
    sections = {key.partition(".")[0] for key in saved}
    if "env" not in sections:
        return "sft"
    if "dagger" in sections:
        return "dagger"
    return "train" if "checkpoint" in sections else "collect" if "collect" in sections else "eval"


def merge_with_base(
    base: Path,
    command: str,
    groups: Mapping[str, str],
    file_settings: Sequence[Setting],
    overrides: Sequence[Setting],
    problems: list[str],
) -> list[Setting]:
    """Return the settings inherited from the run with the initial weights, merged with the selected group options."""
    saved = _get_base_settings(base, command, groups, file_settings, problems)
    # The settings of a protocol are overrides, so their values may also refer to code.
    check_trust(_values([*saved, *get_protocol_settings(saved, [])]), overrides, base, problems)
    sections = {setting.key.partition(".")[0] for setting in saved}
    unsaved = [s for s in file_settings if s.key.partition(".")[0] not in sections]
    # Cameras and frozen base weights are not replaced, because the weights were trained with these values.
    fixed_keys = {s.key for s in saved if s.key.startswith("env.init_params.") or s.key in _BASE_WEIGHTS}
    return [*unsaved, *saved, *(s for s in file_settings if _is_set_by(s, groups) and s.key not in fixed_keys)]


def get_protocol_settings(settings: Sequence[Setting], problems: list[str]) -> list[Setting]:
    """Return the settings in `eval.protocol.settings`, which override values from files."""
    entries = [entry for entry in settings if entry.key == "eval.protocol.settings"][-1:]
    protocol_settings = [Setting("eval.episodes", None, entry.source) for entry in entries if entry.value]
    for entry in entries:
        for override in entry.value if isinstance(entry.value, list) else ():
            try:
                key, value = parse_override(str(override))
            except ConfigError as error:
                problems += error.problems
                continue
            if not is_key_or_subkey(key, _PROTOCOL_KEYS):
                problems.append(
                    f"{entry.where}{override}: a protocol sets only {', '.join(_PROTOCOL_KEYS)}. Remove this key."
                )
                continue
            protocol_settings += [
                Setting(name, leaf, entry.source, entry.override) for name, leaf in flatten({key: value}).items()
            ]
    return protocol_settings


def find_start_folder(run: Path) -> Path | None:
    """Return the copy of the initial weights with statistics of the run's data; None: missing or incomplete."""
    start = run / START_FOLDER
    return start if start.is_dir() and all(path.exists() for path in start.iterdir()) else None


def _find_complete_weights(base: Path, saved: Mapping[str, Any]) -> Path | None:
    """Return the folder with all weights and merged adapters from which the policy of a run is built.

    An exported folder contains all weights. If the folder of the initial weights was moved or deleted, the newest
    checkpoint is used, unless it contains adapters only. None: the policy is built from the initial weights.
    """
    if base.name == EXPORTED_CONFIG:
        return base.parent
    path, newest = saved.get("model.path"), CheckpointStore(base.parent / "checkpoints").latest()
    if newest is None or not isinstance(path, str) or is_on_hub(path) or resolve_asset(path).exists():
        return None
    folder = newest / POLICY_FOLDER
    is_complete = (folder / "config.json").is_file() and find_missing_weights(folder, "model*.safetensors") is None
    return folder if is_complete else None


def _get_base_settings(
    base: Path, command: str, groups: Mapping[str, str], file_settings: Sequence[Setting], problems: list[str]
) -> list[Setting]:
    """Return the settings that a command inherits from the run whose weights it uses.

    These are all settings except the sections of command-line groups. `train` inherits only environment and model from
    a run of another command.
    """
    saved, file_values = read_saved(base), _values(file_settings)
    command_of_run = infer_command(saved)
    if "model.path" in saved and (start := find_start_folder(base.parent)) is not None:
        saved["model.path"] = str(start)
    if (folder := _find_complete_weights(base, saved)) is not None:
        complete_values = {"model.path": str(folder), "model.is_lora": False, "model.lora.path": None}
        saved |= {key: value for key, value in complete_values.items() if key in saved}
    excluded = {*_RUN_KEYS, *groups, *(_ENV_KEYS if "env" in groups else ())}
    if "eval" in groups:
        excluded.add("runner.val_suites")
    # runner.output_dir of a run that was copied from another machine is not used.
    if Path(str(saved.get("runner.output_dir"))).resolve() != base.parent.parent.resolve():
        excluded.add("runner.output_dir")
    if command != "train":
        excluded.add("runner.logger")  # a run without a console must not silence its evaluation
    # The reply length is part of the task; an environment of the same kind keeps the images that the weights were
    # trained on.
    inherited = {"algorithm.sampling_params"} - excluded if "env" not in groups else set()
    if "env" in groups and saved.get("env.env_type") == file_values.get("env.env_type"):
        inherited.add("env.init_params")
    if "model" in groups and saved.get("model.model_type") == file_values.get("model.model_type"):
        inherited |= _BASE_WEIGHTS
    settings = [Setting(key, value, str(base)) for key, value in saved.items()]
    if command_of_run not in ("train", "eval") and "env" not in groups:
        settings += _get_data_environment(base, saved, problems)
    if command == "train" and command_of_run != "train":
        settings = [setting for setting in settings if is_key_or_subkey(setting.key, ("env", "model"))]
    return [s for s in settings if is_key_or_subkey(s.key, inherited) or not is_key_or_subkey(s.key, excluded)]


def _get_data_environment(file: Path, saved: Mapping[str, Any], problems: list[str]) -> list[Setting]:
    """Return the settings of the environment in which the data of the SFT or DAgger run with this config were recorded.

    Tasks and time limit of the evaluation are those of the recording.
    """
    values = {key: value for key, value in saved.items() if key.startswith("env.")}
    if not values:
        run, file = file.parent, file.parent / ENVIRONMENT_FILE
        if not file.is_file():
            problems.append(f"{run} was trained on data without a known environment; set env=...")
            return []
        values = read_saved(file)
    eval_keys = ["max_episode_steps", "task_ids"]
    if "env.train.state_ids" in values and values["env.train.state_ids"] is None:
        eval_keys.append("state_ids")  # null selects all states; other state ids may not exist
    values |= {f"env.eval.{key}": values[f"env.train.{key}"] for key in eval_keys if f"env.train.{key}" in values}
    return [Setting(key, value, str(file)) for key, value in values.items()]


def _is_set_by(setting: Setting, groups: Mapping[str, str]) -> bool:
    """Return True if the setting comes from the file of a command-line group and fits the weights of the run."""
    folders = Path(setting.source).parts[-3:-1]
    fits_weights = "start" not in folders or "model" in groups or not setting.key.startswith("model.")
    return fits_weights and any(group in folders for group in groups)


_IMAGES = [*(f"env.init_params.camera_{part}" for part in ("heights", "widths", "names")), "env.texture_colorspace"]
_CHUNK, _NUM_IMAGES = "model.num_action_chunks", "model.num_images_in_input"
_HORIZONS = ["env.train.max_episode_steps", "env.eval.max_episode_steps"]
_TASKS = ["env.train.task_ids", "env.eval.task_ids"]
_TASK_KEYS = ("env.env_type", "env.task_suite_name", "env.id")
"""Keys with equal values in two environments if both have the same tasks and time limit."""


def get_weight_settings(
    command: str, settings: Sequence[Setting], problems: list[str], *, fetch: bool
) -> tuple[list[Setting], list[str]]:
    """Return the settings with which weights were trained, and a warning about differing command-line values.

    The settings are size and colors of the images, chunk length, time limit and tasks. These settings replace values of
    presets, but not values of the file that sets `model.path`. Time limit, tasks and images are returned only for the
    environment of the training. With `fetch`, the description of weights on the hub is downloaded.
    """
    last = {setting.key: setting for setting in settings}
    weights_setting = next((last[key] for key in ("ckpt", "model.path") if key in last and last[key].value), None)
    if weights_setting is None or not isinstance(weights_setting.value, str):
        return [], []
    task_values = {key: last[key].value for key in _TASK_KEYS if key in last}
    path = weights_setting.value
    try:
        folder = _resolve_weights_folder(weights_setting.key, path) if fetch else resolve_run(path)
        file, description = _read_description(folder, task_values)
    except ConfigError as error:
        problems += error.problems
        return [], []
    keys = [_CHUNK]
    values = _values(settings)
    keys += [_NUM_IMAGES] if description.get("model.model_type") == values.get("model.model_type") else []
    keys += _IMAGES if description.get("env.env_type") == task_values.get("env.env_type") else []
    if task_values and all(description.get(key) == value for key, value in task_values.items()):
        keys += [*_HORIZONS, *(key for key in _TASKS if key not in last)]  # presets and arguments select other tasks
    weight_settings = [Setting(key, description[key], str(file)) for key in keys if key in description]
    length, chunk = description.get(_CHUNK), last.get(_CHUNK)
    if command != "sft" and isinstance(length, int) and chunk is not None and chunk.is_set_by_user:
        text = f"{chunk.where}the weights {path} output chunks of {length} actions. Use at most {length}."
        problems += [text] if isinstance(chunk.value, int) and chunk.value > length else []
    changed = [
        s.key for s in weight_settings if s.key in last and last[s.key].is_set_by_user and last[s.key].value != s.value
    ]
    given, trained = (
        " ".join(format_override(key, source[key]) for key in changed) for source in (values, description)
    )
    warnings = [f"{given}: the weights {path} were trained with {trained}."] if changed else []
    return [
        s
        for s in weight_settings
        if weights_setting.is_set_by_user or s.key not in last or last[s.key].source != weights_setting.source
    ], warnings


def _resolve_weights_folder(key: str, path: str) -> Path:
    """Return the folder of weights; for a hub repository, the files that describe the weights are downloaded.

    Raises:
        ConfigError: the repository does not exist, or the hub cannot be reached.
    """
    if not is_on_hub(path):
        return resolve_run(path)
    return resolve_run(download(key, path, "model", files=(EXPORTED_CONFIG, INPUTS_FILE, ENVIRONMENT_FILE)))


def _read_description(folder: Path, task_values: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the file that describes the training of the weights in a folder, and its values by dotted key.

    `task_values` contains the values of `_TASK_KEYS`. A copy of a checkpoint contains only the policy's inputs.
    """
    if (file := find_weights_config(folder)) is not None:
        saved = read_saved(file)
        if infer_command(saved) not in ("train", "eval"):
            saved |= _values(_get_data_environment(file, saved, []))
        return file, saved
    inputs = read_saved_inputs(folder)
    if inputs.pop("environment", None) in task_values.values():
        inputs["env.env_type"] = task_values.get("env.env_type")
    return folder / INPUTS_FILE, inputs


def _values(settings: Sequence[Setting]) -> dict[str, Any]:
    return {setting.key: setting.value for setting in settings}


def check_trust(saved: Mapping[str, Any], overrides: Sequence[Setting], file: Path, problems: list[str]) -> None:
    """Raise an error for untrusted values in a saved config. Call this function before any component is imported."""
    if errors := find_untrusted_values(saved, _values(overrides), file):
        raise ConfigError([*problems, *errors])
