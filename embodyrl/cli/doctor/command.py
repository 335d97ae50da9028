"""The command `doctor`, which checks this machine or a checkpoint, and suggests a fix for each problem."""

import argparse
import dataclasses
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from embodyrl.cli.arguments import split_overrides
from embodyrl.cli.doctor import probes
from embodyrl.cli.output import show_result
from embodyrl.cli.runs import run_folders
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.envs.maniskill.install import probe_vulkan
from embodyrl.envs.protocol import env_costs
from embodyrl.errors import ConfigError, clean_text
from embodyrl.findings import Finding
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_spec
from embodyrl.plan.keys import all_keys
from embodyrl.plan.saved import changed_settings
from embodyrl.plan.schema import Config
from embodyrl.text.sandbox import probe_sandbox
from embodyrl.version import __version__


def doctor(args: argparse.Namespace) -> int:
    """Run `embodyrl doctor`; the exit code is 3 if a check fails."""
    if args.json and args.report:
        raise ConfigError("--report prints Markdown and cannot be combined with --json; remove one of these flags.")
    checkpoints, overrides = split_overrides(args.arguments)
    if checkpoints:
        return _check_checkpoint(args, checkpoints, overrides)
    cfg = load_config("train", args.arguments, config_dirs=args.config_dir)
    paths = (cfg.runner.output_dir, cfg.video_cfg.base_dir)
    folders = [Path(path) for path in dict.fromkeys(paths) if path is not None]
    if args.json or args.report:
        print("checking this machine ...", file=sys.stderr, flush=True)
    findings: list[Finding] = []
    for finding in _run_checks(cfg, folders):
        findings.append(finding)
        if not (args.json or args.report):
            print(clean_text(_format(finding)), flush=True)
    failed = sum(entry.level == "FAIL" for entry in findings)
    warned = sum(entry.level == "warn" for entry in findings)
    totals = f"{failed} problem{'s' * (failed != 1)}, {warned} warning{'s' * (warned != 1)}"
    summary = {"failed": failed, "warned": warned, "findings": [dataclasses.asdict(entry) for entry in findings]}
    show_result(args, summary, bug_report(folders[0], [*map(_format, findings), totals]) if args.report else [totals])
    return 3 if failed else 0


def _check_checkpoint(args: argparse.Namespace, folders: Sequence[str], overrides: Sequence[str]) -> int:
    """Run `embodyrl doctor FOLDER`; the exit code is 3 if a check fails."""
    from embodyrl.cli.doctor.checkpoint import diagnose

    if len(folders) > 1 or args.report:
        raise ConfigError("embodyrl doctor FOLDER takes one folder and key=value. Remove other folders and --report.")
    lines, findings = diagnose(folders[0], overrides, args.config_dir)
    summary = {"lines": lines, "findings": [dataclasses.asdict(entry) for entry in findings]}
    show_result(args, summary, [*(f"  {label:<12} {text}" for label, text in lines), *map(_format, findings)])
    return 3 if any(entry.level == "FAIL" for entry in findings) else 0


def _run_checks(cfg: Config, folders: Sequence[Path]) -> Iterator[Finding]:
    """Run the checks, and yield one finding per check."""
    yield probes.probe_python()
    yield probes.probe_torch()
    yield probes.probe_driver()
    yield probes.probe_memory()
    yield probes.probe_open_files()
    yield probes.probe_shared_memory()
    yield from probes.probe_folders(folders)
    yield from probes.probe_extras()
    yield probes.probe_rendering()
    yield probes.probe_video()
    yield probe_sandbox()
    yield probe_vulkan()
    yield from _probe_config(cfg)


def _format(finding: Finding) -> str:
    fix = f"\n        fix: {finding.fix}" if finding.fix else ""
    return f"  {finding.level:<4}  {finding.name}: {finding.text}{fix}"


def bug_report(runs: Path, lines: Sequence[str]) -> list[str]:
    """Return the findings and the settings of the newest run as one block of Markdown."""
    text = [f"embodyrl {__version__} on {platform.platform()}", "", "```text", *lines, "```"]
    for run in run_folders(runs)[:1]:
        defaults = {name: key.default for name, key in all_keys().items() if not key.required}
        settings = [
            f"{key}={value}" for key, value, _ in changed_settings(read_plain_yaml(run / "config.yaml"), defaults)
        ]
        text += ["", f"Newest run, {run}:", "", "```text", *settings, "```"]
    return text


def _probe_config(cfg: Config) -> list[Finding]:
    """Check that this machine meets the requirements of the chosen environment and policy."""
    from embodyrl.commands.banner import describe_task_memory
    from embodyrl.plan.build import count_env_workers, plan_devices
    from embodyrl.plan.checks import check_components

    try:
        check_components(cfg)
        spec = env_spec(cfg)
    except ConfigError as error:
        fix = "correct this setting, or choose another component: embodyrl list envs, embodyrl list models"
        return [Finding("config", "FAIL", problem, fix) for problem in error.problems]
    findings = [Finding("config", "ok", f"env {spec.name} ({len(spec.tasks)} tasks) with model {cfg.model.model_type}")]
    if task_bytes := env_costs(cfg.env, spec).task_bytes:
        workers = count_env_workers(cfg, spec, plan_devices(cfg, training=True), cfg.env.train.total_num_envs)
        findings.append(Finding("simulators", "ok", describe_task_memory(spec, task_bytes, cfg.env.train, workers)))
    return findings
