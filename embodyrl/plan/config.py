"""Configs of commands: composed from groups and words, read back from runs, written, and checked."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from embodyrl.config import tree
from embodyrl.config.check import inert
from embodyrl.config.paths import resolve_run
from embodyrl.config.settings import flat, leaves, nodes, plain
from embodyrl.config.shared import Precision
from embodyrl.config.trust import distrusted
from embodyrl.envs.settings import EnvSettings
from embodyrl.errors import ConfigError, masked
from embodyrl.files import write_atomically
from embodyrl.plan.hub import DATA_KEYS, MODEL_KEYS, located
from embodyrl.plan.load import Setting, build, compose_groups, parse_word, read_saved, split_words, wrong_values
from embodyrl.plan.protocols import horizon_of
from embodyrl.plan.roots import (
    COMMAND_LINE,
    PLAYED,
    ROOTS,
    SELECTORS,
    THIS_HOST,
    ActingConfig,
    PolicyConfig,
    R,
    Root,
    TrainConfig,
    conditions,
    sections_of,
    selected,
)
from embodyrl.plan.weights import resolve_weights

log = logging.getLogger(__name__)
_REPLY = "algorithm.sampling_params.max_new_tokens"
ENVIRONMENT_FILE = "environment.yaml"
"""In a run that learned from demonstrations: the settings of the environment that they come from."""


def load_config(
    command: str,
    words: Sequence[str],
    *,
    config_dirs: Sequence[Path] = (),
    base: Path | None = None,
    fetch: bool = True,
) -> Any:
    """Compose, type and check the config of a command.

    Args:
        command: `train`, `eval`, ...; selects the root file of conf/ and the keys.
        words: `group=option` and `key=value` as typed by the user.
        config_dirs: further folders with YAML groups, searched after the shipped one.
        base: the config.yaml of a run whose weights are used: it is the base of the config; typed groups replace its
            sections, typed keys its values.
        fetch: download names on the hub and log `warnings`; false: only read the config.

    Returns:
        An instance of `ROOTS[command]`.

    Raises:
        ConfigError: one line per problem: a word that cannot be parsed, an unknown key or option, a wrong type, a
            value out of range, a key that nothing reads, and, once those are clean, what contradicts itself.
    """
    problems: list[str] = []
    groups, typed = split_words(command, words, config_dirs, problems)
    typed += _unread_groups(command, groups)
    based = base is not None and groups.get("experiment", "null") == "null"  # an experiment chooses everything
    # What suits an environment and a shipped model does not suit the weights of a run.
    alone = {"start": "none"} if based and "model" not in groups and tree.follows(command, "start") else {}
    chosen = compose_groups(command, {**groups, **alone}, config_dirs, problems)
    if not chosen:
        raise ConfigError(problems)
    if based and base is not None:
        saved = _base_settings(base, command, groups, chosen, problems)
        _trust(saved, typed, base, problems)
        sections = {setting.key.partition(".")[0] for setting in saved}
        unset = [s for s in chosen if s.key.partition(".")[0] not in sections]
        # Images stay those that the weights were trained with.
        seen = {setting.key for setting in saved if setting.key.startswith("env.init_params.")}
        chosen = [*unset, *saved, *(s for s in chosen if _comes_with(s, groups) and s.key not in seen)]
    if any(setting.key == "eval.episodes_per_task" for setting in typed):
        chosen = [setting for setting in chosen if setting.key != "eval.episodes"]  # which would win
    return _finish(command, [*chosen, *_protocol([*chosen, *typed], problems), *typed], problems, fetch=fetch)


def load_saved_config(
    path: Path, words: Sequence[str], *, command: str | None = None, unread: Sequence[str] = ()
) -> Any:
    """Load the `config.yaml` of a run (a folder or the file) and apply typed overrides to it.

    Values below the keys in `unread` are never looked up by the caller, so they need no `trust=true`.

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
    saved = read_saved(file)
    command = command or _command_of(saved)
    groups, typed = split_words(command, words, (), problems)
    problems += [_no_group(command, group, option) for group, option in groups.items()]
    looked_up = [s for s in saved if not any(f"{s.key}.".startswith(f"{key}.") for key in unread)]
    _trust(looked_up, typed, file, problems)
    return _finish(command, [*(setting for setting in saved if setting.key != "trust"), *typed], problems)


def _no_group(command: str, group: str, option: str) -> str:
    """Report an option of a group where a saved run decides, and name the key that means the same if there is one."""
    key, example = f"{group}.{SELECTORS[group][0]}" if group in SELECTORS else "", "env.reward_coef=2"
    if any((s.key, s.value) == (key, option) for s in compose_groups(command, {group: option}, (), [])):
        example = f"{key}={option}"
    return f"{group}={option}: a saved run has no groups to choose from; override single keys, for example {example}."


