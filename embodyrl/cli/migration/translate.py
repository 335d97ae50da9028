"""From another system's keys to ours: which parts it is, what its keys set, and an account of every key."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.cli.migration.source import Source
from embodyrl.cli.migration.tables import PROGRAM, System, detect, evaluate, find, fits, holds, load_system
from embodyrl.config.settings import spell
from embodyrl.errors import ConfigError
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.keys import all_keys

STATES = ("mapped", "changed", "not needed", "unsupported", "unknown")
OFF = (None, False, 0, "", "none", [], {})
"""Values of a key that turn its feature off."""
LOCAL_KEYS = (
    *("model.path", "model.lora.path", "algorithm.reference_path", "data.path", "data.val_path"),
    *("runner.logger.backends", "reward.path"),
)
"""What another machine has and this one may lack: it stays, and is listed to be mended."""
LACKING = ("is not installed", "Unknown reward ")
"""The same, in problems that do not begin with the key."""
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
    is_default: bool = False
    """The file does not say it; it is what the system takes then."""


@dataclass(slots=True, kw_only=True)
class Migration:
    """The result: what to set, and the account of every key."""

    system: System
    values: dict[str, Any]
    """The source's keys with the system's defaults."""
    groups: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    to_mend: list[str] = field(default_factory=list)
    """What this machine lacks."""
    refused: list[str] = field(default_factory=list)
    """Why it cannot be the same experiment, each with what is nearest."""
    config: Any = None
    """The typed config that the settings make."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of keys of the file by verdict."""
        found = Counter(verdict.state for verdict in self.verdicts if not verdict.is_default)
        return {state: found[state] for state in STATES}


def translate(source: Source, folder: str | None = None, *, nearest: bool = False) -> Migration:
    """Translate what was read.

    Args:
        source: the config.
        folder: which system it is of; None: found by its keys.
        nearest: where the same experiment cannot be made, take what is nearest.

    Raises:
        ConfigError: it is no known config, it cannot be the same experiment (the reasons, one a line), or what it
            makes is no config of ours.
    """
    system = load_system(folder or detect(source.values))
    values = _completed(source, system)
    for name, text in system.keys.get("terms", {}).items():
        values[name] = evaluate(text, values)
    result = Migration(system=system, values=values)
    known = {**values, PROGRAM: source.program}
    kind = next(kind for kind in system.keys["kinds"] if holds(kind.get("when", {}), known))
    _take(result, kind)
    deciding = _identify(result, known, source)
    if result.refused and not nearest:
        raise ConfigError([*(f"this cannot be the same experiment: {why}" for why in result.refused)])
    if result.refused and not result.groups:
        raise ConfigError([*result.refused, "--nearest: there is nothing near enough to write."])
    _account(result, source, kind, deciding)
    _fit(result)
    return result


def _completed(source: Source, system: System) -> dict[str, Any]:
    """The source's values, below them those of files that are not here but known, and the system's defaults."""
    groups = system.defaults.get("(groups)", {})
    filled: dict[str, Any] = {}
    for name, place in list(source.missing):
        pattern = next((pattern for pattern in groups if fits(name, [pattern])), None)
        if pattern is not None:
            source.missing.remove((name, place))
            note = f"{name} is not here: taken as {system.name} {system.keys['version']} has it"
            source.notes += [note] if note not in source.notes else []
            filled |= {f"{place}.{key}" if place else key: value for key, value in groups[pattern].items()}
    own = {key: value for key, value in system.defaults.items() if key != "(groups)"}
    return {**own, **filled, **source.values}


def _take(result: Migration, part: Mapping[str, Any]) -> None:
    result.groups |= part.get("groups", {})
    result.settings |= part.get("settings", {})


def _identify(result: Migration, known: Mapping[str, Any], source: Source) -> dict[str, str]:
    """Answer the system's questions; returns what each key that decided something has decided."""
    deciding: dict[str, str] = {}
    refused: set[str] = set()
    for question in result.system.identity:
        if question["what"] in refused or not holds(question.get("when", {}), known):
            continue
        case = next((case for case in question["cases"] if holds(case.get("when", {}), known)), None)
        if case is None:
            continue
        said = {key: known[key] for key in case.get("when", {}) if key in known and key != PROGRAM}
        deciding |= dict.fromkeys(said, question["what"])
        if "refuse" in case:
            shown = ", ".join(f"{key}={spell(value)}" for key, value in said.items() if key in source.values)
            why = case["refuse"] if not shown else f"{case['refuse']} ({shown})"
            if question["what"] == "environment" and source.missing:
                why += f"; not here: {', '.join(name for name, _ in source.missing)}. Put these files beside it"
            result.refused.append(f"{question['what']}: {why}. Nearest: {case['nearest']}.")
            refused.add(question["what"])
            if question["what"] == "task":
                break  # what another task is made of says nothing
        _take(result, case)
    return deciding


