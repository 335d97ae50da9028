"""Keys of all commands and components, keys without effect, and suggestions for unknown keys."""

from __future__ import annotations

import contextlib
import difflib
import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embodyrl.config.compose import Setting, default_options
from embodyrl.config.settings import (
    ChangesStateIds,
    Key,
    Settings,
    find_key,
    format_value,
    get_keys,
    get_parents,
    is_key_or_subkey,
    to_builtin,
)
from embodyrl.config.trust import TRUST
from embodyrl.errors import ConfigError, shorten
from embodyrl.plan.checks import check_value
from embodyrl.plan.command_sections import uses_section
from embodyrl.plan.schema import (
    REGISTRIES,
    Config,
    Schema,
    TopSettings,
    choose_classes,
    get_section_classes,
    get_selectors,
)
from embodyrl.registry import closest

_MAX_UNKNOWN = 20
"""Maximum number of unknown keys in an error; the search for a similar key is slow."""


def unused_keys(
    schema: Schema,
    names: Iterable[str],
    invalid_groups: frozenset[str],
    values: Mapping[str, Any],
    last: Mapping[str, Setting],
    problems: list[str],
) -> list[str]:
    """Return warnings about deleted keys, and about command-line keys without effect for the command or components.

    Args:
        schema: keys of the command with the chosen components.
        names: names with a value that are not keys of `schema`.
        invalid_groups: groups with an invalid component (see `choose_classes`).
        values: resolved values by dotted name.
        last: the setting of each value, with its source.
        problems: an error is appended for each unknown key.
    """
    unused: dict[str, list[str]] = {}
    command, deleted, num_unknown = schema.command, list[str](), 0
    for name in names:
        if name in DELETED_KEYS and not last[name].is_set_by_user:
            if values[name] != DELETED_KEYS[name]:
                deleted.append(
                    f"{last[name].where}{name}={format_value(values[name])} is ignored: the key has been deleted."
                )
            continue
        if (not last[name].is_set_by_user or is_known(name)) and _is_undetermined(
            name.partition(".")[0], schema, invalid_groups
        ):
            continue
        if _is_for_other_commands(command, last[name]):
            unused.setdefault(f"`embodyrl {command}`", []).append(name)
        elif not last[name].is_set_by_user and not is_known(name) and _is_training_key(name, values, problems):
            continue  # a key of a user-defined loss or estimator, whose code is imported only if the config is trusted
        elif not is_known(name) or name in schema.branches:
            num_unknown += 1
            problems += _unknown_key_errors(schema, last[name]) if num_unknown <= _MAX_UNKNOWN else []
        elif last[name].is_set_by_user:
            _report_unused(last[name], values[name], describe_component(command, name, values), problems, unused)
    return [*deleted, *_unused_key_warnings(unused)]


@functools.cache
def all_keys() -> Mapping[str, Key]:
    """Return every key of every command with any registered component, by dotted name."""
    return {name: key for group in Config.model_fields for name, key in keys_below(group).items()}


@functools.cache
def keys_below(group: str) -> Mapping[str, Key]:
    """Return the keys of a group, or the single key of that name, for all commands and components."""
    keys = {name: key for name, key in get_keys(TopSettings).items() if name == group}
    for settings in (*get_section_classes().get(group, ()), *(settings for _, settings in _component_settings(group))):
        keys |= get_keys(settings, f"{group}.")
    return keys


@functools.cache
def state_keys() -> frozenset[str]:
    """Return the keys and groups that determine which initial state a state id refers to."""
    keys = {**keys_below("env"), **keys_below("data")}
    return frozenset(name for name, key in keys.items() if ChangesStateIds in key.metadata)


def _component_settings(group: str) -> Iterator[tuple[str, type[Settings]]]:
    """Yield (name, settings class) of each component of a group."""
    for registry in REGISTRIES.get(group, ()):
        for name in registry.names():
            # A component may need a package that is missing or damaged.
            with contextlib.suppress(ConfigError, ImportError):
                yield name, registry.get(name).settings


