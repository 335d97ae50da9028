"""The command `embodyrl-migrate`, which translates a config of another framework into an experiment or a report."""

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from embodyrl_migrate.report import Fact, compare, reasons, report_text
from embodyrl_migrate.source import Source, read_source
from embodyrl_migrate.tables import MigrationError, format_value, systems
from embodyrl_migrate.translate import Migration, remove_defaults, translate

USAGE = "embodyrl-migrate FILE [key=value ...] [--from SYSTEM] [--to DIR] [--nearest] [--json]"


def main(argv: Sequence[str] | None = None) -> int:
    """Translate one config.

    Returns:
        0: an experiment was written. 2: only a report was written, or the config cannot be read.
    """
    parser = argparse.ArgumentParser(prog="embodyrl-migrate", usage=USAGE, description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="+", help="config file (YAML, TOML or shell script), then overrides")
    parser.add_argument(
        "--from", dest="source", choices=systems(), help="source system; default: detected from the keys"
    )
    parser.add_argument("--to", type=Path, default=Path("conf"), help="config folder to write to; default: conf")
    parser.add_argument("--nearest", action="store_true", help="write the nearest experiment and list its differences")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_intermixed_args(argv)
    try:
        return _migrate(args)
    except MigrationError as error:
        print("\n".join(f"embodyrl-migrate: error: {line}" for line in error.problems), file=sys.stderr)
        return 2


def _migrate(args: argparse.Namespace) -> int:
    path = Path(args.words[0])
    source = read_source(path, args.words[1:])
    result = translate(source, args.source)
    facts = compare(result) if result.config is not None else []
    difference_lines = reasons(result, facts, source)
    name = re.sub(r"[^\w.-]+", "_", path.stem)
    experiment = args.to / "experiment" / f"{name}.yaml"
    if experiment.exists():
        raise MigrationError(f"{experiment} exists; choose another folder with --to DIR.")
    is_written = result.config is not None and (not difference_lines or args.nearest)
    report = experiment.with_suffix(".md")
    try:
        experiment.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(report_text(result, facts, difference_lines, source, path.name), encoding="utf-8")
        if is_written:
            experiment.write_text(experiment_text(result, difference_lines, path.name), encoding="utf-8")
    except OSError as error:
        raise MigrationError(f"{error.filename}: {error.strerror}. Choose another folder with --to DIR.") from error
    if args.json:
        print(json.dumps(_build_json(result, facts, difference_lines, is_written), indent=1, default=str))
    else:
        _print_result(result, facts, difference_lines, source, path, experiment if is_written else None, report)
    return 0 if is_written else 2


def _print_result(
    result: Migration,
    facts: list[Fact],
    difference_lines: list[str],
    source: Source,
    path: Path,
    written: Path | None,
    report: Path,
) -> None:
    """Print the outcome, reasons first; to standard error if no experiment was written."""
    stream = sys.stdout if written else sys.stderr
    for text in difference_lines:
        print(f"not the same experiment: {text}" if written else f"embodyrl-migrate: error: {text}", file=stream)
    layout = f", layout {result.layout}" if result.layout else ""
    print(f"{path} is a {result.system.name} config with {sum(result.counts.values())} keys{layout}")
    print("  " + ", ".join(f"{count} {state}" for state, count in result.counts.items()))
    if facts:
        print(f"  {'setting':<22} {result.system.name:<26} embodyrl")
    for fact in facts:
        print(fact.line())
    for verdict in result.verdicts:
        if verdict.state == "unsupported" and not verdict.decides:
            print(
                f"unsupported, without effect on the result: {verdict.key}={format_value(verdict.value)}: "
                f"{verdict.note}"
            )
    for text in source.notes:
        print(f"note    {text}")
    print(f"report  {report}")
    if written:
        print(f"config  {written}")
        print(
            f"correct {', '.join(result.local)}: paths of another machine" if result.local else "",
            end="\n" if result.local else "",
        )
        folder = shlex.quote(str(written.parent.parent))
        print(f"try it  embodyrl train experiment={written.stem} --config-dir {folder} --dry-run")
    elif result.config is not None:
        print("--nearest writes the nearest experiment with these differences", file=stream)


def _build_json(
    result: Migration, facts: list[Fact], difference_lines: list[str], is_written: bool
) -> dict[str, object]:
    return {
        "system": result.system.folder,
        "layout": result.layout,
        "written": is_written,
        "reasons": difference_lines,
        "counts": result.counts,
        "facts": [dataclasses.asdict(fact) | {"same": fact.is_same, "mark": fact.mark} for fact in facts],
        "keys": [dataclasses.asdict(verdict) for verdict in result.verdicts],
    }


def experiment_text(result: Migration, difference_lines: list[str], source: str) -> str:
    """Return the content of the experiment file: a defaults list of groups, and the settings that differ from
    defaults.
    """
    body = OmegaConf.create({"defaults": [{f"override /{group}": option} for group, option in result.groups.items()]})
    for key, value in sorted(remove_defaults(result).items()):
        OmegaConf.update(body, key, value, force_add=True)
    head = f"# @package _global_\n# Translated from {source} ({result.system.name})\n"
    head += "".join(f"# Not the same experiment: {text}\n" for text in difference_lines)
    return head + OmegaConf.to_yaml(body)
