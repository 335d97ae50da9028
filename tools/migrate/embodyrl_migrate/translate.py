"""Translate another system's keys to embodyrl's: components, settings, and a state for every key."""

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import embodyrl
from embodyrl.config.compose import flatten
from embodyrl.config.settings import to_builtin
from embodyrl.errors import ConfigError
from embodyrl_migrate.source import Source
from embodyrl_migrate.tables import (
    PROGRAM,
    System,
    conditions_are_met,
    detect,
    evaluate,
    find,
    fits,
    format_value,
    load_system,
)

STATES = ("mapped", "changed", "not needed", "unsupported", "unknown")
OFF = (None, False, 0, "", "none", [], {})
"""Values of a key that turn its feature off."""
LOCAL_KEYS = ("model.path", "model.lora.path", "data.path", "data.val_path", "reward.path")
"""Keys with paths of another machine: written unchanged, listed in the output, ignored when the config is checked."""
MAX_SLOTS = 64
"""Maximum number of concurrent episodes of a migrated config; further episodes become rollout epochs."""
LAYOUT = "layout"
"""Name of the layout in expressions and conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyResult:
    """Result of the translation of one key."""

    key: str
    value: Any
    state: str
    """One of `STATES`."""
    to: tuple[str, ...] = ()
    note: str = ""
    is_default: bool = False
    """True if the file does not set the key, so the value is the system's default."""
    decides: bool = False
    """True if the key is unsupported and affects the result."""


@dataclass(slots=True, kw_only=True)
class Migration:
    """The translated settings, and the result for every key."""

    system: System
    values: dict[str, Any]
    """The source's keys with the system's defaults."""
    layout: str = ""
    """Version of the source's layout, detected from its keys."""
    groups: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: list[KeyResult] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)
    """Components that embodyrl lacks, each with the nearest component."""
    config: Any = None
    """The typed config of groups and settings; None: embodyrl has no near config."""

    @property
    def flat(self) -> dict[str, Any]:
        """Values of the config by dotted key, with paths of another machine."""
        return {**flatten(to_builtin(self.config)), **{key: self.settings[key] for key in self.local}}

    @property
    def local(self) -> list[str]:
        """Settings with paths of another machine."""
        return [key for key in self.settings if key in LOCAL_KEYS]

    @property
    def counts(self) -> dict[str, int]:
        """Number of keys of the file by state."""
        counts = Counter(verdict.state for verdict in self.verdicts if not verdict.is_default)
        return {state: counts[state] for state in STATES}


def translate(source: Source, folder: str | None = None) -> Migration:
    """Translate a config.

    Args:
        source: the config.
        folder: the source system; None: detected from the keys.

    Raises:
        MigrationError: the source is no known config, or the translation is not a valid config.
    """
    system = load_system(folder or detect(source.values))
    source.missing = [name for name in source.missing if not _is_optional(system, name, source)]
    layout, renamed = _detect_layout(system, source)
    replaced_keys = {key: new for key in source.values if (new := _find_replacement(renamed, key))}
    own_values = {renamed.get(key, key): value for key, value in source.values.items() if key not in replaced_keys}
    values: dict[str, Any] = {**system.defaults, **own_values, LAYOUT: layout}
    for name, text in system.keys.get("terms", {}).items():
        values[name] = evaluate(text, values)
    result = Migration(system=system, values=values, layout=layout)
    conditions = {**values, PROGRAM: source.program}
    kind = next(kind for kind in system.keys["kinds"] if conditions_are_met(kind.get("when", {}), conditions))
    _apply_part(result, kind)
    if "layouts" in system.keys and not layout:
        result.rejections.append(f"layout: no version of {system.name} has these keys. Nearest: see --from.")
    deciding = _identify(result, conditions, own_values)
    _translate_keys(result, own_values, kind, deciding)
    original_names = {canonical: key for key, canonical in renamed.items()}
    result.verdicts = [replace(v, key=original_names.get(v.key, v.key)) for v in result.verdicts]
    for key, new in replaced_keys.items():
        note = f"layout {layout} reads {new} instead"
        result.verdicts.append(KeyResult(key=key, value=source.values[key], state="not needed", note=note))
    if result.groups and not source.missing:
        _fit_config(result)
    return result


