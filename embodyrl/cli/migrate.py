"""The command `migrate`: configs of other RL frameworks as an embodyrl experiment, with every key accounted for.

What becomes of a key is data, in migration/<system>.yaml; this file only applies it.
"""

import argparse
import dataclasses
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodyrl.cli.output import show_result
from embodyrl.config.settings import spell
from embodyrl.errors import ConfigError
from embodyrl.files import write_atomically
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.roots import all_keys

TABLES = files("embodyrl.cli").joinpath("migration")
STATES = ("mapped", "changed", "not needed", "unsupported", "unknown")
OFF = (None, False, 0, "", "none", [], {})
"""Values of a key that turn its feature off."""
LOCAL_KEYS = ("model.path", "model.lora.path", "data.path", "data.val_path")
"""Paths of another machine, most likely: what is wrong with them is for the user to mend, not for `_fit`."""
MOST_SLOTS = 64
"""Episodes that a migrated config runs at the same time; further ones follow as rollout epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one key of the source."""

    key: str
    value: Any
    state: str
    """One of `STATES`."""
    to: tuple[str, ...] = ()
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Migration:
    """The result: what to set, and the account of every key."""

    system: str
    groups: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    to_mend: list[str] = field(default_factory=list)
    """What this machine lacks."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of keys by verdict."""
        found = Counter(verdict.state for verdict in self.verdicts)
        return {state: found[state] for state in STATES}


def migrate(args: argparse.Namespace) -> int:
    """Run `embodyrl migrate FILE [key=value ...]`; the words after the file override the source."""
    if not args.words:
        raise ConfigError("embodyrl migrate takes a config file of cosmos-rl, verl, RLinf, ROLL or AReaL.")
    source, out = Path(args.words[0]), args.to
    result = translate(read_source(source, args.words[1:]), args.source)
    name = re.sub(r"[^\w.-]+", "_", source.stem)
    experiment = out / "experiment" / f"{name}.yaml"
    if experiment.exists():
        raise ConfigError(f"{experiment} exists; choose another folder with --to DIR.")
    experiment.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(experiment, experiment_text(result, source.name))
    report = experiment.with_suffix(".md")
    write_atomically(report, report_text(result, source.name))
    keys = [dataclasses.asdict(verdict) for verdict in result.verdicts]
    lines = (
        f"{source} is a {result.system} config with {len(result.verdicts)} keys:",
        *(f"  {state:<12} {count}" for state, count in result.counts.items()),
        f"config  {experiment}",
        f"account {report}",
        *(f"mend    {text}" for text in result.to_mend),
        f"try it  embodyrl train experiment={name} --config-dir {out} --dry-run",
    )
    show_result(args, {"system": result.system, "counts": result.counts, "keys": keys}, lines)
    return 0


