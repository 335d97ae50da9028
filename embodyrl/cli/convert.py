"""The command `convert`, which converts demonstrations to the LeRobot layout v3.0."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from embodyrl.cli.arguments import split_overrides
from embodyrl.cli.output import show_result
from embodyrl.commands.run_folder import lock_folder
from embodyrl.config.compose import Setting, parse_override
from embodyrl.config.settings import get_keys, nested
from embodyrl.data.conversion.settings import ConversionSettings, ConvertSettings
from embodyrl.errors import ConfigError
from embodyrl.monitor.group import build_monitor
from embodyrl.monitor.protocol import RunInfo
from embodyrl.plan.checks import build_settings
from embodyrl.registry import closest
from embodyrl.version import __version__


def convert(args: argparse.Namespace) -> int:
    """Run `embodyrl convert SOURCE OUT`."""
    paths, overrides = split_overrides(args.arguments)
    if len(paths) != 2:
        raise ConfigError("embodyrl convert needs a source and an output folder: embodyrl convert SOURCE OUT.")
    data = read_settings(overrides)
    source, out = map(Path, paths)
    if out.exists():
        raise ConfigError(f"The output folder {out} already exists. Choose another folder, or delete it.")
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        result = _convert(source, out, data)
    show_result(args, dataclasses.asdict(result), ())
    return 0


def read_settings(arguments: Sequence[str]) -> ConversionSettings:
    """Parse and validate the config overrides of the command line.

    Raises:
        ConfigError: one line per problem.
    """
    problems: list[str] = []
    settings: dict[str, Setting] = {}
    keys = get_keys(ConvertSettings)
    for argument in arguments:
        name, value = parse_override(argument)
        if name not in keys:
            problems.append(f"unknown key '{name}'.{closest(name, keys)} Keys: {', '.join(keys)}.")
        settings[name] = Setting(name, value, "command line", argument)
    values = nested({name: setting.value for name, setting in settings.items() if name in keys})
    validated_settings = build_settings(ConvertSettings, values, keys, settings, problems)
    if validated_settings is None or problems:
        raise ConfigError(problems)
    return validated_settings.data


def _convert(source: Path, out: Path, data: ConversionSettings) -> Any:
    from embodyrl.data.conversion.convert import convert, open_source
    from embodyrl.data.conversion.plan import plan_conversion

    monitor = build_monitor(["console"])
    with lock_folder(out):
        opened = open_source(source, data)
        plan = plan_conversion(opened.description, data, str(source.resolve()))
        banner_lines = plan.get_banner_lines(source, out)
        monitor.open(out.parent, RunInfo(run_id=out.name))
        try:
            monitor.banner(
                [f"embodyrl {__version__} · convert", *(f"  {name:<10} {text}" for name, text in banner_lines)]
            )
            result = convert(opened, plan, data, out, partial(monitor.progress, what="episodes converted"))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the conversion was stopped; run the same command to resume it") from None
        finally:
            monitor.close()
    skipped = f", {result.left_out} left out (non-finite numbers)" if result.left_out else ""
    print(f"  data     {out}: {result.episodes} episodes, {result.frames} frames, {result.tasks} tasks{skipped}")
    print(f"  next     embodyrl sft {shlex.quote(f'data.path={out}')}")
    return result