def _is_optional(system: System, name: str, source: Source) -> bool:
    """Return whether a missing file has no effect, or is in the table of defaults; if so, add a note."""
    for why, patterns in system.keys.get("optional files", {}).items():
        if fits(name.removesuffix(".yaml"), patterns) or fits(Path(name).stem, patterns):
            source.notes.append(f"{name} was not found: {why}")
            return True
    return False


def _detect_layout(system: System, source: Source) -> tuple[str, dict[str, str]]:
    """Detect the layout; return its name, and its renamed keys with their names in the tables."""
    for layout in system.keys.get("layouts", ()):
        if any(fits(key, layout["signs"]) for key in source.values):
            prefixes = layout.get("moves", {})
            renamed = {
                key: new + key.removeprefix(old)
                for key in source.values
                for old, new in prefixes.items()
                if key.startswith(old)
            }
            return layout["name"], renamed
    return "", {}


def _find_replacement(renamed: Mapping[str, str], key: str) -> str:
    """Return the newer key that replaces a key of an older layout; empty: no key does."""
    for new, canonical in renamed.items():
        section = canonical.rpartition(".")[0]
        if key not in renamed and (key == canonical or ("." in section and key.startswith(f"{section}."))):
            return new
    return ""


def _apply_part(result: Migration, part: Mapping[str, Any]) -> None:
    result.groups |= part.get("groups", {})
    result.settings |= part.get("settings", {})


