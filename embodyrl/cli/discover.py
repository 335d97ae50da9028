"""The commands `list` and `show`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from embodyrl.cli.runs import list_runs
from embodyrl.config import tree
from embodyrl.config.keys import all_keys, branches, leaves, plain, spell, suggest_key
from embodyrl.config.load import load_config, sources
from embodyrl.errors import ConfigError
from embodyrl.registry import closest


def list_things(args: argparse.Namespace) -> int:
    """Run `embodyrl list`."""
    groups = {f"{group}s": group for group in tree.default_options("train")}
    kinds = [*groups, "runs"]
    what, overrides = (args.words[0], args.words[1:]) if args.words else ("", [])
    if what not in kinds:
        said = f"cannot list '{what}'.{closest(what, kinds)}" if what else "list what?"
        raise ConfigError(f"{said} One of: {', '.join(kinds)}.")
    if what == "runs":
        return _list_runs(overrides, args)
    if overrides:
        raise ConfigError(f"embodyrl list {what} takes no further words; leave out '{overrides[0]}'.")
    rows = {option: tree.one_line(file) for option, file in tree.options(groups[what], _folders(args)).items()}
    if args.json:
        print(json.dumps([{"name": name, "about": about} for name, about in rows.items()], indent=2))
    else:
        width = max(map(len, rows))
        print("\n".join(f"{name:<{width}}  {about}" for name, about in rows.items()))
    return 0


def _list_runs(overrides: list[str], args: argparse.Namespace) -> int:
    folder = Path(load_config("train", overrides, config_dirs=_folders(args)).runner.output_dir)
    runs = list_runs(folder)
    if args.json:
        print(json.dumps([dataclasses.asdict(run) for run in runs], indent=2))
    elif not runs:
        print(f"no runs in {folder}/")
    for run in [] if args.json else runs:
        step = "-" if run.step is None else run.step
        success = "-" if run.success is None else f"{run.success:.3f}"
        print(f"{run.started}  step {step:>6}  success {success:>5}  {run.path}")
    return 0


def show(args: argparse.Namespace) -> int:
    """Run `embodyrl show`."""
    what, overrides = (args.words[0], args.words[1:]) if args.words else ("train", [])
    group, equals, _ = what.partition("=")
    if equals:
        overrides = [what, *overrides]
    names = _selected(group)
    cfg = dict(leaves(load_config("train", overrides, config_dirs=_folders(args))))
    origin = sources("train", overrides, config_dirs=_folders(args))
    rows = [
        {
            "key": name,
            "type": all_keys()[name].type_text,
            "value": plain(cfg[name]),
            "default": plain(all_keys()[name].default),
            "doc": all_keys()[name].doc,
            "source": _origin(name, origin),
        }
        for name in names
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        changed = "" if row["value"] == row["default"] else f" (default {spell(row['default'])})"
        print(f"{row['key']}: {row['type']} = {spell(row['value'])}{changed}  [{row['source']}]")
        print(f"    {row['doc']}")
    return 0


def _selected(group: str) -> list[str]:
    if group in ("train", "experiment"):
        return list(all_keys())
    names = [n for n in all_keys() if n == group or n.startswith(f"{group}.")]
    if not names:
        tops = [b for b in branches() if "." not in b]
        raise ConfigError(
            f"nothing to show for '{group}'.{suggest_key(group)} One of: train, {', '.join(tops)}, or a key."
        )
    return names


def _origin(name: str, origin: dict[str, str]) -> str:
    """Where a key was set; a free mapping may have been set through one of its entries."""
    hits = [place for key, place in origin.items() if key == name or key.startswith(f"{name}.")]
    return hits[-1] if hits else "schema default"


def _folders(args: argparse.Namespace) -> list[Path]:
    return [Path(d) for d in args.config_dir]
