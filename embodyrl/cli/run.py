"""Commands with a config, such as `train` and `eval`: compose and check the config, then call a function."""

import argparse
import contextlib
import dataclasses
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from embodyrl.cli.runs import NEWEST, find_experiment_run, find_newest_run, find_run
from embodyrl.commands import COMMANDS
from embodyrl.config.compose import dir_flags, format_override, parse_override
from embodyrl.config.paths import resolve_run
from embodyrl.config.trust import split_trust
from embodyrl.errors import ConfigError, clean_text, mask_json
from embodyrl.files import json_text
from embodyrl.plan.config import load_saved_config, load_with_ckpt
from embodyrl.plan.saved import dump_config
from embodyrl.plan.schema import Config


def run(args: argparse.Namespace) -> int:
    """Run a command with a config and return its exit code; with `--json` standard output contains only the result."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SIGUSR1 requests the status of a run; ignore it until workers run
    resume = getattr(args, "resume", None) or ""
    if "=" in resume and not Path(resume).exists():  # `--resume key=value` resumes the newest run
        args.arguments, args.resume = [args.resume, *args.arguments], NEWEST
    if args.json and args.dry_run:
        raise ConfigError("--json cannot be combined with --dry-run. Use --print-config, or remove --dry-run.")
    if args.command == "train" and args.multirun:
        if args.resume or args.print_config or args.dry_run or args.json:
            raise ConfigError("-m cannot be combined with --resume, --print-config, --dry-run or --json; remove them.")
        from embodyrl.cli.sweep import sweep

        return sweep(args.command, args.arguments, args.config_dir)
    if args.command == "eval" and args.until_significant:
        if args.resume or args.print_config or args.dry_run:
            raise ConfigError("--until-significant cannot be combined with --resume, --print-config or --dry-run.")
        from embodyrl.commands.sequential import compare_policies

        return compare_policies(args.until_significant, args.arguments, args.config_dir, args.json)
    cfg, kwargs = _compose(args)
    if handle_config_flags(args, cfg):
        return 0
    only_eval = cfg.is_train_command and cfg.runner.only_eval
    function = COMMANDS.get("eval" if only_eval else args.command)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        result = function(cfg, overrides=[*args.arguments, *dir_flags(args.config_dir)], **kwargs)
    if args.json:
        print(mask_json(json_text(dataclasses.asdict(result))), end="")
    return getattr(result, "exit_code", 0)


def _compose(args: argparse.Namespace) -> tuple[Config, dict[str, Path | None]]:
    """Return the composed config and the command's keyword arguments: `resume` if the command can resume a run."""
    arguments, folders = args.arguments, args.config_dir
    if args.command in ("train", "sft"):
        cfg, resume = _compose_train_config(args)
        if not (cfg.is_train_command and cfg.runner.only_eval):
            return cfg, {"resume": resume}
        if resume is not None:
            raise ConfigError(
                "--resume cannot be combined with runner.only_eval=true. Remove one of the two, or evaluate the run: "
                f"embodyrl eval {shlex.quote(format_override('ckpt', str(resume)))}."
            )
        return cfg, {}
    if args.command == "eval" and args.resume:
        if split_trust(arguments)[1] or folders:
            raise ConfigError("--resume uses the saved settings of the evaluation; remove key=value and --config-dir.")
        run_folder = _find_resumed_run(args)
        if (run_folder / "checkpoints").is_dir():
            run, weights = map(shlex.quote, (str(run_folder), format_override("ckpt", str(run_folder))))
            raise ConfigError(
                f"{run_folder} is a training run. Resume it: embodyrl train --resume {run}. "
                f"Evaluate its checkpoint: embodyrl eval {weights}."
            )
        return load_saved_config(run_folder, arguments, command="eval"), {"resume": run_folder}
    return compose_with_ckpt(args), {}


def compose_with_ckpt(args: argparse.Namespace) -> Any:
    """Compose the config of a command that uses weights (see `load_with_ckpt`).

    A first argument without `=` is the value of `ckpt`.
    """
    if args.arguments and "=" not in args.arguments[0]:
        args.arguments[0] = format_override("ckpt", args.arguments[0])
    return load_with_ckpt(args.command, args.arguments, config_dirs=args.config_dir)


def _find_resumed_run(args: argparse.Namespace) -> Path:
    """Return the run folder that `--resume` names; without a name, the newest run folder of this command."""
    if args.resume != NEWEST:
        return Path(args.resume) if args.command != "eval" else find_run(args.resume)
    return find_newest_run(f"embodyrl {args.command} --resume", is_training=args.command != "eval")


def _compose_train_config(args: argparse.Namespace) -> tuple[Config, Path | None]:
    """Compose the config of `train`; return the config and the run folder to resume, if any.

    `--resume RUN` uses the saved config of the run. `--resume auto` uses the config of the command line, and starts a
    new run if the experiment has no run.
    """
    prefix = "runner.resume_dir="
    resume_values = (
        [str(_find_resumed_run(args))]
        if args.resume
        else [parse_override(argument)[1] for argument in args.arguments if argument.startswith(prefix)]
    )
    resume = str(resume_values[-1]) if resume_values and resume_values[-1] is not None else None
    arguments = [argument for argument in args.arguments if not argument.startswith(prefix)]
    if resume is not None and resume != "auto":
        if args.config_dir:
            raise ConfigError("--config-dir has no effect with --resume, which uses the run's saved config; remove it.")
        if any(argument.startswith("ckpt=") for argument in arguments):
            raise ConfigError(
                "ckpt cannot be combined with --resume: a resumed run has its own weights; remove one of the two."
            )
        run_path = resolve_run(resume)
        cfg = load_saved_config(run_path, arguments, command=args.command)
        return cfg, run_path if run_path.is_dir() else run_path.parent
    cfg = load_with_ckpt(args.command, arguments, config_dirs=args.config_dir)
    if resume is None and cfg.runner.resume_dir is None:
        return cfg, None
    if cfg.runner.experiment_name is None:
        raise ConfigError("--resume auto needs the name of the experiment; set runner.experiment_name=NAME.")
    return cfg, find_experiment_run(Path(cfg.runner.output_dir), cfg.runner.experiment_name)


def handle_config_flags(args: argparse.Namespace, cfg: Config) -> bool:
    """Check the config; handle `--print-config` and `--dry-run`, and return True if one of these flags is set."""
    from embodyrl.plan.checks import check_components

    check_components(cfg)
    if args.print_config:
        import yaml

        text = dump_config(cfg)
        print(json.dumps(yaml.safe_load(text), indent=2) if args.json else text.rstrip("\n"))
    elif args.dry_run:
        from embodyrl.cli.dry_run import describe

        print(clean_text(describe(cfg)))
    return args.print_config or args.dry_run
