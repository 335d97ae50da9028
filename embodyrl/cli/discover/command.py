"""The commands `list`, `show` and `completion`."""

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from embodyrl.cli.arguments import choose_name
from embodyrl.cli.commands import COMMANDS
from embodyrl.cli.discover.runs import describe_run
from embodyrl.cli.output import get_help, group_variants, show_result
from embodyrl.cli.runs import run_folders
from embodyrl.config import compose
from embodyrl.errors import ConfigError
from embodyrl.parts import EXTRAS


def list_names(args: argparse.Namespace) -> int:
    """Run `embodyrl list`, which prints names of components, runs or pip extras."""
    groups = {f"{group}s": group for group in compose.default_options("train")}
    kinds = [*groups, "extras", "runs"]
    kind = choose_name(args.arguments, kinds, "embodyrl list needs a kind of names")
    overrides = args.arguments[1:]
    if kind == "runs":
        folder = _get_runs_folder(overrides)
        rows = [describe_run(run) for run in run_folders(folder)]
        lines = [_format_run(**row) for row in rows] or [f"no runs in {folder}/"]
    elif overrides and (kind == "extras" or len(overrides) > 1 or "=" in overrides[0]):
        raise ConfigError(f"embodyrl list {kind} takes no more arguments; remove '{overrides[0]}'.")
    elif kind == "extras":
        rows = _list_extras()
        lines = _format_table(rows)
    else:
        group, start = groups[kind], "".join(overrides)
        options = {
            name: file for name, file in compose.options(group, args.config_dir).items() if name.startswith(start)
        }
        if not options:
            raise ConfigError(f"No name in `embodyrl list {kind}` starts with '{start}'.")
        rows = [{"name": name, "about": get_help(group, name, file)} for name, file in options.items()]
        lines = [*_format_table(rows if start else _merge_families(kind, group, rows))]
        lines += [row["about"] for row in _list_extras() if row["missing"]]
    show_result(args, rows, lines)
    return 0


