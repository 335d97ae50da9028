"""The command `data`, which describes, merges, filters and replays data sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodyrl.cli.arguments import choose_name, split_overrides
from embodyrl.cli.output import show_result
from embodyrl.commands.data_sets import DataSet, Selection, describe, find_warnings, open_set, write_set
from embodyrl.config.paths import resolve_asset
from embodyrl.data.layout import Actor
from embodyrl.errors import ConfigError, clean_text

_FILTERS = ("success", "failure", "min_return", "max_return", "actor", "policy_version")


def data(args: argparse.Namespace) -> int:
    """Run `embodyrl data`: describe, merge, filter or replay data sets."""
    folder = next((argument for argument in args.arguments[:1] if resolve_asset(argument).is_dir()), "DIR")
    error_start = f"embodyrl data needs an action, for example `embodyrl data info {folder}`"
    action = choose_name(args.arguments, _ACTIONS, error_start)
    folders = args.arguments[1:]
    if args.episodes is not None and action != "replay":
        raise ConfigError("--episodes applies only to `embodyrl data replay`. Remove --episodes.")
    filter_flags = [f"--{name.replace('_', '-')}" for name in _FILTERS if getattr(args, name)]
    if action != "filter" and filter_flags:
        raise ConfigError(f"{filter_flags[0]} applies only to `embodyrl data filter`. Remove this flag.")
    if action == "replay":
        return _replay(args, folders)
    min_folders, max_folders, expected = {
        "info": (1, 10**6, "one or more folders"),
        "merge": (3, 10**6, "a new folder and at least two source folders"),
        "filter": (2, 2, "a source folder and a new folder"),
    }[action]
    if not min_folders <= len(folders) <= max_folders:
        raise ConfigError(f"embodyrl data {action} takes {expected}.")
    if action == "filter" and not filter_flags:
        raise ConfigError("embodyrl data filter needs a condition, for example --success or --actor person.")
    return _ACTIONS[action](args, folders)


def _describe(args: argparse.Namespace, folders: list[str]) -> int:
    summaries = [describe(open_set(resolve_asset(folder))) for folder in folders]
    show_result(args, summaries, [line for summary in summaries for line in _format_summary(summary)])
    return 0


def _format_summary(summary: dict[str, Any]) -> list[str]:
    actions = ", ".join(f"{count} {name}" for name, count in summary["actions"].items())
    versions = ", ".join(f"{count} episodes of version {version}" for version, count in summary["versions"].items())
    success = "unknown" if summary["success"] is None else f"{100 * summary['success']:.1f} %"
    mean_return = "unknown" if summary["mean_return"] is None else f"{summary['mean_return']:.4g}"
    return [
        f"{summary['folder']}: {summary['episodes']} episodes, {summary['frames']} frames of {summary['env']}",
        f"  success  {success} · mean return {mean_return}",
        f"  actions  {actions}",
        f"  policy   {versions}",
        *(f"  warning  {warning}" for warning in summary["warnings"]),
        *(f"  task     {count} episodes: {task}" for task, count in summary["tasks"].items()),
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
        low=_parse_number(args, "min_return", float),
        high=_parse_number(args, "max_return", float),
        actor=None if args.actor is None else actors[args.actor],
        version=_parse_number(args, "policy_version", int),
    )
    return _write(args, Path(out), [open_set(resolve_asset(source))], selection)


def _parse_number(args: argparse.Namespace, name: str, kind: Callable[[str], Any]) -> Any:
    text = getattr(args, name)
    try:
        return None if text is None else kind(text)
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {text}: the value must be a number.") from None


def _write(args: argparse.Namespace, out: Path, sources: list[DataSet], selection: Selection) -> int:
    write_set(out, sources, selection)
    summary = describe(open_set(out)) | {
        "warnings": [warning for source in sources for warning in find_warnings(source)]
    }
    show_result(args, summary, _format_summary(summary))
    return 0


def _replay(args: argparse.Namespace, arguments: list[str]) -> int:
    """Replay a data set; the exit code is 3 if success is more than 2 percentage points below the recorded success."""
    from embodyrl.commands.replay import replay

    folders, overrides = split_overrides(arguments)
    if len(folders) != 1:
        raise ConfigError("embodyrl data replay takes one folder, and overrides such as env=libero_object.")
    episodes: list[dict[str, Any]] = []
    for episode in replay(resolve_asset(folders[0]), overrides, _parse_number(args, "episodes", int)):
        episodes.append(asdict(episode))
        outcome = "success" if episode.success else "failure"
        if not args.json:
            recorded = {True: "success", False: "failure", None: "unknown"}[episode.recorded]
            line = (
                f"  episode {episode.episode:<5} {outcome} (recorded {recorded}) · {episode.steps} steps · "
                f"initial state differs by {episode.start_difference:.2g} · {episode.task}"
            )
            print(clean_text(line), flush=True)
    success = sum(episode["success"] for episode in episodes) / len(episodes)
    expected = sum(episode["recorded"] is not False for episode in episodes) / len(episodes)
    summary = {"folder": folders[0], "success": success, "recorded": expected, "episodes": episodes}
    show_result(
        args,
        summary,
        [f"{folders[0]}: success {100 * success:.1f} % of {len(episodes)} episodes, recorded {100 * expected:.1f} %"],
    )
    return 3 if success < expected - 0.02 else 0


_ACTIONS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "info": _describe,
    "merge": _merge,
    "filter": _filter,
    "replay": _replay,
}