def read_source(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Read TOML or YAML, with Hydra's defaults lists and overrides; interpolations are resolved where they can be.

    Raises:
        ConfigError: no such file, unreadable text, or a defaults list that names missing files.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file.")
    try:
        toml = path.suffix == ".toml"
        raw = OmegaConf.create(tomllib.loads(path.read_text(encoding="utf-8"))) if toml else OmegaConf.load(path)
        if not isinstance(raw, DictConfig):
            raise ConfigError(f"{path}: not readable: it holds a list, not keys.")
        if "defaults" in raw:
            own = OmegaConf.masked_copy(raw, [key for key in ("defaults", "hydra") if key in raw])
            with initialize_config_dir(config_dir=str(path.parent.resolve()), version_base="1.3"):
                raw = compose(path.stem)
            OmegaConf.set_struct(raw, False)
            raw.merge_with(own)
        for word in overrides:
            key, equals, value = word.lstrip("+").partition("=")
            if not equals:
                raise ConfigError(f"'{word}': after the file come overrides of it, key=value.")
            OmegaConf.update(raw, key, OmegaConf.create(f"v: {value}").v, force_add=True)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not readable: {str(error).splitlines()[0]}") from error
    except HydraException as error:
        raise ConfigError(
            f"{path}: its defaults list cannot be followed: {str(error).splitlines()[0]} Put those files beside it, or "
            "remove the entries."
        ) from error
    return _leaves(raw)


def _leaves(raw: Any) -> dict[str, Any]:
    """Dotted keys and values; an interpolation that cannot be resolved stays as text."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for name in node:
            key = f"{prefix}{name}"
            try:
                value = node[name]
            except OmegaConfBaseException:
                value = dict(OmegaConf.to_container(node, resolve=False))[name]  # pyright: ignore
            if OmegaConf.is_dict(value) and len(value):
                walk(value, f"{key}.")
            else:
                found[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    walk(raw, "")
    return found


def load_table(system: str) -> dict[str, Any]:
    """Read migration/<system>.yaml."""
    return yaml.safe_load(TABLES.joinpath(f"{system}.yaml").read_text(encoding="utf-8"))


def systems() -> list[str]:
    """Names of the systems with a table."""
    return sorted(entry.name.removesuffix(".yaml") for entry in TABLES.iterdir() if entry.name.endswith(".yaml"))


def detect(source: Mapping[str, Any]) -> str:
    """Find the system whose table knows most of the keys.

    Raises:
        ConfigError: none knows a third of them.
    """
    known = {}
    for system in systems():
        table = load_table(system)
        known[system] = sum(_find(table, key)[0] != "unknown" for key in source)
    best = max(known, key=lambda system: known[system])
    if known[best] * 3 < len(source):
        raise ConfigError(f"this is no config of {', '.join(systems())}: too few of its keys are known; see --from.")
    return best


def translate(source: Mapping[str, Any], system: str | None = None) -> Migration:
    """Apply the table of `system` (found by its keys where None), then let the config schema judge the result."""
    if system is not None and system not in systems():
        raise ConfigError(f"--from {system}: one of {', '.join(systems())}.")
    system = system or detect(source)
    table = load_table(system)
    kind = next(
        kind
        for kind in table["kinds"]
        if all(str(source.get(key)) in map(str, values) for key, values in kind.get("when", {}).items())
    )
    result = Migration(system=system, groups=dict(kind["groups"]), settings=dict(kind.get("settings", {})))
    sizes: dict[str, float] = {}
    for key, value in source.items():
        state, entry = _find(table, key)
        if _fits(key, kind.get("skip", ())):
            state, entry = "not needed", f"the config is a {kind['name']} one, which does not look at this key"
        elif state == "unsupported" and value in OFF:
            state, entry = "not needed", f"off; else: {entry}"
        if state == "mapped":
            result.verdicts.append(_apply(key, source, entry, result, sizes))
        else:
            result.verdicts.append(Verdict(key=key, value=value, state=state, note=entry))
    _settle_sizes(result, sizes)
    _fit(result)
    return result


def _find(table: Mapping[str, Any], key: str) -> tuple[str, Any]:
    """Return the state of a key and what the table says about it."""
    if key in table["keys"]:
        return "mapped", table["keys"][key]
    for state in ("not needed", "unsupported"):
        for why, patterns in table[state].items():
            if _fits(key, patterns):
                return state, why
    return "unknown", f"the reference of {table['name']} has no such key"


def _fits(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, part) for pattern in patterns for part in _braces(pattern))


def _braces(pattern: str) -> list[str]:
    """Expand {a,b} wherever it stands."""
    match = re.match(r"(.*?)\{(.*?)\}(.*)", pattern)
    if match is None:
        return [pattern]
    return [f"{match[1]}{part}{rest}" for part in match[2].split(",") for rest in _braces(match[3])]


def _apply(key: str, source: Mapping[str, Any], entry: Any, result: Migration, sizes: dict[str, float]) -> Verdict:
    """Set what a table entry says: a target key, or {to, values, also, if, if_not, note}.

    Targets with @ are sizes, see `_settle_sizes`; a list of targets takes a list of values or one for all; `also` is
    set besides; `if` names keys of the source without which this one does nothing.
    """
    value = source[key]
    rule: Mapping[str, Any] = {"to": entry} if isinstance(entry, str) else entry
    note = rule.get("note", "")
    chosen: dict[str, Any] | None = {}
    if value is None or value == "":
        state, note = "mapped", "not set: our default holds"
    elif isinstance(value, str) and "${" in value:
        state, note = "unsupported", "an interpolation that needs the source's code"
    elif idle := [f"{k} is not {spell(v)}" for k, v in rule.get("if", {}).items() if str(source.get(k)) != str(v)]:
        state, note = "not needed", f"has no effect there: {', '.join(idle)}"
    elif value in rule.get("if_not", ()) or ("also" in rule and value in OFF):
        state, note = "mapped", "off there, as is our default"
    elif (chosen := _chosen(value, rule)) is None:
        state, note, chosen = "unsupported", f"value {spell(value)} has no counterpart", {}
    else:
        state = "changed" if note else "mapped"
    for target, setting in chosen.items():
        if target.startswith("@"):
            sizes[target] = sizes.get(target, 1.0) * float(setting)
        elif target.startswith("group/"):
            result.groups[target.removeprefix("group/")] = setting
        else:
            result.settings[target] = _typed_for(target, setting)
    return Verdict(key=key, value=value, state=state, to=tuple(chosen), note=note)


def _chosen(value: Any, rule: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that a rule makes of a value, or None where it knows no counterpart."""
    targets = rule.get("to", [])
    targets = targets if isinstance(targets, list) else [targets]
    if "values" in rule:
        table = {str(name).lower(): target for name, target in rule["values"].items()}
        if str(value).lower() not in table:
            return None
        value = table[str(value).lower()]
    if isinstance(value, dict) and not targets:
        return value
    values = value if len(targets) > 1 and isinstance(value, list) else [value] * len(targets)
    return {**dict(zip(targets, values, strict=True)), **rule.get("also", {})}


def _typed_for(target: str, value: Any) -> Any:
    """Take the only entry of a list, and whole numbers as such, where the target wants them."""
    known = all_keys().get(target)
    base = str if known is None else known.kind
    if base is str and isinstance(value, list) and len(value) == 1:
        return value[0]
    return int(value) if base is int and isinstance(value, float) and value.is_integer() else value


def _settle_sizes(result: Migration, sizes: Mapping[str, float]) -> None:
    """Turn prompts, samples per prompt and batch shares into slots, rollout epochs and batch sizes."""
    group = int(sizes.get("@group", 1))
    settings = result.settings
    settings["algorithm.group_size"] = group
    slots = settings.get("env.train.total_num_envs")
    if slots is not None:
        settings["env.train.total_num_envs"] = max(1, slots // group) * group
    if "@samples" in sizes:
        sizes = {"@prompts": max(1, int(sizes["@samples"]) // group), **sizes}
    if "@prompts" in sizes and slots is None:
        prompts = int(sizes["@prompts"])
        together = max((d for d in range(1, prompts + 1) if prompts % d == 0 and d * group <= MOST_SLOTS), default=1)
        settings["env.train.total_num_envs"] = together * group
        settings["algorithm.rollout_epoch"] = prompts // together
    samples = sizes.get("@prompts", 0) * group
    batch = 0.0
    if "@update_prompts" in sizes:
        batch = sizes["@update_prompts"] * group
    elif "@update_samples" in sizes:
        batch = sizes["@update_samples"]
    elif samples:
        batch = samples / sizes.get("@minibatches", 1)
    if batch:
        settings["actor.global_batch_size"] = max(1, int(batch))
    micro = settings.get("actor.micro_batch_size", 8)
    settings["actor.micro_batch_size"] = min(micro, settings.get("actor.global_batch_size", 160))


def _fit(result: Migration) -> None:
    """Leave out what the schema or the chosen parts refuse, each with the reason, until the config is accepted."""
    for _ in range(len(result.settings) + 2):
        problems = _problems(result)
        result.to_mend = [text for text in problems if text.startswith(LOCAL_KEYS)]
        problems = [text for text in problems if text not in result.to_mend]
        if not problems:
            return
        refused = {match[0]: text for text in problems if (match := re.match(r"[\w.]+(?==|:|\s)", text))}
        refused = {key: text for key, text in refused.items() if key in result.settings}
        if not refused:
            raise ConfigError([f"the {result.system} config cannot be translated as a whole:", *problems])
        for key, text in refused.items():
            del result.settings[key]
            result.verdicts = [
                Verdict(key=v.key, value=v.value, state="unsupported", note=f"refused: {text}") if key in v.to else v
                for v in result.verdicts
            ]
    raise AssertionError("refused keys were removed, yet the config is still refused")


def _problems(result: Migration) -> list[str]:
    words = [f"{group}={option}" for group, option in result.groups.items()]
    for key, value in result.settings.items():
        words.append(f"{key}={json.dumps(value) if isinstance(value, str) else spell(value)}")
    try:
        check_components(load_config("train", words))
    except ConfigError as error:
        return error.problems
    return []


def experiment_text(result: Migration, source: str) -> str:
    """The experiment file: groups as a defaults list, settings as a tree."""
    body = OmegaConf.create({"defaults": [{f"override /{group}": option} for group, option in result.groups.items()]})
    for key, value in sorted(result.settings.items()):
        OmegaConf.update(body, key, value, force_add=True)
    head = f"# @package _global_\n# Translated from {source} ({result.system})\n"
    return head + OmegaConf.to_yaml(body)


def report_text(result: Migration, source: str) -> str:
    """The account of every key as a Markdown table."""
    counts = ", ".join(f"{count} {state}" for state, count in result.counts.items())
    lines = [f"# {source} ({result.system})", "", f"{len(result.verdicts)} keys: {counts}.", ""]
    lines += ["| key | value | what became of it | embodyrl | note |", "|---|---|---|---|---|"]
    for v in sorted(result.verdicts, key=lambda v: STATES.index(v.state)):
        cells = (v.key, spell(v.value), v.state, ", ".join(v.to), v.note)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