def _merge_families(kind: str, group: str, rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Merge the rows of each large family of variants, such as libero_pro_*, into one row."""
    by_name = {row["name"]: row for row in rows}
    result: list[Mapping[str, str]] = []
    for name, members in group_variants(group, by_name).items():
        if name in by_name:
            result.append(by_name[name])
            continue
        title, start = by_name[members[0]]["about"].partition(":")[0], name.rstrip("_*")
        result.append({"name": name, "about": f"{title}: {len(members)} options; embodyrl list {kind} {start}"})
    return result


def _format_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    width = max((len(row["name"]) for row in rows), default=0)
    return [f"{row['name']:<{width}}  {row['about']}" for row in rows]


def _list_extras() -> list[dict[str, str]]:
    """Return a row for each pip extra: name, description, and the modules that are not installed."""
    rows = []
    for extra in sorted({*EXTRAS.values()}):
        modules = [module for module, name in EXTRAS.items() if name == extra]
        missing = ", ".join(module for module in modules if find_spec(module) is None)
        install = f"{missing} is not installed: pip install 'embodyrl[{extra}]'"
        rows.append(
            {"name": extra, "about": install if missing else f"installed: {', '.join(modules)}", "missing": missing}
        )
    return rows


def _get_runs_folder(overrides: list[str]) -> Path:
    """Return the folder that the override `runner.output_dir=DIR` selects, or the default folder."""
    from embodyrl.config.compose import parse_override
    from embodyrl.plan.settings import RunnerSettings

    values = dict(map(parse_override, overrides))
    folder = values.pop("runner.output_dir", RunnerSettings().output_dir)
    if values:
        raise ConfigError(f"embodyrl list runs accepts only the key runner.output_dir; remove '{next(iter(values))}'.")
    return Path(str(folder))


def _format_run(*, started: str, path: str, step: int | None, success: float | None, **fields: object) -> str:
    mean_return = fields["return"]
    score = "success     -" if success is None else f"success {success:.3f}"
    if success is None and mean_return is not None:
        score = f"return {mean_return:>6.4g}"
    return f"{started}  step {'-' if step is None else step:>6}  {score}  {path}"


def show(args: argparse.Namespace) -> int:
    """Run `embodyrl show`, which prints config keys with their values and documentation."""
    from embodyrl.cli.discover.schema import json_schema
    from embodyrl.config.settings import format_value, is_key_or_subkey, to_builtin
    from embodyrl.plan.command_sections import COMMANDS as CONFIGURED
    from embodyrl.plan.config import load_config
    from embodyrl.plan.keys import suggest

    argument, overrides = (args.arguments[0], args.arguments[1:]) if args.arguments else ("train", [])
    group, equals, _ = argument.partition("=")
    if equals:
        overrides = [argument, *overrides]
    command = group if group in CONFIGURED else "train"
    cfg = load_config(command, overrides, config_dirs=args.config_dir)
    if args.schema:
        print(json.dumps(json_schema(cfg.schema), indent=2))
        return 0
    values, keys = dict(cfg.leaves()), cfg.schema.keys
    all_key_groups = (command, "experiment")
    names = [name for name in keys if group in all_key_groups or is_key_or_subkey(name, [group])]
    if not names:
        sections = ", ".join(cfg.used_fields())
        hint = suggest(group)
        raise ConfigError(
            f"Unknown group or key '{group}'.{hint} Commands: {', '.join(CONFIGURED)}. Groups: {sections}."
        )
    sections = {name: name.rpartition(".")[0] for name in names}
    order = list(dict.fromkeys(sections.values()))
    names.sort(key=lambda name: order.index(sections[name]))
    rows, lines, heading = [], [], "" if len(order) > 1 else None
    for name in names:
        key = keys[name]
        # The source of a mapping may be the source of one of its entries.
        key_sources = [source for source_key, source in cfg.sources.items() if is_key_or_subkey(source_key, [name])]
        row = {
            "key": name,
            "type": key.type_text,
            "value": to_builtin(values[name]),
            "default": to_builtin(key.default),
        }
        rows.append(row | {"doc": key.doc, "source": key_sources[-1] if key_sources else "default"})
        changed = "" if key.required or row["value"] == row["default"] else f" (default {format_value(row['default'])})"
        if heading is not None and (not lines or sections[name] != heading):
            heading = sections[name]
            lines += [*([""] if lines else []), f"[{heading or 'top level'}]"]
        lines += [
            f"{name}: {key.type_text} = {format_value(values[name])}{changed}  [{rows[-1]['source']}]",
            f"    {key.doc}",
        ]
    if len(order) > 1:
        lines += ["", f"{len(rows)} keys. Show one section: embodyrl show NAME ({', '.join(filter(None, order))})."]
    show_result(args, rows, lines)
    return 0


def completion(args: argparse.Namespace) -> int:
    """Run `embodyrl completion bash|zsh`, which prints a completion script."""
    from embodyrl.plan.keys import all_keys

    if args.arguments not in (["bash"], ["zsh"]):
        raise ConfigError('embodyrl completion needs a shell, bash or zsh: eval "$(embodyrl completion bash)".')
    flags = [
        f'        {name}:-*) words="{" ".join([*command.flags, "--help"])}" ;;' for name, command in COMMANDS.items()
    ]
    parts = {
        "commands": " ".join(COMMANDS),
        "flags": "\n".join(flags),
        "options": " ".join(
            f"{group}={option}" for group in compose.default_options("train") for option in compose.options(group)
        ),
        "keys": " ".join(f"{name}=" for name in all_keys()),
    }
    script = files("embodyrl.cli.discover").joinpath("completion.bash").read_text(encoding="utf-8")
    for placeholder, text in parts.items():
        script = script.replace(f"@{placeholder}@", text)
    print(("autoload -U bashcompinit && bashcompinit\n" if args.arguments == ["zsh"] else "") + script, end="")
    return 0
