"""The command `embodyrl-results`, which shows, reruns, compares, imports and exports results."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from embodyrl.cli.output import show_result
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.files import json_text, write_atomically
from embodyrl.reports.card import CARD_JSON, CARD_TEXT
from embodyrl_results.drift import compare, differences
from embodyrl_results.foreign import import_result
from embodyrl_results.page import PAGE, page_text, summary
from embodyrl_results.queue import OUTDATED, Job, list_jobs, run_queue
from embodyrl_results.table import (
    AFTER,
    BEFORE,
    CARDS,
    Card,
    Recipe,
    Table,
    open_table,
    read_card,
    score_text,
)
from embodyrl_results.vla_eval import vla_eval_result

OUT = "runs/results"
_NO_CARD = "{out}: there is no new result card for these recipes. Run `embodyrl-results run NAME` first."


USAGE = """embodyrl-results [show] [--table DIR] [--json]
       embodyrl-results run {NAME ... | --all} [--table DIR] [--out DIR]
       embodyrl-results check [NAME ...] [--table DIR] [--out DIR]
       embodyrl-results accept {NAME ... | --all} [--table DIR] [--out DIR]
       embodyrl-results import FILE [--name NAME] [--protocol TEXT] [--table DIR]
       embodyrl-results export FILE RUN ...
       embodyrl-results page [--table DIR]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run an action on the table of results.

    Returns:
        0: ok. 1: a run failed, or a file cannot be written. 2: usage. 3: a recipe drifted. 130: interrupted.
    """
    parser = argparse.ArgumentParser(prog="embodyrl-results", usage=USAGE, description=__doc__, allow_abbrev=False)
    parser.add_argument("action", nargs="?", default="show", choices=_ACTIONS, help="default: show")
    parser.add_argument("names", nargs="*", help="recipes; import: a file; export: the new file and runs")
    parser.add_argument("--all", action="store_true", help="run or accept all recipes")
    parser.add_argument(
        "--table", type=Path, metavar="DIR", help="folder with recipes.toml and cards/; default: docs/results"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(OUT), metavar="DIR", help=f"folder of new runs; default: {OUT}"
    )
    parser.add_argument("--name", help="import: name of the row in the table; default: the file name")
    parser.add_argument(
        "--protocol", metavar="TEXT", help="import: evaluation protocol, if the file does not contain the protocol"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_intermixed_args(argv)
    try:
        return _ACTIONS[args.action](args, args.names)
    except OSError as error:
        code, text = 1, f"Cannot write {error.filename}: {error.strerror}. Choose another --table or --out."
    except EmbodyError as error:
        code, text = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, text = 130, "interrupted"
    print(f"embodyrl-results: error: {text}", file=sys.stderr)
    return code


def _show_table(args: argparse.Namespace, names: list[str]) -> int:
    table = open_table(args.table)
    rows = [
        {"name": row.name, "cards": len(row.cards)}
        | {column: score_text(row.cards, end) for column, end in (("before", BEFORE), ("after", AFTER))}
        for row in table.rows()
    ]
    show_result(args, rows, summary(table))
    return 0


def _run_recipes(args: argparse.Namespace, names: list[str]) -> int:
    table = open_table(args.table)
    jobs = list_jobs(table.select(names, all_of_them=args.all), args.out)
    failed = run_queue(jobs, Console(file=sys.stderr))
    lines = [f"{len(jobs) - len(failed)} of {len(jobs)} runs have a card in {args.out}"]
    lines += [f"failed  {job.run}" for job in failed] or [f"next    embodyrl-results check --out {args.out}"]
    show_result(args, {"runs": len(jobs), "failed": [str(job.run) for job in failed]}, lines)
    return int(bool(failed))


def _check_drift(args: argparse.Namespace, names: list[str]) -> int:
    """Compare new result cards with stored cards; return exit code 3 if a recipe drifted."""
    table = open_table(args.table)
    comparisons, lines = [], []
    for recipe in table.select(names, all_of_them=not names):
        new, stored = _read_new_cards(recipe, args.out), table.stored(recipe)
        if not new:
            continue
        if not stored:
            lines.append(f"{recipe.name}: no stored card; store the new cards: embodyrl-results accept {recipe.name}")
            continue
        new_comparisons = compare(recipe.name, stored, new)
        comparisons += new_comparisons
        lines += [*map(str, new_comparisons), *differences(stored, new)]
    if not lines:
        raise ConfigError(_NO_CARD.format(out=args.out))
    drifted = list(dict.fromkeys(comparison.name for comparison in comparisons if comparison.drifted))
    lines.append(f"drift: {', '.join(drifted)}" if drifted else "no drift")
    show_result(args, [asdict(comparison) | {"drift": comparison.drifted} for comparison in comparisons], lines)
    return 3 if drifted else 0


def _read_new_cards(recipe: Recipe, out: Path) -> list[Card]:
    return [read_card(job.run / CARD_JSON) for job in _list_finished([recipe], out)]


def _list_finished(recipes: Sequence[Recipe], out: Path) -> list[Job]:
    """Return the jobs with a result card.

    Raises:
        ConfigError: a card is of another command than the recipe's.
    """
    jobs = [job for job in list_jobs(recipes, out) if job.done]
    if outdated := [str(job.run) for job in jobs if job.outdated]:
        raise ConfigError(
            f"{', '.join(outdated)}: {OUTDATED}. Remove the folders, and run `embodyrl-results run` again."
        )
    return jobs


def _accept_cards(args: argparse.Namespace, names: list[str]) -> int:
    """Store new result cards in the table, and write the Markdown page."""
    table = open_table(args.table)
    jobs = _list_finished(table.select(names, all_of_them=args.all), args.out)
    if not jobs:
        raise ConfigError(_NO_CARD.format(out=args.out))
    folder = table.folder / CARDS
    folder.mkdir(exist_ok=True)
    for job in jobs:
        read_card(job.run / CARD_JSON)
        for name, end in ((CARD_JSON, ".json"), (CARD_TEXT, ".md")):
            write_atomically(folder / f"{job.run.name}{end}", (job.run / name).read_bytes())
    return _write_page(args, table, [f"card  {folder / job.run.name}.json" for job in jobs])


def _import_result(args: argparse.Namespace, names: list[str]) -> int:
    table = open_table(args.table)
    if len(names) != 1:
        raise ConfigError(
            "embodyrl-results import takes one result file of vla-eval or lerobot-eval, for example eval_info.json."
        )
    path = Path(names[0])
    name = args.name or path.stem
    if not re.fullmatch(r"[\w-]+", name) or name in table.recipes:
        raise ConfigError(f"--name {name}: use letters, digits, - and _, but not the name of a recipe.")
    target = table.folder / CARDS / f"{name}.json"
    if name in table.run_names or (target.is_file() and "imported" not in read_card(target)):
        raise ConfigError(f"--name {name}: the card of this name belongs to a run of embodyrl. Choose another name.")
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, json_text(import_result(path, args.protocol)))
    return _write_page(args, table, [f"card  {target}"])


def _export_result(args: argparse.Namespace, names: list[str]) -> int:
    if len(names) < 2:
        raise ConfigError(
            "embodyrl-results export takes a file and runs: embodyrl-results export results.json runs/my_eval."
        )
    target, result = Path(names[0]), vla_eval_result([Path(name) for name in names[1:]])
    write_atomically(target, json_text(result))
    count = sum(task["num_episodes"] for task in result["tasks"])
    show_result(args, {"file": target, "episodes": count}, [f"{count} episodes in the layout of vla-eval: {target}"])
    return 0


def _page(args: argparse.Namespace, names: list[str]) -> int:
    return _write_page(args, open_table(args.table), [])


def _write_page(args: argparse.Namespace, table: Table, lines: list[str]) -> int:
    page = table.folder / PAGE
    write_atomically(page, page_text(table))
    show_result(args, {"page": page, "cards": len(lines)}, [*lines, f"page  {page}"])
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "show": _show_table,
    "run": _run_recipes,
    "check": _check_drift,
    "accept": _accept_cards,
    "import": _import_result,
    "export": _export_result,
    "page": _page,
}
