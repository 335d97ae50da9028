"""Compose a typed config from YAML groups and overrides; every problem is found before anything is reported.

Hydra composes the plain YAML groups; each leaf is then assigned to the typed schema one by one, so that a bad key in a
file and a bad value on the command line are refused by the same code and reported together.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers.oc import env

from embodyrl.config import tree
from embodyrl.config.keys import Key, all_keys, branches, free_parent, spell, suggest_key
from embodyrl.config.schema import Config
from embodyrl.config.trust import distrusted
from embodyrl.config.validate import find_conflicts, find_invalid
from embodyrl.errors import ConfigError, hide, masked
from embodyrl.files import write_atomically
from embodyrl.registry import closest

_YAML_LIMIT = 1 << 20
"""Characters of a saved config."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One leaf that somebody set."""

    key: str
    value: Any
    where: str
    """Text in front of a message: the override as typed, or the file."""


def load_config(
    command: str, overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), base: Path | None = None
) -> Config:
    """Compose, type and validate the config of a command.

    Args:
        command: `train`, `eval`, ...; selects the root file of conf/.
        overrides: `group=option` and `key=value` as typed by the user.
        config_dirs: further folders with YAML groups, searched after the shipped one.
        base: the config.yaml of a run whose weights are used: its model, and unless these are trained its environment
            and algorithm, hold wherever the command line does not choose that group.

    Raises:
        ConfigError: with one line per problem: unparsable override, unknown key or option, wrong type, value out of
            range, and, once those are clean, inconsistent combinations.
    """
    problems: list[str] = []
    groups, settings = _split(command, overrides, config_dirs, problems)
    if base is None or "experiment" in groups:  # an experiment chooses everything
        composed, inherited = _compose(command, groups, config_dirs, problems), list[_Setting]()
    else:
        # What suits an environment and a shipped model says nothing about the weights of a run.
        alone = {} if "model" in groups or tree.root_file(command) != "train" else {"start": "none"}
        composed = _compose(command, {**groups, **alone}, config_dirs, problems)
        wanted = ("model",) if command == "train" else ("env", "model", "algorithm")
        inherited = _inherit(base, [section for section in wanted if section not in groups], composed)
        problems += distrusted(_values(inherited), _values(settings), base)
    return _finish([*composed, *inherited, *settings], problems)


def _inherit(base: Path, sections: list[str], composed: Sequence[_Setting]) -> list[_Setting]:
    saved = list(_flatten(read_plain_yaml(base), "", f"{base}: "))
    if "env" in sections and any(s.key in ("reward.name", "reward.path") and s.value is not None for s in saved):
        sections += ["data", "reward"]  # they are a part of the text task that the run was about
    kinds = [next((s.value for s in some if s.key == "env.env_type"), None) for some in (saved, composed)]
    if "model" in sections and kinds[0] == kinds[1]:
        sections.append("env.init_params")  # the pictures that the weights know
    return [setting for setting in saved if any(setting.key.startswith(f"{section}.") for section in sections)]


def load_saved_config(path: Path, overrides: Sequence[str]) -> Config:
    """Load the `config.yaml` of a run (a folder or the file) and apply typed overrides to it.

    Raises:
        ConfigError: missing file, YAML tags (they could construct objects), group overrides, and everything that
            `load_config` refuses.
    """
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{path}: no config.yaml there, so it is no run; `embodyrl list runs` shows the runs of the output folder."
        )
    problems: list[str] = []
    base = list(_flatten(read_plain_yaml(file), "", f"{file}: "))
    groups, settings = _split("train", overrides, (), problems)
    problems += [
        f"{group}: a saved run has no groups to choose from; override single keys, for example env.reward_coef=2."
        for group in groups
    ]
    problems += distrusted(_values(base), _values(settings), file)
    return _finish([*(setting for setting in base if setting.key != "trust"), *settings], problems)


def _values(settings: Sequence[_Setting]) -> dict[str, Any]:
    return {setting.key: setting.value for setting in settings}


def save_config(cfg: Config, path: Path) -> None:
    """Write every key with its value as YAML; `load_saved_config` reads it back to an equal config."""
    write_atomically(path, dump_config(cfg))


def dump_config(cfg: Config) -> str:
    """Return every key with its value as YAML; values of environment variables stay `${oc.env:NAME}`."""
    tree = OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)
    return OmegaConf.to_yaml(OmegaConf.create(_masked(tree)))