def _protocol(settings: Sequence[Setting], problems: list[str]) -> list[Setting]:
    """What `eval.protocol.settings` stands for; presets of runs and experiments do not stand against a protocol."""
    said = [setting for setting in settings if setting.key == "eval.protocol.settings"][-1:]
    found = [Setting("eval.episodes", None, setting.source) for setting in said if setting.value]
    for setting in said:
        for word in setting.value if isinstance(setting.value, list) else ():
            try:
                key, value = parse_word(str(word))
            except ConfigError as error:
                problems += error.problems
                continue
            found += [Setting(name, leaf, setting.source, setting.words) for name, leaf in flat({key: value}).items()]
    return found


def run_config(path: Path) -> Path | None:
    """The saved config of the run that a path is, or lies in; None: it is no run with checkpoints."""
    for folder in (path, *path.parents):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return folder / "config.yaml"
    return None


def config_of_ckpt(words: Sequence[str]) -> Path | None:
    """The saved config of the run that `ckpt=` points into, so that its model need not be typed again."""
    named = [word for word in words if word.startswith("ckpt=")]
    with suppress(ConfigError):  # words that cannot be read are refused where all of them are
        return run_config(resolve_run(str(parse_word(named[-1])[1]))) if named else None
    return None


def save_config(cfg: Root, path: Path) -> None:
    """Write every key with its value as YAML; `load_saved_config` reads it back to an equal config."""
    write_atomically(path, dump_config(cfg))


def dump_config(cfg: Root, only: str | None = None) -> str:
    """Return every key, or those of one group, with its value as YAML; values of environment variables stay
    `${oc.env:NAME}`.
    """
    values = plain(cfg) if only is None else {only: plain(getattr(cfg, only))}
    return yaml.safe_dump(_masked(values), sort_keys=False, allow_unicode=True)


def _masked(node: Any) -> Any:
    """The tree with each text masked before YAML quotes it."""
    if isinstance(node, dict):
        return {_masked(key): _masked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_masked(item) for item in node]
    return masked(node) if isinstance(node, str) else node


def check_values(cfg: Root) -> None:
    """Check a config that may have been changed since it was composed.

    Raises:
        ConfigError: one line per problem.
    """
    problems = wrong_values(type(cfg), json.dumps(plain(cfg)))
    if found := problems or [line for node in nodes(cfg) for line in node.problems()]:
        raise ConfigError(found)


def _finish(command: str, settings: Sequence[Setting], problems: list[str], *, fetch: bool = True) -> Any:
    # Which data they are says which keys there are; weights are fetched once nothing else is wrong.
    if fetch:
        last = {setting.key: setting for setting in settings}
        settings = [
            replace(s, value=located(s.key, s.value)) if s.key in DATA_KEYS and last[s.key] is s else s
            for s in settings
        ]
    cfg, sources, unread = build(settings, command, problems)
    cfg._sources.update(sources)
    if isinstance(env := getattr(cfg, "env", None), EnvSettings):
        env._played = PLAYED.get(command, env._played)
    if problems := [line for node in nodes(cfg) for line in node.problems()]:
        raise ConfigError(problems)
    cfg._warnings += [*unread, *inert(cfg, cfg.changed, conditions(cfg, command))]
    for line in cfg.warnings if fetch else ():
        log.warning("warning: %s", line)
    cfg = cfg.updated(_derived(cfg))
    return cfg.updated(_located(cfg)) if fetch else cfg


def _derived(cfg: Root) -> dict[str, Any]:
    """Return the values that follow from others: lengths of replies, and what an evaluation protocol sets."""
    found = {key: value for section in sections_of(cfg).values() for key, value in section.derive(cfg).items()}
    if isinstance(cfg, ActingConfig) and cfg.env.max_chunks:
        chunk = cfg.algorithm.sampling_params.max_new_tokens or cfg.model.num_action_chunks
        found |= {f"env.{split}.max_episode_steps": cfg.env.max_chunks * chunk for split in cfg.env.splits}
        found["model.num_action_chunks"] = chunk
    return found | horizon_of(cfg)


def _located(cfg: Root) -> dict[str, Any]:
    """Return the values that depend on this host and the hub: commits, the reference's folder, the precision."""
    found = {key: located(key, leaf) for key, leaf in leaves(cfg) if key in MODEL_KEYS}
    if isinstance(cfg, TrainConfig) and cfg.algorithm.reference_path is not None:
        # A resumed run goes on with this folder, whatever the run that it belongs to has saved since.
        key = "algorithm.reference_path"
        found[key] = str(resolve_weights(cfg.algorithm.reference_path, key))
    if isinstance(cfg, PolicyConfig) and cfg.prefers_float32:
        found["model.precision"] = Precision.fp32
        cfg._sources["model.precision"] = THIS_HOST
    return found


