"""The command `doctor`: can this machine run it? Every finding comes with its fix."""

import argparse
import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path

from embodyrl.cli import probes
from embodyrl.cli.output import show_result
from embodyrl.cli.probes import Finding, probe_rendering, probe_sandbox, probe_video, probe_vulkan
from embodyrl.cli.runs import run_folders
from embodyrl.errors import ConfigError
from embodyrl.monitor.history import read_history
from embodyrl.monitor.report.tables import changed_settings
from embodyrl.plan.config import load_config
from embodyrl.plan.keys import all_keys
from embodyrl.plan.roots import TrainConfig
from embodyrl.plan.texts import env_spec
from embodyrl.version import __version__


def doctor(args: argparse.Namespace) -> int:
    """Run `embodyrl doctor`; 3 if anything fails."""
    if args.json and args.report:
        raise ConfigError("--report is human-readable text; leave out --json, or --report.")
    cfg = load_config("train", args.words, config_dirs=args.config_dir)
    places = (cfg.runner.output_dir, cfg.video_cfg.base_dir)
    folders = [Path(place) for place in dict.fromkeys(places) if place is not None]
    findings = [
        probes.probe_python(),
        probes.probe_torch(),
        probes.probe_memory(),
        probes.probe_open_files(),
        *probes.probe_folders(folders),
        *probes.probe_extras(),
        probe_rendering(),
        probe_vulkan(),
        probe_video(),
        probe_sandbox(),
        *_probe_config(cfg),
    ]
    failed = sum(f.level == "FAIL" for f in findings)
    warned = sum(f.level == "warn" for f in findings)
    lines = [f"  {f.level:<4}  {f.name}: {f.text}" + (f"\n        fix: {f.fix}" if f.fix else "") for f in findings]
    lines.append(f"{failed} problem{'s' * (failed != 1)}, {warned} warning{'s' * (warned != 1)}")
    summary = {"failed": failed, "warned": warned, "findings": [dataclasses.asdict(f) for f in findings]}
    show_result(args, summary, bug_report(folders[0], lines) if args.report else lines)
    return 3 if failed else 0


def bug_report(runs: Path, lines: Sequence[str]) -> list[str]:
    """The findings and what the newest run was started with, as one block of Markdown."""
    text = [f"embodyrl {__version__} on {platform.platform()}", "", "```text", *lines, "```"]
    for run in run_folders(runs)[:1]:
        defaults = {name: key.default for name, key in all_keys().items() if not key.required}
        settings = [f"{key}={value}" for key, value, _ in changed_settings(read_history(run).config, defaults)]
        text += ["", f"Newest run, {run}:", "", "```text", *settings, "```"]
    return text


def _probe_config(cfg: TrainConfig) -> list[Finding]:
    """Let the chosen environment and policy look for what they need on this machine."""
    from embodyrl.commands.facts import memory_of_tasks
    from embodyrl.plan.blueprint import count_env_workers, plan_devices
    from embodyrl.plan.checks import check_components

    try:
        check_components(cfg)
        spec = env_spec(cfg)
    except ConfigError as error:
        fix = "what that line says, or another choice: embodyrl list envs, embodyrl list models"
        return [Finding("config", "FAIL", problem, fix) for problem in error.problems]
    findings = [Finding("config", "ok", f"env {spec.name} ({len(spec.tasks)} tasks) with model {cfg.model.model_type}")]
    if spec.task_bytes:
        workers = count_env_workers(cfg, spec, plan_devices(cfg, training=True), cfg.env.train.total_num_envs)
        findings.append(Finding("simulators", "ok", memory_of_tasks(spec, cfg.env.train, workers)))
    return findings
