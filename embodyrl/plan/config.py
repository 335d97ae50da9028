"""Loading of configs: compose arguments and files, choose classes, check and derive values, download repositories."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodyrl.config.compose import Setting, compose, compose_groups, parse_override, split_overrides
from embodyrl.config.paths import is_on_hub, resolve_asset, resolve_run
from embodyrl.config.settings import find_key, get_parents, is_key_or_subkey, nested, to_builtin
from embodyrl.config.shared import Precision
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, hide_value
from embodyrl.hub import download
from embodyrl.plan.checks import build_checked_config, find_contradictions, validate_config
from embodyrl.plan.command_sections import uses_section
from embodyrl.plan.keys import unused_keys
from embodyrl.plan.saved import (
    check_trust,
    find_ckpt_config,
    get_protocol_settings,
    get_weight_settings,
    infer_command,
    merge_with_base,
    read_saved,
)
from embodyrl.plan.schema import SELECTORS, THIS_HOST, Config, choose_classes, get_selectors
from embodyrl.plan.weights import resolve_weights
from embodyrl.registry import closest
from embodyrl.text.settings import RowSettings

log = logging.getLogger(__name__)
DATA_KEYS = ("data.path", "data.val_path", "data.more", "algorithm.demonstrations")
_HORIZON = "env.eval.max_episode_steps"
MODEL_KEYS = ("model.path", "model.lora.path", "ckpt")


def load_config(
    command: str,
    arguments: Sequence[str],
    *,
    config_dirs: Sequence[Path] = (),
    base: Path | None = None,
    fetch: bool = True,
) -> Config:
    """Compose and check the config of a command.

    Args:
        command: `train`, `eval`, ...; selects the root file of conf/ and the keys.
        arguments: `group=option` and `key=value` of the command line.
        config_dirs: additional folders with YAML groups, searched after the included folder.
        base: config.yaml of the run with the initial weights, which provides the values. Groups on the command line
            replace whole sections, and keys replace single values.
        fetch: download hub repositories and log warnings; False: do neither.

    Returns:
        A `Config` with the sections of the command.

    Raises:
        ConfigError: one line per problem: an argument that cannot be parsed, an unknown key or option, a wrong type, a
            value out of range, an unused key, and, after these are fixed, contradictions.
    """
    problems: list[str] = []
    unused_groups = SELECTORS.keys() - get_selectors(command)
    groups, overrides, file_settings = compose(
        command, arguments, config_dirs, problems, unused_groups=unused_groups, has_base_run=base is not None
    )
    if base is not None and groups.get("experiment", "null") == "null":  # an experiment selects all settings
        file_settings = merge_with_base(base, command, groups, file_settings, overrides, problems)
    if any(setting.key == "eval.episodes_per_task" for setting in overrides):
        # eval.episodes of a file would override episodes_per_task.
        file_settings = [setting for setting in file_settings if setting.key != "eval.episodes"]
    weight_settings, warnings = get_weight_settings(command, [*file_settings, *overrides], problems, fetch=fetch)
    protocol_settings = get_protocol_settings([*file_settings, *overrides], problems)
    settings = [*file_settings, *weight_settings, *protocol_settings, *overrides]
    return _build_config(command, settings, problems, fetch=fetch, warnings=warnings)


def load_with_ckpt(command: str, arguments: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> Config:
    """Compose the config of a command on top of the config of the run in `ckpt=` (see `load_config`)."""
    require_ckpt(arguments)
    base = find_ckpt_config(arguments) if uses_section(command, "ckpt") else None
    return load_config(command, arguments, config_dirs=config_dirs, base=base)


def require_ckpt(arguments: Sequence[str]) -> None:
    """Raise an error if the path in `ckpt=` does not exist, before the config is composed with the default model.

    Raises:
        CheckpointError: the path does not exist; suggests runs with a similar name.
    """
    values = [argument.removeprefix("ckpt=") for argument in arguments if argument.startswith("ckpt=")]
    path = str(parse_override(f"ckpt={values[-1]}")[1]) if values else "null"
    if path in ("null", "None", "") or "${" in path or is_on_hub(path) or resolve_run(path).exists():
        return
    runs = [str(run) for run in sorted(Path("runs").glob("*"))] if Path("runs").is_dir() else []
    suggestion = closest(path, [*runs, *(Path(run).name for run in runs)])
    raise CheckpointError(
        f"ckpt={path}: no such run, checkpoint or model folder.{suggestion} `embodyrl list runs` shows all runs."
    )


def load_saved_config(
    path: Path, arguments: Sequence[str], *, command: str | None = None, unused_keys: Sequence[str] = ()
) -> Config:
    """Load the `config.yaml` of a run (a folder or the file) and apply overrides.

    Keys under `unused_keys` are exempt from the check for untrusted code, because the caller does not use their values.

    Raises:
        ConfigError: missing file, YAML tags (they could construct objects), group overrides, and all errors of
            `load_config`.
    """
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} is not a run: it has no config.yaml. `embodyrl list runs` shows all runs.")
    problems: list[str] = []
    saved = read_saved(file)
    command = command or infer_command(saved)
    groups, overrides = split_overrides(command, arguments, (), problems)
    problems += [_group_error(command, group, option) for group, option in groups.items()]
    used_values = {key: value for key, value in saved.items() if not is_key_or_subkey(key, unused_keys)}
    check_trust(used_values, overrides, file, problems)
    settings = [Setting(key, value, str(file)) for key, value in saved.items() if key != "trust"]
    return _build_config(command, [*settings, *overrides], problems)


def _group_error(command: str, group: str, option: str) -> str:
    """Return the error about a group option for a saved run; suggest an equivalent key, if there is one."""
    key, example = f"{group}.{SELECTORS[group]}" if group in SELECTORS else "", "env.reward_coef=2"
    with suppress(ConfigError):
        if any(
            (setting.key, setting.value) == (key, option) for setting in compose_groups(command, {group: option}, ())
        ):
            example = f"{key}={option}"
    return f"{group}={option}: a saved run accepts no group options; override single keys, for example {example}."


def _build_config(
    command: str,
    settings: Sequence[Setting],
    problems: list[str],
    *,
    fetch: bool = True,
    warnings: Sequence[str] = (),
) -> Config:
    # Data are downloaded first, because their type determines the keys; weights are downloaded after all other checks.
    if fetch:
        latest = {setting.key: setting for setting in settings}
        settings = [
            replace(s, value=download_repositories(s.key, s.value)) if s.key in DATA_KEYS and latest[s.key] is s else s
            for s in settings
        ]
    last = _get_last_settings(settings)
    # Resolved before the classes are chosen, because a name such as env.env_type may be an interpolation.
    values = _resolve(last, command, problems)
    schema, invalid_groups = choose_classes(command, values, problems)
    # An empty mapping on the command line removes the values that files set below the key.
    emptied = {setting.key for setting in settings if setting.is_set_by_user and setting.value == {}}
    used_values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in values.items():
        key = find_key(schema.keys, name)
        if key is None:
            unknown.append(name)
        elif key.name not in emptied or last[name].is_set_by_user:
            # A key of type text accepts integers, and numbers on the command line as they were written.
            number = key.kind is str and isinstance(value, int | float) and not isinstance(value, bool)
            text = last[name].text if value is last[name].value else None
            used_values[name] = (text or str(value)) if number and (text or isinstance(value, int)) else value
    unused_key_warnings = unused_keys(schema, unknown, invalid_groups, values, last, problems) if unknown else []
    cfg = build_checked_config(schema, used_values, last, [*unused_key_warnings, *warnings], problems)
    for warning in cfg.warnings if fetch else ():
        log.warning("warning: %s", warning)
    cfg = cfg.updated(_derive_values(cfg))
    return cfg.updated(_get_host_values(cfg)) if fetch else cfg


def _get_last_settings(settings: Sequence[Setting]) -> dict[str, Setting]:
    """Return the effective setting of each key; later settings replace earlier settings."""
    last: dict[str, Setting] = {}
    sections: set[str] = set()
    for setting in settings:
        parents = [*get_parents(setting.key)]
        below = [key for key in last if _is_below(key, setting.key)] if setting.key in sections else []
        sections.update(parents)
        for covered in [*(key for key in parents if key in last), *below]:
            # An empty mapping sets no value; any other value replaces values above and below its key.
            if not (_is_below(setting.key, covered) and setting.value == {}):
                del last[covered]
        if setting.value != {} or last.keys().isdisjoint(parents):
            last.pop(setting.key, None)
            last[setting.key] = setting
    return last


def _is_below(name: str, other: str) -> bool:
    return other.startswith(f"{name}.")


def _resolve(last: Mapping[str, Setting], command: str, problems: list[str]) -> dict[str, Any]:
    """Resolve `${...}` and reject `???` in values; report and remove each value that cannot be resolved."""
    values = {name: setting.value for name, setting in last.items()}
    unresolved = [name for name, value in values.items() if "${" in str(value) or "???" in str(value)]
    if not unresolved:
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # This resolver records the values of environment variables, so that no message or file shows a secret
    # (`errors.mask_hidden_values`).
    OmegaConf.register_new_resolver("oc.env", _env_value, replace=True)
    schema, _ = choose_classes(command, {name: value for name, value in values.items() if name not in unresolved}, [])
    set_names = {part for name in values for part in (name, *get_parents(name))}
    unset = {
        name: to_builtin(key.default)
        for name, key in schema.keys.items()
        if name not in set_names and values.keys().isdisjoint(get_parents(name)) and not key.required
    }
    tree = OmegaConf.create(nested({**unset, **values}))
    for name in unresolved:
        try:
            value = OmegaConf.select(tree, name, throw_on_missing=True)
            values[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            del values[name]
            problems.append(f"{last[name].where}{name} cannot be resolved: {str(error).splitlines()[0]}.")
    return values


def _env_value(name: str, *default: str | None) -> Any:
    from omegaconf.resolvers.oc import env

    value = env(name, *default)
    if name in os.environ:
        hide_value(name, os.environ[name])
    return value


def _derive_values(cfg: Config) -> dict[str, Any]:
    """Return derived values: values from `data`, reply lengths, and the time limit of an evaluation protocol."""
    derived = _derive_from_data(cfg)
    if cfg.has_rollouts and cfg.env.max_chunks:
        chunk = cfg.algorithm.sampling_params.max_new_tokens or cfg.model.num_action_chunks
        derived |= {f"env.{split}.max_episode_steps": cfg.env.max_chunks * chunk for split in cfg.env.splits}
        derived["model.num_action_chunks"] = chunk
    if cfg.has_evaluations and (protocol := cfg.eval.protocol).horizons and not protocol.settled:
        limit = protocol.horizon(cfg.env.title)
        derived |= {} if limit is None else {"eval.protocol.settled": True}
        # A time limit on the command line takes precedence.
        derived |= {} if limit is None or cfg.is_set_by_user(_HORIZON) else {_HORIZON: limit}
    return derived


def _derive_from_data(cfg: Config) -> dict[str, Any]:
    """Return the values derived from the section `data`.

    SFT on text uses one action per chunk, because a reply is one action. SFT on demonstrations saves the statistics
    under the name of the data, which commands with `ckpt=` then use.
    """
    if isinstance(cfg.data, RowSettings) and not cfg.reads_rows:
        return {"model.num_action_chunks": 1}
    if cfg.command != "sft" or not isinstance(cfg.data, DemonstrationSettings) or cfg.objective.name == "dpo":
        return {}
    if "unnorm_key" not in type(cfg.model).model_fields:
        return {}
    # Imported only if needed, because importing pyarrow is slow.
    from embodyrl.data.cards import read_card

    key = None  # null: the statistics have the key of the environment
    with suppress(EmbodyError):  # `sft` reports missing and damaged data
        env = read_card(resolve_asset(str(cfg.data.path)), cfg.data).env
        key = None if env.benchmark.unnorm_key else env.name
    return {"model.unnorm_key": key}


def _get_host_values(cfg: Config) -> dict[str, Any]:
    """Return config values that depend on this host or the hub: repository commits, reference weights, precision."""
    host_values = {key: download_repositories(key, path) for key in MODEL_KEYS if (path := cfg.get(key)) is not None}
    host_values |= {key: download(key, value, "model", programs=True) for key, value in cfg.programs.items()}
    if cfg.is_train_command and cfg.algorithm.reference_path is not None:
        # A resumed run continues with this folder, independent of later checkpoints of the run that owns the folder.
        key = "algorithm.reference_path"
        with suppress(CheckpointError):  # a config may be composed elsewhere; `check_components` rejects the path
            host_values[key] = str(resolve_weights(cfg.algorithm.reference_path, key))
    if cfg.has("model") and cfg.prefers_float32:
        host_values["model.precision"] = Precision.fp32
        cfg.add_sources({"model.precision": THIS_HOST})
    return host_values


def download_repositories(key: str, value: Any) -> Any:
    """Download all hub repositories (`owner/name[@revision]`) in a config value, and pin each to a commit.

    Raises:
        ConfigError: a repository does not exist, or the hub cannot be reached.
    """
    if isinstance(value, list):
        return [download_repositories(key, item) for item in value]
    if not isinstance(value, str) or not is_on_hub(value):
        return value
    return download(key, value, "dataset" if key in DATA_KEYS else "model")


def apply_overrides(cfg: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a config, updated with `values` by dotted key. The whole copy is checked.

    Raises:
        ConfigError: one line per problem.
    """
    changed = cfg.updated(values)
    check_values(changed)
    return changed


def check_values(cfg: Config) -> None:
    """Check a config that may have been changed after composition.

    Raises:
        ConfigError: one line per problem.
    """
    problems: list[str] = []
    validate_config(cfg.schema, dict(cfg.leaves()), problems)
    if errors := problems or [*find_contradictions(cfg)]:
        raise ConfigError(errors)