def _account(result: Migration, source: Source, kind: Mapping[str, Any], deciding: Mapping[str, str]) -> None:
    """Judge every key; what is mapped is applied in the order of the table, whatever the order of the file."""
    table, sizes = result.system.keys, {}
    found: dict[str, Verdict] = {}
    for key in table["keys"]:
        if key in result.values and not fits(key, kind.get("skip", ())):
            found[key] = _apply(key, result, table["keys"][key], sizes, is_default=key not in source.values)
    for key, value in source.values.items():
        if key not in found:
            state, why = find(table, key)
            if fits(key, kind.get("skip", ())):
                state, why = "not needed", f"the config is a {kind['name']} one, which does not look at this key"
            elif key in deciding:
                state, why = "mapped", f"decides the {deciding[key]}"
            elif state == "unsupported" and _is_off(table, key, value):
                state, why = "not needed", f"off; else: {why}"
            found[key] = Verdict(key=key, value=value, state=state, note=why)
    inherited = [verdict for key, verdict in found.items() if key not in source.values and verdict.to]
    result.verdicts = [*(found[key] for key in source.values), *inherited]
    _settle_sizes(result, sizes)


def _is_off(table: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether this value asks for nothing that is not done anyway."""
    plain = [values for pattern, values in table.get("harmless", {}).items() if fits(key, [pattern])]
    return value in OFF or any(value in values or "*" in values for values in plain)


def _apply(key: str, result: Migration, entry: Any, sizes: dict[str, float], *, is_default: bool) -> Verdict:
    """Set what a table entry says: a target, {to, values, is, also, if, if_not, note}, or the first fitting of several.

    Targets with @ are sizes, see `_settle_sizes`; a list of targets takes a list of values or one for all; `is` is an
    expression of the source's keys, or several, in place of the value; `also` is set besides; `if` are conditions
    without which this key does nothing; `if_not` values that turn it off.
    """
    value = result.values[key]
    entries: list[Any] = entry if isinstance(entry, list) else [entry]
    rules: list[dict[str, Any]] = [{"to": one} if isinstance(one, str) else one for one in entries]
    rule = next((one for one in rules if holds(one.get("if", {}), result.values)), rules[-1])
    note = rule.get("note", "")
    chosen: dict[str, Any] | None = {}
    if not holds(rule.get("if", {}), result.values):
        state, note = "not needed", f"has an effect only where {_conditions(rule['if'])}"
    elif (value is None or value == "") and "none" not in _names(rule):
        state, note = "mapped", "not set: our default holds"
    elif isinstance(value, str) and "$" in value and "{" in value:
        state, note = "unsupported", "an interpolation that needs the source's code"
    elif value in rule.get("if_not", ()) or ("also" in rule and value in OFF):
        state, note = "mapped", "off there, as is our default"
    elif (chosen := _chosen(value, rule, result.values)) is None:
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
    return Verdict(key=key, value=value, state=state, to=tuple(chosen), note=note, is_default=is_default)


def _conditions(when: Mapping[str, Any]) -> str:
    """Conditions in words."""
    return " and ".join(
        f"{key} is {' or '.join(map(spell, wanted if isinstance(wanted, list) else [wanted]))}"
        for key, wanted in when.items()
    )


def _names(rule: Mapping[str, Any]) -> list[str]:
    return [str(name).lower() for name in rule.get("values", {})]


def _chosen(value: Any, rule: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that a rule makes of a value, or None where it knows no counterpart."""
    targets = rule.get("to", [])
    targets = targets if isinstance(targets, list) else [targets]
    if "is" in rule:
        several = isinstance(rule["is"], list)
        found = [evaluate(text, values) for text in (rule["is"] if several else [rule["is"]])]
        if None in found:
            return None
        value = found if several else found[0]
    elif "values" in rule:
        table = {str(name).lower(): target for name, target in rule["values"].items()}
        name = "none" if value in (None, "") else str(value).lower()
        if name not in table:
            return None
        value = table[name]
        if isinstance(value, dict) and not targets:
            return value
    spread = len(targets) > 1 and isinstance(value, list)
    chosen = dict(zip(targets, value, strict=True)) if spread else dict.fromkeys(targets, value)
    return {**chosen, **rule.get("also", {})}


def _typed_for(target: str, value: Any) -> Any:
    """Take the only entry of a list, join names with commas, make whole numbers integers, where the target wants it."""
    known = all_keys().get(target)
    base = str if known is None else known.kind
    if base is str and isinstance(value, list):
        return value[0] if len(value) == 1 else ",".join(map(str, value))
    return int(value) if base is int and isinstance(value, float) and value.is_integer() else value


def _settle_sizes(result: Migration, sizes: Mapping[str, float]) -> None:
    """Turn prompts, samples per prompt and batch shares into slots, rollout epochs and batch sizes."""
    group = int(sizes.get("@group", 1))
    settings = result.settings
    settings["algorithm.group_size"] = group
    slots = settings.get("env.train.total_num_envs")
    if slots is not None:
        settings["env.train.total_num_envs"] = max(1, int(slots) // group) * group
    if "@samples" in sizes:
        sizes = {"@prompts": max(1, int(sizes["@samples"]) // group), **sizes}
    if "@prompts" in sizes:
        prompts = int(sizes["@prompts"])
        most = max(1, (settings.get("env.train.total_num_envs") or MOST_SLOTS) // group)
        together = max(d for d in range(1, min(prompts, most) + 1) if prompts % d == 0)
        settings["env.train.total_num_envs"] = together * group
        settings["algorithm.rollout_epoch"] = prompts // together
    if "@update_prompts" in sizes:
        settings["actor.global_batch_size"] = int(sizes["@update_prompts"]) * group
    elif "@update_samples" in sizes:
        settings["actor.global_batch_size"] = max(1, int(sizes["@update_samples"]))
    micro = settings.get("actor.micro_batch_size", 8)
    settings["actor.micro_batch_size"] = min(int(micro), settings.get("actor.global_batch_size", 160))


def _fit(result: Migration) -> None:
    """Leave out what the schema or the chosen parts refuse, each with the reason, until the config is accepted."""
    # A key that is gone may show what it hid, so again; every round takes at least one away, so it ends.
    for _ in range(len(result.settings) + 2):
        problems = _problems(result)
        if not problems:
            return
        refused = {match[0]: text for text in problems if (match := re.match(r"[\w.]+(?==|:|\s)", text))}
        refused = {key: text for key, text in refused.items() if key in result.settings}
        if not refused:
            raise ConfigError([f"the {result.system.name} config cannot be translated as a whole:", *problems])
        for key, text in refused.items():
            del result.settings[key]
            table = result.system.keys["keys"]
            result.verdicts = [_refused(v, text, table.get(v.key)) if key in v.to else v for v in result.verdicts]
    raise AssertionError("refused keys were removed, yet the config is still refused")


def _refused(verdict: Verdict, text: str, entry: Any) -> Verdict:
    """What a key becomes that our own checks refuse: it would do nothing, or cannot be.

    Where a table says when it has an effect there, doing nothing here is a difference.
    """
    idle = "has no effect" in text or "is for text" in text or "does not read" in text
    rules = entry if isinstance(entry, list) else [entry]
    idle = idle and not ("does not read" in text and any(isinstance(rule, dict) and "if" in rule for rule in rules))
    state, note = ("not needed", f"without use here: {text}") if idle else ("unsupported", f"refused: {text}")
    return replace(verdict, state=state, note=note, to=())


def _problems(result: Migration) -> list[str]:
    """What is wrong with the config so far; what this machine merely lacks goes to `to_mend`."""
    words = [f"{group}={option}" for group, option in result.groups.items()]
    for key, value in result.settings.items():
        quoted = isinstance(value, str | list)
        words.append(f"{key}={json.dumps(value, separators=(',', ':')) if quoted else spell(value)}")
    result.to_mend = []
    try:
        result.config = load_config("train", words, fetch=False)
    except ConfigError as error:
        return error.problems
    if result.config.warnings:
        return list(result.config.warnings)
    try:
        check_components(result.config)
    except ConfigError as error:
        result.to_mend = [p for p in error.problems if p.startswith(LOCAL_KEYS) or any(one in p for one in LACKING)]
        return [problem for problem in error.problems if problem not in result.to_mend]
    return []