def _identify(result: Migration, known: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Answer the system's questions; return the keys that determined each answer."""
    deciding: dict[str, str] = {}
    rejected: set[str] = set()
    for question in result.system.identity:
        if question["what"] in rejected or not conditions_are_met(question.get("when", {}), known):
            continue
        case = next((case for case in question["cases"] if conditions_are_met(case.get("when", {}), known)), None)
        if case is None:
            continue
        used_keys = {key: known[key] for key in case.get("when", {}) if key in known}
        deciding |= dict.fromkeys(used_keys, question["what"])
        if "refuse" in case:
            causes = ", ".join(
                f"{key}={format_value(value)}" for key, value in used_keys.items() if key in own or key == PROGRAM
            )
            reason = f"{case['refuse']} ({causes})" if causes else case["refuse"]
            result.rejections.append(f"{question['what']}: {reason}. Nearest: {case['nearest']}.")
            rejected.add(question["what"])
            if question["what"] == "task":
                result.groups = {}
                break  # the parts of another task say nothing
        _apply_part(result, case)
    return deciding


def _translate_keys(
    result: Migration, own_values: Mapping[str, Any], kind: Mapping[str, Any], deciding: Mapping[str, str]
) -> None:
    """Determine the state of every key; mapped keys are applied in the order of the table."""
    table, sizes = result.system.keys, {}
    verdicts: dict[str, KeyResult] = {}
    for key in table["keys"]:
        if key in result.values and not fits(key, kind.get("skip", ())):
            verdicts[key] = _apply_entry(key, result, table["keys"][key], sizes, is_default=key not in own_values)
    for key, value in own_values.items():
        if key not in verdicts:
            state, why = find(table, key)
            decides = state == "unsupported"
            if fits(key, kind.get("skip", ())):
                state, why, decides = "not needed", f"a {kind['name']} run does not read this key", False
            elif key in deciding:
                state, why, decides = "mapped", f"decides the {deciding[key]}", False
            elif state != "not needed" and state != "unknown" and _is_off(table, key, value):
                state, why, decides = "not needed", f"off; else: {why}", False
            elif state == "without effect":
                state = "unsupported"
            verdicts[key] = KeyResult(key=key, value=value, state=state, note=why, decides=decides)
    inherited = [verdict for key, verdict in verdicts.items() if key not in own_values and verdict.to]
    result.verdicts = [*(verdicts[key] for key in own_values), *inherited]
    _set_sizes(result, sizes)


def _is_off(table: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether the value has no effect: a value in the key's `harmless`, or in `OFF` without that entry."""
    harmless = [values for pattern, values in table.get("harmless", {}).items() if fits(key, [pattern])]
    return any(value in values or "*" in values for values in harmless or [OFF])


def _apply_entry(key: str, result: Migration, entry: Any, sizes: dict[str, float], *, is_default: bool) -> KeyResult:
    """Apply a table entry: a target, a rule {to, values, is, also, if, if_not, note}, or the first matching of several.

    Targets with @ are sizes (see `_settle_sizes`). A list of targets gets a list of values, or one value for all. `is`:
    expressions of the source's keys that replace the value. `also`: additional settings. `if`: conditions for an effect
    of the key. `if_not`: values that disable the key. `unsupported`: reason why all other values are unsupported.
    `harmless`: no value changes the result.
    """
    value = result.values[key]
    entries: list[Any] = entry if isinstance(entry, list) else [entry]
    rules: list[dict[str, Any]] = [
        {"to": candidate} if isinstance(candidate, str) else candidate for candidate in entries
    ]
    rule = next(
        (candidate for candidate in rules if conditions_are_met(candidate.get("if", {}), result.values)), rules[-1]
    )
    note = rule.get("note", "")
    selected: dict[str, Any] | None = {}
    if not conditions_are_met(rule.get("if", {}), result.values):
        state, note = "not needed", f"has an effect only where {_format_conditions(rule['if'])}"
    elif (value is None or value == "") and "none" not in _list_names(rule):
        state, note = "mapped", "not set: our default holds"
    elif isinstance(value, str) and "$" in value and "{" in value:
        state, note = "unsupported", "an interpolation that needs the source's code"
    elif "unsupported" in rule and value not in (*OFF, *rule.get("if_not", ())):
        state, note = "unsupported", rule["unsupported"]
    elif value in rule.get("if_not", ()) or ("also" in rule and value in OFF):
        state, note = "mapped", "off there, as is our default"
    elif (selected := _select_settings(value, rule, result.values)) is None:
        state, note, selected = "unsupported", f"value {format_value(value)} has no counterpart", {}
    else:
        state = "changed" if note else "mapped"
    for target, setting in selected.items():
        if target.startswith("@"):
            sizes[target] = sizes.get(target, 1.0) * float(setting)
        elif target.startswith("group/"):
            result.groups[target.removeprefix("group/")] = setting
        else:
            result.settings[target] = _convert_value(target, setting)
    decides = state == "unsupported" and not rule.get("harmless", False)
    return KeyResult(
        key=key, value=value, state=state, to=tuple(selected), note=note, is_default=is_default, decides=decides
    )


def _format_conditions(when: Mapping[str, Any]) -> str:
    """Return conditions as text."""
    return " and ".join(
        f"{key} is {' or '.join(map(format_value, expected if isinstance(expected, list) else [expected]))}"
        for key, expected in when.items()
    )


def _list_names(rule: Mapping[str, Any]) -> list[str]:
    return [str(name).lower() for name in rule.get("values", {})]


def _select_settings(value: Any, rule: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that a rule derives from a value; None: the value has no counterpart."""
    targets = rule.get("to", [])
    targets = targets if isinstance(targets, list) else [targets]
    if "is" in rule:
        is_list = isinstance(rule["is"], list)
        results = [evaluate(text, values) for text in (rule["is"] if is_list else [rule["is"]])]
        if None in results:
            return None
        value = results if is_list else results[0]
    elif "values" in rule:
        table = {str(name).lower(): target for name, target in rule["values"].items()}
        name = "none" if value in (None, "") else str(value).lower()
        if name not in table:
            return None
        value = table[name]
        if isinstance(value, dict) and not targets:
            return value
    one_per_target = len(targets) > 1 and isinstance(value, list)
    selected = dict(zip(targets, value, strict=True)) if one_per_target else dict.fromkeys(targets, value)
    return {**selected, **rule.get("also", {})}


def _convert_value(target: str, value: Any) -> Any:
    """Convert whole numbers to integers, and a list of paths to its only path."""
    if target in LOCAL_KEYS and isinstance(value, list):
        return value[0] if len(value) == 1 else ",".join(map(str, value))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def _set_sizes(result: Migration, sizes: Mapping[str, float]) -> None:
    """Convert prompts, samples per prompt and batch shares to environments, rollout epochs and batch sizes."""
    group = int(sizes.get("@group", 1))
    settings = result.settings
    settings["algorithm.group_size"] = group
    env_indices = settings.get("env.train.total_num_envs")
    if env_indices is not None:
        settings["env.train.total_num_envs"] = max(1, int(env_indices) // group) * group
    if "@samples" in sizes:
        sizes = {"@prompts": max(1, int(sizes["@samples"]) // group), **sizes}
    if "@prompts" in sizes:
        prompts = int(sizes["@prompts"])
        max_groups = max(1, (settings.get("env.train.total_num_envs") or MAX_SLOTS) // group)
        concurrent = max(divisor for divisor in range(1, min(prompts, max_groups) + 1) if prompts % divisor == 0)
        settings["env.train.total_num_envs"] = concurrent * group
        settings["algorithm.rollout_epoch"] = prompts // concurrent
    if "@update_prompts" in sizes:
        settings["actor.global_batch_size"] = int(sizes["@update_prompts"]) * group
    elif "@update_samples" in sizes:
        settings["actor.global_batch_size"] = max(1, int(sizes["@update_samples"]))
    micro = settings.get("actor.micro_batch_size", 8)
    settings["actor.micro_batch_size"] = min(int(micro), settings.get("actor.global_batch_size", 160))


def _fit_config(result: Migration) -> None:
    """Compose the config; rejected settings become unsupported keys until the remaining settings are accepted."""
    # A removed key may reveal another problem; every round removes at least one key.
    for _ in range(len(result.settings) + 2):
        problems = _find_problems(result)
        if not problems:
            return
        # A warning may name several keys: "a, b have no effect: ...".
        matches = {text: re.match(r"[\w.]+(?:, [\w.]+)*(?==|:|\s)", text) for text in problems}
        rejected = {key: text for text, match in matches.items() if match for key in match[0].split(", ")}
        rejected = {key: text for key, text in rejected.items() if key in result.settings}
        if not rejected:
            result.rejections += [f"refused by embodyrl: {problem}" for problem in problems]
            result.config = None
            return
        for key, text in rejected.items():
            del result.settings[key]
            table = result.system.keys["keys"]
            result.verdicts = [_reject_key(v, text, table.get(v.key)) if key in v.to else v for v in result.verdicts]
    raise AssertionError("refused keys were removed, yet the config is still refused")


def _reject_key(verdict: KeyResult, text: str, entry: Any) -> KeyResult:
    """Return the state of a key that embodyrl rejects: without effect, or unsupported.

    If the table has a condition for the key's effect in the source, a key without effect in embodyrl is a difference.
    """
    has_no_effect = (
        re.search("ha(?:s|ve) no effect", text) is not None
        or "for text policies only" in text
        or "does not read" in text
    )
    rules = entry if isinstance(entry, list) else [entry]
    has_no_effect = has_no_effect and not (
        "does not read" in text and any(isinstance(rule, dict) and "if" in rule for rule in rules)
    )
    if has_no_effect or ("does not read" in text and verdict.value in OFF):
        return replace(verdict, state="not needed", note=f"without use here: {text}", to=(), decides=False)
    return replace(verdict, state="unsupported", note=f"refused: {text}", to=(), decides=not verdict.is_default)


def _find_problems(result: Migration) -> list[str]:
    """Compose the config and return its problems."""
    try:
        result.config = _compose(result.groups, result.settings)
    except ConfigError as error:
        return error.problems
    return list(getattr(result.config, "warnings", ()))


def _compose(groups: Mapping[str, str], settings: Mapping[str, Any]) -> Any:
    # Warnings are in the result; on the screen they would name keys that are about to be removed.
    with contextlib.redirect_stderr(io.StringIO()):
        return embodyrl.compose("train", *_format_overrides(groups, settings))


def _format_overrides(groups: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
    """Return command-line overrides without the paths of another machine."""
    overrides = [f"{group}={option}" for group, option in groups.items()]
    for key, value in settings.items():
        if key not in LOCAL_KEYS:
            needs_json = isinstance(value, str | list)
            overrides.append(f"{key}={json.dumps(value, separators=(',', ':')) if needs_json else format_value(value)}")
    return overrides


def remove_defaults(result: Migration) -> dict[str, Any]:
    """Return the settings without values that the chosen groups also set; the composed config is unchanged."""
    target = flatten(to_builtin(result.config))
    default = flatten(to_builtin(_compose(result.groups, {})))
    selected = {
        key: value
        for key, value in result.settings.items()
        if key in LOCAL_KEYS or (key in target and default.get(key) != target[key])
    }
    return selected if flatten(to_builtin(_compose(result.groups, selected))) == target else result.settings
