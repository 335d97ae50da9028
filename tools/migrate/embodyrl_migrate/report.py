"""Comparison of both configs, the reasons why they differ, and the Markdown report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodyrl_migrate.source import Source
from embodyrl_migrate.tables import evaluate, format_value, read
from embodyrl_migrate.translate import STATES, Migration

OFF = "off"
EXACT, BOUND = "exact", "bound"
"""Kinds of facts. `bound`: the number in the source must be at most the number in embodyrl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One row of the comparison."""

    what: str
    theirs: Any
    ours: Any
    kind: str = EXACT
    source: str = ""
    """File and function of the source system."""

    @property
    def is_same(self) -> bool | None:
        """Return whether both values are equal; None: one of them is unknown."""
        return None if self.theirs is None or self.ours is None else _is_equal(self.theirs, self.ours)

    @property
    def blocks(self) -> bool:
        """Return whether the difference can change the result."""
        return self.is_same is None or (self.is_same is False and self.kind == EXACT)

    @property
    def mark(self) -> str:
        """Return the result of the comparison as text; empty: equal."""
        if self.is_same is None:
            return "not known there" if self.theirs is None else "not known here"
        if self.is_same:
            return "at most" if self.kind == BOUND else ""
        return "differs"

    def line(self) -> str:
        """Return the row as text for the terminal."""
        return f"  {self.what:<22} {_format_value(self.theirs):<26} {_format_value(self.ours):<26} {self.mark}".rstrip()


def compare(result: Migration) -> list[Fact]:
    """Compare the effects of the source's keys with those of the translated config."""
    theirs = _evaluate_facts(result.system.facts, result.values)
    ours = _evaluate_facts(read("ours.yaml"), result.flat)
    rows = []
    for what in (name for name in ours if name in result.system.facts and not name.startswith("is_")):
        rule, value = result.system.facts[what], ours[what]
        kind = rule.get("kind", EXACT) if isinstance(rule, dict) else EXACT
        source = result.system.sources.get(what, "")
        row = Fact(what=what.replace("_", " "), theirs=theirs.get(what), ours=value, kind=kind, source=source)
        if not (row.theirs == OFF and row.ours in (None, OFF)):
            rows.append(row)
    return rows


def reasons(result: Migration, facts: list[Fact], source: Source) -> list[str]:
    """Return the reasons why the translation is a different experiment, one line each."""
    missing = dict.fromkeys(source.missing)
    if missing:  # what such a file says is unknown, so that nothing else can be judged
        return [f"missing file: {name}. Put it where the config looks for it." for name in missing]
    lines = [*result.rejections, *(f"unclear: {text}." for text in source.unclear)]
    unknown = [
        f"{verdict.key}={format_value(verdict.value)}" for verdict in result.verdicts if verdict.state == "unknown"
    ]
    lines += [f"unknown keys: {', '.join(unknown)}."] if unknown else []
    lines += [
        f"unsupported key: {verdict.key}={format_value(verdict.value)}: {verdict.note.rstrip('.')}."
        for verdict in result.verdicts
        if verdict.decides
    ]
    for fact in facts if result.config is not None else ():
        if fact.blocks:
            values = f"{_format_value(fact.theirs)} there, {_format_value(fact.ours)} here"
            lines.append(f"{fact.mark}: {fact.what}: {values}.")
    return lines


def _evaluate_facts(facts: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate facts in order; a fact may refer to earlier facts. `words` maps terms of the source to ours."""
    results: dict[str, Any] = {}
    for name, rule in facts.items():
        text, translations = (rule["is"], rule.get("words", {})) if isinstance(rule, dict) else (str(rule), {})
        value = evaluate(text, {**values, **results})
        results[name] = translations.get(value.lower(), value) if isinstance(value, str) else value
    return results


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return str(a).lower() == str(b).lower()
    return math.isclose(a, b, rel_tol=1e-6)


def _format_value(value: Any) -> str:
    return "?" if value is None else f"{value:g}" if isinstance(value, float) else format_value(value)


def report_text(result: Migration, facts: list[Fact], difference_lines: list[str], source: Source, file: str) -> str:
    """Return the report as Markdown: reasons, facts with their sources, and the state of every key."""
    counts = ", ".join(f"{count} {state}" for state, count in result.counts.items())
    lines = [f"# {file} ({result.system.name}, layout {result.layout or 'unknown'})", ""]
    lines += [f"- **Not the same experiment:** {text}" for text in difference_lines]
    lines += [f"- Note: {text}" for text in source.notes]
    lines += ["", f"{sum(result.counts.values())} keys: {counts}.", ""]
    lines += [f"| fact | {result.system.name} | embodyrl | | source |", "|---|---|---|---|---|"]
    lines += [
        _format_row(fact.what, _format_value(fact.theirs), _format_value(fact.ours), fact.mark, fact.source)
        for fact in facts
    ]
    lines += ["", "| key | value | state | embodyrl | note |", "|---|---|---|---|---|"]
    for verdict in sorted(result.verdicts, key=lambda verdict: (verdict.is_default, STATES.index(verdict.state))):
        state = f"{verdict.state} (default)" if verdict.is_default else verdict.state
        lines.append(_format_row(verdict.key, format_value(verdict.value), state, ", ".join(verdict.to), verdict.note))
    return "\n".join(lines) + "\n"


def _format_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
