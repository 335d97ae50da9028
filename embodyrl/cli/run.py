"""The commands `train`, `eval`, `collect` and `sft`: compose, check, then hand over to the runtime."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from embodyrl.cli.runs import find_run, newest_run
from embodyrl.config.load import dump_config, load_config, load_saved_config
from embodyrl.config.schema import Config
from embodyrl.errors import ConfigError


def train(args: argparse.Namespace) -> int:
    """Run `embodyrl train`."""
    if args.multirun:
        if args.resume or args.print_config or args.dry_run or args.json:
            raise ConfigError("-m starts several runs; --resume, --print-config, --dry-run and --json go with one.")
        from embodyrl.cli.sweep import sweep

        return sweep("train", args.words, args.config_dir)
    cfg, resume = _train_config(args, "train")
    if _only_look(args, cfg, "train"):
        return 0
    if cfg.runner.only_eval:
        return _evaluate(cfg, args.words)
    from embodyrl.runtime.train import train as run

    run(cfg, overrides=args.words, resume=resume)
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Run `embodyrl eval`."""
    if args.resume:
        if args.words or args.config_dir:
            raise ConfigError("--resume goes on with exactly the settings of that evaluation; leave the others out.")
        run = find_run(args.resume)
        cfg = load_saved_config(run, [])
        return 0 if _only_look(args, cfg, "eval") else _evaluate(cfg, [], run)
    cfg = load_config("eval", args.words, config_dirs=_folders(args), base=_config_of_ckpt(args.words))
    return 0 if _only_look(args, cfg, "eval") else _evaluate(cfg, args.words)


def collect(args: argparse.Namespace) -> int:
    """Run `embodyrl collect`."""
    cfg = load_config("collect", args.words, config_dirs=_folders(args), base=_config_of_ckpt(args.words))
    if _only_look(args, cfg, "collect"):
        return 0
    from embodyrl.runtime.collect import collect as run

    run(cfg, overrides=args.words)
    return 0


def sft(args: argparse.Namespace) -> int:
    """Run `embodyrl sft`."""
    cfg, resume = _train_config(args, "sft")
    if _only_look(args, cfg, "sft"):
        return 0
    from embodyrl.runtime.sft import sft as run

    run(cfg, overrides=args.words, resume=resume)
    return 0


def _config_of_ckpt(words: list[str]) -> Path | None:
    """The saved config of the run that `ckpt=` points into, so that its model need not be typed again."""
    named = [w.removeprefix("ckpt=") for w in words if w.startswith("ckpt=")]
    if not named:
        return None
    path = Path(named[-1])
    for folder in (path, *path.parents):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return folder / "config.yaml"
    return None


def _evaluate(cfg: Config, overrides: list[str], resume: Path | None = None) -> int:
    from embodyrl.runtime.evaluate import evaluate as run

    run(cfg, overrides=overrides, resume=resume)
    return 0


def _train_config(args: argparse.Namespace, command: str) -> tuple[Config, Path | None]:
    """Compose the config and find the run to resume.

    A named run brings its own config. `auto` means "start this experiment or go on with it", so there the command
    line defines the config, and a missing run is a fresh start.
    """
    marker = "runner.resume_dir="
    asked = [args.resume] if args.resume else [w.removeprefix(marker) for w in args.words if w.startswith(marker)]
    resume = asked[-1] if asked and asked[-1] != "null" else None
    words = [w for w in args.words if not w.startswith(marker)]
    if resume is not None and resume != "auto":
        if args.config_dir:
            raise ConfigError("--config-dir has no effect with --resume: the run brings its own config; leave it out.")
        if any(w.startswith("ckpt=") for w in words):
            raise ConfigError("ckpt cannot be combined with --resume: a resumed run has weights of its own; drop one.")
        run = Path(resume)
        return load_saved_config(run, words), run if run.is_dir() else run.parent
    cfg = load_config(command, words, config_dirs=_folders(args))
    if resume is None and cfg.runner.resume_dir is None:
        return cfg, None
    if cfg.runner.experiment_name is None:
        raise ConfigError("resuming `auto` looks for a run by name: set runner.experiment_name=NAME, or name the run.")
    return cfg, newest_run(Path(cfg.runner.output_dir), cfg.runner.experiment_name)


def _only_look(args: argparse.Namespace, cfg: Config, command: str) -> bool:
    """Check the config against its components and serve the flags that stop before anything runs."""
    if args.json and not args.print_config:
        raise ConfigError("--json goes with --print-config here; results are written to the run folder as JSON.")
    from embodyrl.runtime.checks import check_components

    check_components(cfg, command)
    if args.print_config:
        print(_config_json(cfg) if args.json else dump_config(cfg).rstrip("\n"))
        return True
    if args.dry_run:
        from embodyrl.runtime.planning import describe

        print(describe(cfg, command))
        return True
    return False


def _config_json(cfg: Config) -> str:
    import yaml

    return json.dumps(yaml.safe_load(dump_config(cfg)), indent=2)


def _folders(args: argparse.Namespace) -> list[Path]:
    return [Path(d) for d in args.config_dir]
