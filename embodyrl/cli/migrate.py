"""The command `migrate`: configs of other RL frameworks as an embodyrl experiment, with every key accounted for."""

import argparse
import dataclasses
import re
from pathlib import Path

from omegaconf import OmegaConf

from embodyrl.cli.migration.facts import Fact, side_by_side
from embodyrl.cli.migration.source import Source, read_source
from embodyrl.cli.migration.translate import STATES, Migration, translate
from embodyrl.cli.output import show_result
from embodyrl.config.settings import spell
from embodyrl.errors import ConfigError
from embodyrl.files import write_atomically


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
        f"try it  embodyrl train experiment={name} --config-dir {out} --dry-run",
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