def _masked(node: Any) -> Any:
    if isinstance(node, dict):
        return {_masked(key): _masked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_masked(item) for item in node]
    return masked(node) if isinstance(node, str) else node


def _env_value(name: str, *default: str | None) -> Any:
    value = env(name, *default)
    if name in os.environ:
        hide(name, os.environ[name])
    return value


OmegaConf.register_new_resolver("oc.env", _env_value, replace=True)


def sources(command: str, overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> dict[str, str]:
    """Which file or override set each key; keys that nobody set (they keep the schema's default) are absent.

    Call it with overrides that `load_config` accepts.
    """
    groups, typed = _split(command, overrides, config_dirs, [])
    folders = tree.search_path(config_dirs)
    found: dict[str, str] = {}
    with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        plan = loader.compute_defaults_list(
            tree.root_file(command), _hydra_arguments(groups, folders), run_mode=RunMode.RUN
        )
    for entry in plan.defaults:
        if entry.config_path is None or entry.config_path.startswith("hydra"):
            continue
        relative = f"{entry.config_path}.yaml"
        file = next((d / relative for d in folders if (d / relative).is_file()), None)
        if file is None:
            continue
        raw = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        body = {k: v for k, v in raw.items() if k != "defaults"}
        prefix = f"{entry.package}." if entry.package and entry.package != "_global_" else ""
        for setting in _flatten(body, prefix, ""):
            found[setting.key] = f"{folders[0].name}/{relative}" if file.is_relative_to(folders[0]) else str(file)
    return found | {s.key: "command line" for s in typed}


def _split(
    command: str, overrides: Sequence[str], config_dirs: Sequence[Path], problems: list[str]
) -> tuple[dict[str, str], list[_Setting]]:
    """Separate `group=option` from `key=value`, and report what is neither."""
    parser = OverridesParser.create()
    groups: dict[str, str] = {}
    settings: list[_Setting] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            problems.append(
                f"Cannot parse '{text}'. Write key=value or group=option without spaces, and quote special characters: "
                "'key=\"a, b\"'."
            )
            continue
        name = override.key_or_group
        problem = _refuse_form(text, override)
        if problem:
            problems.append(problem)
        elif name in tree.default_options(command):
            option = override.value()
            problem = _refuse_option(command, name, option, text, config_dirs)
            if problem:
                problems.append(problem)
            elif option is not None:  # null is only accepted where it is the default
                groups[name] = str(option)
        else:
            settings += _flatten_value(name, override.value(), f"{text}: ")
    return groups, settings


def _refuse_form(text: str, override: Override) -> str | None:
    name = override.key_or_group
    if override.is_add() or override.is_force_add() or override.is_delete():
        if name in all_keys() and not override.is_delete():
            return f"{text}: keys are never added; write it without '+': {text.lstrip('+')}"
        hint = "" if override.is_delete() else suggest_key(name)
        return (
            f"{text}: keys cannot be added or removed ('+', '++', '~').{hint} "
            "Your own values go below custom, for example custom.foo=1."
        )
    if override.is_sweep_override():
        return f"{text}: one value per key; for a list write [a,b], for text with commas quote it: 'key=\"a,b\"'."
    if override.package is not None:
        return f"{text}: '@' is not supported; write {name}=..."
    return None


def _refuse_option(command: str, group: str, option: object, text: str, config_dirs: Sequence[Path]) -> str | None:
    known = tree.options(group, config_dirs)
    nullable = tree.default_options(command)[group] is None
    if (option is None and nullable) or (isinstance(option, str) and option in known):
        return None
    if not isinstance(option, str):
        return f"{text}: {group} takes the name of one option: {', '.join(known)}."
    return f"{text}: unknown {group} '{option}'.{closest(option, known)} Available: {', '.join(known)}."


def _hydra_arguments(groups: Mapping[str, str], folders: Sequence[Path]) -> list[str]:
    extra = ",".join(f'"file://{d}"' for d in folders[1:])
    return [f"{g}={o}" for g, o in groups.items()] + ([f"hydra.searchpath=[{extra}]"] if extra else [])


def _compose(
    command: str, groups: Mapping[str, str], config_dirs: Sequence[Path], problems: list[str]
) -> list[_Setting]:
    """Compose the YAML groups with Hydra and return their leaves, untyped and unresolved."""
    folders = tree.search_path(config_dirs)
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3"):
            composed = compose(tree.root_file(command), overrides=_hydra_arguments(groups, folders))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        problems.append(f"Cannot compose {', '.join(f'{g}={o}' for g, o in groups.items()) or command}: {reason}")
        return []
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    chosen = {**tree.default_options(command), **groups}
    label = ", ".join(f"{g}={o}" for g, o in chosen.items() if o is not None)
    return list(_flatten(raw, "", f"in {label}: "))


def _flatten(raw: Mapping[Any, Any], prefix: str, where: str) -> Iterator[_Setting]:
    for key, value in raw.items():
        yield from _flatten_value(f"{prefix}{key}", value, where)


def _flatten_value(name: str, value: Any, where: str) -> Iterator[_Setting]:
    if isinstance(value, Mapping) and name in branches():
        yield from _flatten(value, f"{name}.", where)
    else:
        yield _Setting(name, value, where)


def _finish(settings: Sequence[_Setting], problems: list[str]) -> Config:
    draft = OmegaConf.structured(Config)
    for setting in settings:
        problem = _assign(draft, setting)
        if problem and problem not in problems:
            problems.append(problem)
    problems += _unresolved(draft, settings)
    cfg = OmegaConf.to_object(draft)
    assert isinstance(cfg, Config)
    problems += find_invalid(cfg)
    if not problems:
        # Follow-on complaints about a value that was refused above would only distract.
        problems += find_conflicts(cfg)
    if problems:
        raise ConfigError(problems)
    return cfg


def _unresolved(draft: DictConfig, settings: Sequence[_Setting]) -> list[str]:
    """Report values whose `${...}` or `???` cannot be resolved, and put the default in their place."""
    problems: list[str] = []
    for setting in settings:
        name = free_parent(setting.key) or setting.key
        if name not in all_keys() or not any(mark in str(setting.value) for mark in ("${", "???")):
            continue
        try:
            value = OmegaConf.select(draft, name, throw_on_missing=True)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            problems.append(f"{setting.where}{name} cannot be resolved: {str(error).splitlines()[0]}.")
            OmegaConf.update(draft, name, all_keys()[name].default, merge=False)
    return problems


def _assign(draft: DictConfig, setting: _Setting) -> str | None:
    """Set one typed leaf; return the problem, if any."""
    name, value, where = setting.key, setting.value, setting.where
    parent = free_parent(name)
    if parent is None and name not in all_keys():
        if name in branches():
            return f"{where}{name} is a group of keys, not one key; `embodyrl show {name.split('.')[0]}` lists them."
        hint = suggest_key(name) or " `embodyrl show train` lists all keys."
        return f"{where}unknown key '{name}'.{hint}"
    key = all_keys()[parent or name]
    typed = where.startswith(f"{name}=")
    wrong = (
        f"{where}{'' if typed else f'{name}={spell(value)} '}must be {key.expectation}."
        f"{closest(str(value), key.choices)} Default: {spell(key.default)}."
    )
    if parent is None and _is_loose(key, value):
        return wrong
    try:
        OmegaConf.update(draft, name, value, merge=True, force_add=parent is not None)
    except (OmegaConfBaseException, TypeError):
        return wrong
    return None


def _is_loose(key: Key, value: object) -> bool:
    """Conversions that OmegaConf would make silently and that are more likely mistakes: 3 -> true, true -> 'True'."""
    if key.base is bool:
        # Whether null is allowed is the schema's question.
        return not isinstance(value, bool | None) and not (isinstance(value, str) and value.startswith("${"))
    return key.base is str and isinstance(value, bool)


def read_plain_yaml(file: Path) -> dict[Any, Any]:
    """Read YAML that holds nothing but mappings, lists and scalars.

    Raises:
        ConfigError: broken YAML, an explicit tag such as `!!python/object`, an alias (a few can stand for
            gigabytes), a huge file, or no mapping at the top.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if len(text) > _YAML_LIMIT:
            raise ConfigError(f"{file}: {len(text)} characters; a config has fewer than {_YAML_LIMIT}.")
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(
                    f"{file}:{event.start_mark.line + 1}: YAML aliases are refused (they can grow without bound)."
                )
            tag = getattr(event, "tag", None)
            if tag is not None:
                line = event.start_mark.line + 1
                raise ConfigError(f"{file}:{line}: YAML tag '{tag}' is refused (tags can run code); remove it.")
        raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: broken YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected `key: value` lines at the top; it is no saved config.")
    return raw
