"""The command `data`, which describes, merges and filters data sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodyrl.cli.output import show_result
from embodyrl.commands.data_sets import DataSet, Selection, describe, find_warnings, open_set, write_set
from embodyrl.config.paths import resolve_asset
from embodyrl.data.layout import Actor
from embodyrl.errors import ConfigError
from embodyrl.registry import closest

_FILTERS = ("success", "failure", "min_return", "max_return", "actor", "policy_version")


def data(args: argparse.Namespace) -> int:
    """Run `embodyrl data`: describe, find_warnings, merge or filter data sets."""
    verb, folders = args.words[0] if args.words else "", args.words[1:]
    if verb not in _VERBS:
        what = f" '{verb}' is not an action.{closest(verb, _VERBS)}" if verb else ""
        example = f"`embodyrl data info {verb if verb and resolve_asset(verb).is_dir() else 'DIR'}`"
        raise ConfigError(f"embodyrl data needs an action.{what} Actions: {', '.join(_VERBS)}, for example {example}.")
    fewest, most = {"info": (1, 10**6), "merge": (3, 10**6), "filter": (2, 2)}[verb]
    if not fewest <= len(folders) <= most:
        takes = {
            "info": "one or more folders",
            "merge": "a new folder and at least two source folders",
            "filter": "a source folder and a new folder",
        }
        raise ConfigError(f"embodyrl data {verb} takes {takes[verb]}.")
    given = [f"--{name.replace('_', '-')}" for name in _FILTERS if getattr(args, name)]
    if verb != "filter" and given:
        raise ConfigError(f"{given[0]} applies only to `embodyrl data filter`. Remove it.")
    if verb == "filter" and not given:
        raise ConfigError("embodyrl data filter needs a condition, for example --success or --actor person.")
    return _VERBS[verb](args, folders)


def _info(args: argparse.Namespace, folders: list[str]) -> int:
    found = [describe(open_set(resolve_asset(folder))) for folder in folders]
    show_result(args, found, [line for one in found for line in _lines(one)])
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    authors = ", ".join(f"{count} {name}" for name, count in found["actions"].items())
    versions = ", ".join(f"{count} of version {version}" for version, count in found["versions"].items())
    share = "unknown" if found["success"] is None else f"{100 * found['success']:.1f} %"
    mean = "unknown" if found["mean_return"] is None else f"{found['mean_return']:.4g}"
    return [
        f"{found['folder']}: {found['episodes']} episodes, {found['frames']} frames of {found['env']}",
        f"  success  {share} · mean return {mean}",
        f"  actions  {authors}",
        f"  policy   {versions}",
        *(f"  warning  {warning}" for warning in found["warnings"]),
        *(f"  task     {count} episodes: {task}" for task, count in found["tasks"].items()),
    ]


def _merge(args: argparse.Namespace, folders: list[str]) -> int:
    out, *sources = folders
    return _write(args, Path(out), [open_set(resolve_asset(source)) for source in sources], Selection())


def _filter(args: argparse.Namespace, folders: list[str]) -> int:
    source, out = folders
    if args.success and args.failure:
        raise ConfigError("--success and --failure cannot be combined. Remove one of them.")
    actors = {actor.name: actor for actor in Actor}
    if args.actor is not None and args.actor not in actors:
        raise ConfigError(f"--actor {args.actor} is unknown. Choose one of {', '.join(actors)}.")
    selection = Selection(
        success=True if args.success else False if args.failure else None,
        low=_number(args, "min_return", float),
        high=_number(args, "max_return", float),
        actor=None if args.actor is None else actors[args.actor],
        version=_number(args, "policy_version", int),
    )
    return _write(args, Path(out), [open_set(resolve_asset(source))], selection)


def _number(args: argparse.Namespace, name: str, kind: Callable[[str], Any]) -> Any:
    text = getattr(args, name)
    try:
        return None if text is None else kind(text)
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {text}: the value must be a number.") from None


def _write(args: argparse.Namespace, out: Path, sources: list[DataSet], selection: Selection) -> int:
    write_set(out, sources, selection)
    found = describe(open_set(out)) | {"warnings": [line for source in sources for line in find_warnings(source)]}
    show_result(args, found, _lines(found))
    return 0


_VERBS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {"info": _info, "merge": _merge, "filter": _filter}