_KEYS_WITHOUT_EFFECT = frozenset(
    {
        *("custom", "rollout.enable_offload", "actor.enable_offload", "env.train.enable_offload"),
        *("env.eval.enable_offload", "algorithm.sampling_params.do_sample", "env.eval.auto_reset"),
        *("env.eval.use_fixed_reset_state_ids", "env.eval.max_steps_per_rollout_epoch", "eval.standard"),
    }
)
"""Keys of earlier versions that had no effect, but occur in config.yaml files of old runs."""
DELETED_KEYS = {
    "env.control.observe_committed": False,
    "model.fpo_ratio": "mean",
    "model.rtc": "off",
    "model.rtc_delay": 8,
    "model.rtc_guidance": 5.0,
    "model.rtc_mask": "exp",
    "model.use_film": False,
    "objective.guidance": 1.0,
    "objective.label_dropout": 0.3,
    "objective.labels": None,
    "rollout.chunk_overlap": None,
}
"""Deleted keys with their former defaults. Other values in the config of an old run give a warning."""


def is_known(name: str) -> bool:
    """Return True if any command with any component has this key, one of its subkeys, or one of its parents."""
    known = keys_below(name.partition(".")[0])
    if find_key(known, name) is not None or name in DELETED_KEYS or any(key.startswith(f"{name}.") for key in known):
        return True
    return is_key_or_subkey(name, _KEYS_WITHOUT_EFFECT)


@functools.cache
def _synonyms() -> dict[str, str]:
    """Return the last part of the equivalent embodyrl key for each key name of another framework."""
    table = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
    return {synonym: key for key, synonyms in table.items() for synonym in synonyms.split()}


def suggest(name: str, likely: Schema | None = None) -> str:
    """Return " Did you mean '...'?" for an unknown key.

    Candidates are keys with a similar spelling, keys of other groups with the same last part, and synonyms.

    The keys in `likely`, of the command with the chosen components, are searched first, because searching all keys
    imports all components.
    """
    if likely is not None and (suggestion := _find_nearest(name, _with_parents(likely.keys), 0.75)):
        return suggestion
    return _find_nearest(name, _with_parents(all_keys()), 0.65)


def _find_nearest(name: str, names: list[str], cutoff: float) -> str:
    group, tail = name.partition(".")[0], name.rpartition(".")[2]
    # From exact to vague matches: the first match is suggested.
    if typo_match := closest(
        name, [candidate for candidate in names if candidate.partition(".")[0] == group], cutoff=0.9
    ):
        return typo_match
    synonyms = [_synonyms()[last_part] for last_part in difflib.get_close_matches(tail.lower(), _synonyms(), 1, 0.9)]
    for last_part in (tail, *synonyms, *(tail.split("_") if cutoff < 0.75 else ())):
        matches = [candidate for candidate in names if candidate.rpartition(".")[2] == last_part]
        if matches := ([candidate for candidate in matches if ("eval" in candidate) == ("eval" in name)] or matches):
            return closest(name, matches, cutoff=0.0)
    if nearest := closest(name, names, cutoff=0.75):
        return nearest
    if last_part := closest(tail, {candidate.rpartition(".")[2] for candidate in names}, cutoff=0.75):
        return closest(
            name,
            [candidate for candidate in names if candidate.rpartition(".")[2] == last_part.split("'")[1]],
            cutoff=0.0,
        )
    return closest(name, names, cutoff=cutoff)


def _with_parents(keys: Mapping[str, Key]) -> list[str]:
    return [*keys, *{parent for key in keys for parent in get_parents(key)}]