def overridden(cfg: R, values: Mapping[str, Any]) -> R:
    """Return a config with other values by dotted key, checked as a whole.

    Raises:
        ConfigError: one line per problem.
    """
    found = cfg.updated(values)
    check_values(found)
    return found


def _trust(saved: Sequence[Setting], typed: Sequence[Setting], file: Path, problems: list[str]) -> None:
    """Refuse what the file may not ask for before any name in it is looked up, as that imports code."""
    values = [{setting.key: setting.value for setting in some} for some in (saved, typed)]
    if found := distrusted(values[0], values[1], file):
        raise ConfigError([*problems, *found])


def _unread_groups(command: str, groups: dict[str, str]) -> list[Setting]:
    """Remove typed options of groups that the command has for the sake of its files only; return these."""
    unread = [group for group in groups if group in SELECTORS and selected(ROOTS[command], group) is None]
    return [Setting(group, groups[group], COMMAND_LINE, f"{group}={groups.pop(group)}") for group in unread]


def _command_of(saved: Sequence[Setting]) -> str:
    """The command whose run this is; supervised training writes no environment."""
    sections = {setting.key.partition(".")[0] for setting in saved}
    if "env" not in sections:
        return "sft"
    if "dagger" in sections:
        return "dagger"
    return "train" if "checkpoint" in sections else "collect" if "collect" in sections else "eval"


_OF_THE_RUN = (
    *("trust", "ckpt", "runner.experiment_name", "runner.on_existing", "runner.resume_dir", "runner.only_eval"),
    *("eval.baseline", "eval.protocol.settled"),
)
"""Keys of a run that a command which uses its weights does not take over."""
_WITH_ENV = ("env", "data", "reward", "eval", "runner.val_suites", _REPLY)
"""Keys that belong to the environment: where another one is typed, those of the run do not hold."""


def _base_settings(
    base: Path, command: str, groups: Mapping[str, str], chosen: Sequence[Setting], problems: list[str]
) -> list[Setting]:
    """Read what a command takes over from the run whose weights it uses: the whole config, without the sections of
    typed groups. Reinforcement learning takes environment and model only from a run of another command.
    """
    saved = read_saved(base)
    made_by = _command_of(saved)
    left = {*_OF_THE_RUN, *groups, *(_WITH_ENV if "env" in groups else ())}
    if "eval" in groups:
        left.add("runner.val_suites")
    if command != "train":
        left.add("runner.logger")  # a run without a console must not silence its evaluation
    # A task decides how long replies are, an environment of the same kind keeps the images that the weights know.
    kept = {"algorithm.sampling_params"} - left if "env" not in groups else set()
    if "env" in groups and _value_of("env.env_type", saved) == _value_of("env.env_type", chosen):
        kept.add("env.init_params")
    if made_by not in ("train", "eval") and "env" not in groups:
        saved += _played_environment(base.parent, saved, problems)
    if command == "train" and made_by != "train":
        saved = [setting for setting in saved if setting.key.partition(".")[0] in ("env", "model")]
    return [s for s in saved if _lies_below(s.key, kept) or not _lies_below(s.key, left)]


def _value_of(key: str, settings: Sequence[Setting]) -> Any:
    return next((setting.value for setting in reversed(settings) if setting.key == key), None)


def _lies_below(name: str, keys: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{key}.") for key in keys)


def _played_environment(run: Path, saved: Sequence[Setting], problems: list[str]) -> list[Setting]:
    """Return where the demonstrations of a supervised run come from, or what rounds of DAgger play: it is evaluated on
    those tasks, and for as long.
    """
    own = [setting for setting in saved if setting.key.startswith("env.")]
    if not own and not (run / ENVIRONMENT_FILE).is_file():
        problems.append(f"{run} learned from data that do not say what they come from; name it with env=...")
        return []
    played = own or read_saved(run / ENVIRONMENT_FILE)
    alike = {f"env.train.{key}": f"env.eval.{key}" for key in ("max_episode_steps", "task_ids")}
    if any(setting.key == "env.train.state_ids" and setting.value is None for setting in played):
        alike["env.train.state_ids"] = "env.eval.state_ids"  # all of them: others may not exist
    return [*played, *(replace(setting, key=alike[setting.key]) for setting in played if setting.key in alike)]


def _comes_with(setting: Setting, groups: Mapping[str, str]) -> bool:
    """Whether the file of a typed group, or of what suits it, set this value."""
    folders = Path(setting.source).parts[-3:-1]
    return any(group in folders for group in groups) or ("model" in groups and folders[-1:] == ("start",))
