"""The command `migrate`: configs of other RL frameworks as an embodyrl experiment, with every key accounted for."""

import argparse
import dataclasses
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from embodyrl.cli.migration.source import Source, read_source
from embodyrl.cli.migration.tables import evaluate, read
from embodyrl.cli.migration.translate import STATES, Migration, translate
from embodyrl.cli.output import show_result
from embodyrl.config.settings import leaves, spell
from embodyrl.errors import ConfigError
from embodyrl.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of the comparison."""

    what: str
    theirs: Any
    ours: Any

    @property
    def is_same(self) -> bool | None:
        """Whether both say the same; None where the source leaves it open."""
        return None if self.theirs is None or self.ours is None else _same(self.theirs, self.ours)

    def line(self) -> str:
        """Text for the screen."""
        mark = {True: "", False: "  differs", None: "  not said there"}[self.is_same]
        return f"  {self.what:<22} {_shown(self.theirs):<24} {_shown(self.ours)}{mark}"


def side_by_side(result: Migration) -> list[Fact]:
    """Compare what the source's keys mean with what the migrated config means."""
    theirs = _worked_out(result.system.facts, result.values)
    ours = _worked_out(read("ours.yaml"), dict(leaves(result.config)))
    rows = [Fact(what=what.replace("_", " "), theirs=theirs.get(what), ours=value) for what, value in ours.items()]
    return [row for row in rows if not (row.theirs in (None, "off") and row.ours in (None, "off"))]


def _worked_out(facts: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate facts in their order; each may use those before it. `words` are their terms for ours."""
    found: dict[str, Any] = {}
    for what, rule in facts.items():
        text, words = (rule["is"], rule["words"]) if isinstance(rule, dict) else (str(rule), {})
        value = evaluate(text, {**values, **found})
        found[what] = words.get(value.lower(), value) if isinstance(value, str) else value
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return str(a).lower() == str(b).lower()
    return math.isclose(a, b, rel_tol=1e-6)


def _shown(value: Any) -> str:
    return "?" if value is None else f"{value:g}" if isinstance(value, float) else spell(value)


def migrate(args: argparse.Namespace) -> int:
    """Run `embodyrl migrate FILE [key=value ...]`; the words after the file override the source."""
    if not args.words:
        raise ConfigError("embodyrl migrate takes a config of cosmos-rl, verl, RLinf, ROLL, AReaL or SimpleVLA-RL.")
    path, out = Path(args.words[0]), args.to
    source = read_source(path, args.words[1:])
    result = translate(source, args.source, nearest=args.nearest)
    facts = side_by_side(result)
    name = re.sub(r"[^\w.-]+", "_", path.stem)
    experiment = out / "experiment" / f"{name}.yaml"
    if experiment.exists():
        raise ConfigError(f"{experiment} exists; choose another folder with --to DIR.")
    experiment.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(experiment, experiment_text(result, path.name))
    report = experiment.with_suffix(".md")
    write_atomically(report, report_text(result, facts, source, path.name))
    defaults = sum(verdict.is_default for verdict in result.verdicts)
    lines = (
        *(f"not the same experiment: {why}" for why in result.refused),
        f"{path} is a {result.system.name} config with {sum(result.counts.values())} keys:",
        *(f"  {state:<12} {count}" for state, count in result.counts.items()),
        f"  {'defaults':<12} {defaults} of version {result.system.keys['version']}, where the file is silent",
        f"what decides the result {result.system.name:<24} embodyrl",
        *(fact.line() for fact in facts),
        *(f"unknown {v.key}={spell(v.value)}" for v in result.verdicts if v.state == "unknown"),
        *(f"note    {text}" for text in source.notes),
        f"config  {experiment}",
        f"account {report}",
        *(f"mend    {text}" for text in result.to_mend),
        f"try it  embodyrl train experiment={name} --config-dir {shlex.quote(str(out))} --dry-run",
    )
    data = {
        "system": result.system.folder,
        "refused": result.refused,
        "counts": result.counts,
        "facts": [dataclasses.asdict(fact) | {"same": fact.is_same} for fact in facts],
        "keys": [dataclasses.asdict(verdict) for verdict in result.verdicts],
    }
    show_result(args, data, lines)
    return 0


def experiment_text(result: Migration, source: str) -> str:
    """The experiment file: groups as a defaults list, settings as a tree."""
    body = OmegaConf.create({"defaults": [{f"override /{group}": option} for group, option in result.groups.items()]})
    for key, value in sorted(result.settings.items()):
        OmegaConf.update(body, key, value, force_add=True)
    head = f"# @package _global_\n# Translated from {source} ({result.system.name})\n"
    head += "".join(f"# Not the same experiment: {why}\n" for why in result.refused)
    return head + OmegaConf.to_yaml(body)


def report_text(result: Migration, facts: list[Fact], source: Source, file: str) -> str:
    """What decides the result in both systems' terms, and the account of every key, as Markdown."""
    counts = ", ".join(f"{count} {state}" for state, count in result.counts.items())
    lines = [f"# {file} ({result.system.name})", "", *(f"**Not the same experiment:** {why}" for why in result.refused)]
    lines += [f"Note: {text}" for text in source.notes]
    lines += [f"{sum(result.counts.values())} keys: {counts}.", "", "```", *(fact.line() for fact in facts), "```", ""]
    lines += ["| key | value | what became of it | embodyrl | note |", "|---|---|---|---|---|"]
    for v in sorted(result.verdicts, key=lambda v: (v.is_default, STATES.index(v.state))):
        state = f"{v.state} (default)" if v.is_default else v.state
        cells = (v.key, spell(v.value), state, ", ".join(v.to), v.note)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