def describe_component(command: str, name: str, values: Mapping[str, Any]) -> str:
    """Describe the command or component that does not use this key, as text for warnings."""
    group = name.partition(".")[0]
    if group == "data" and uses_section(command, group):
        return f"`embodyrl {command}` with data of this kind"
    if group in ("data", "reward") and "env" in get_selectors(command):
        group = "env"
    if group not in get_selectors(command):
        return f"`embodyrl {command}`"
    keys = ("adv_type", "loss_type") if group == "algorithm" else (get_selectors(command)[group],)
    component_text = " with ".join(f"{key} '{values.get(f'{group}.{key}')}'" for key in keys)
    names = {name, *get_parents(name)}
    components = [
        component
        for component, settings in _component_settings(group)
        if names & get_keys(settings, f"{group}.").keys()
    ]
    if group in REGISTRIES and not components and name.startswith(f"{group}."):
        return f"`embodyrl {command}`"  # no component has the key, so it belongs to another command
    return component_text + (f" (unlike {', '.join(components)})" if 0 < len(components) < 5 else "")


def _is_training_key(name: str, values: Mapping[str, Any], problems: list[str]) -> bool:
    """Return True if `embodyrl train` with these components has the key, for example a key of a user-defined loss.

    Also return True, with an error in `problems`, if the config is not trusted or its code cannot be imported.
    """
    if any(TRUST in problem for problem in problems):
        return True
    errors: list[str] = []
    schema, _ = choose_classes("train", values, errors)
    problems += [problem for problem in errors if problem not in problems]
    return bool(errors) or find_key(schema.keys, name) is not None


def _is_undetermined(group: str, schema: Schema, invalid_groups: frozenset[str]) -> bool:
    """Return True if the keys of a group are unknown because the selected component is invalid."""
    return group in invalid_groups or (bool(invalid_groups) and group not in schema.sections)


def _unknown_key_errors(schema: Schema, setting: Setting) -> list[str]:
    name = setting.key
    if name in schema.branches:
        if setting.value == {}:
            return []
        return [f"{setting.where}{name} is a group of keys, not one key; `embodyrl show {name}` lists them."]
    if name.startswith("experiment.") and setting.where:
        return [
            f"{setting.where}unknown key '{shorten(name)}'. Add the line `# @package _global_` at the top of the file: "
            "without this line, all keys of the file get the prefix `experiment.`."
        ]
    hint = suggest(name, schema) or " `embodyrl show train` lists all keys."
    return [f"{setting.where}unknown key '{shorten(name)}'.{hint}"]


def _is_for_other_commands(command: str, setting: Setting) -> bool:
    """Return True if a command-line key is ignored because it is intended for other commands.

    True for groups of `embodyrl train`, so that the same arguments serve all commands; for a command without
    a policy, also for weights, reward and data.
    """
    name = setting.key
    group = name in default_options("train") and name != "experiment" and isinstance(setting.value, str)
    uses_policy = uses_section(command, "model")
    return setting.is_set_by_user and (
        group or (not uses_policy and name.partition(".")[0] in ("ckpt", "reward", "data"))
    )


def _report_unused(
    setting: Setting, value: Any, command: str, problems: list[str], unused: dict[str, list[str]]
) -> None:
    """Add a known key without effect to `unused`, and an error for an unknown key or a wrong value to `problems`."""
    name, known = setting.key, keys_below(setting.key.partition(".")[0])
    # None: a key of earlier versions, or a group of keys.
    key_name = next((part for part in (name, *get_parents(name)) if part in known), None)
    changes_results = command.startswith(("env_type ", "model_type ")) or name == "ckpt"
    if changes_results or key_name is None:
        problems.append(f"{setting.where}{command} does not read {shorten(name)}; remove the key.")
    elif key_name == name and (errors := check_value(known[name], value)):
        problems += errors
    elif value != to_builtin(known[key_name].default):
        unused.setdefault(command, []).append(name)


def _unused_key_warnings(unused: Mapping[str, list[str]]) -> list[str]:
    """Return one warning per component or command, with its unused keys."""
    return [
        f"{shorten(names[0])} has no effect: {command} does not read {shorten(names[0])}."
        if len(names) == 1
        else f"{', '.join(map(shorten, names))} have no effect: {command} does not read them."
        for command, names in unused.items()
    ]
