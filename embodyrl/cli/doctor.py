"""The command `doctor`: can this machine run it? Every finding comes with its fix."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from embodyrl.cli import probes
from embodyrl.cli.probes import Finding
from embodyrl.cli.rendering import probe_rendering, probe_video, probe_vulkan
from embodyrl.config.load import load_config
from embodyrl.config.schema import Config
from embodyrl.errors import ConfigError


def doctor(args: argparse.Namespace) -> int:
    """Run `embodyrl doctor`; 3 if anything fails."""
    cfg = load_config("train", args.words, config_dirs=args.config_dir)
    folders = [Path(cfg.runner.output_dir), Path(cfg.video_cfg.base_dir)]
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
        *_probe_config(cfg),
    ]
    failed = sum(f.level == "FAIL" for f in findings)
    warned = sum(f.level == "warn" for f in findings)
    if args.json:
        summary = {"failed": failed, "warned": warned, "findings": [dataclasses.asdict(f) for f in findings]}
        print(json.dumps(summary, indent=2))
    for finding in [] if args.json else findings:
        fix = f"\n        fix: {finding.fix}" if finding.fix else ""
        print(f"  {finding.level:<4}  {finding.name}: {finding.text}{fix}")
    if not args.json:
        print(f"{failed} problem{'s' * (failed != 1)}, {warned} warning{'s' * (warned != 1)}")
    return 3 if failed else 0


def _probe_config(cfg: Config) -> list[Finding]:
    """Let the chosen environment and policy look for what they need on this machine."""
    from embodyrl.envs import ENVS
    from embodyrl.runtime.build import count_env_workers
    from embodyrl.runtime.checks import check_components
    from embodyrl.runtime.planning import memory_of_tasks

    try:
        check_components(cfg)
        spec = ENVS.get(cfg.env.env_type).spec(cfg.env)
    except ConfigError as error:
        fix = "what that line says, or another choice: embodyrl list envs, embodyrl list models"
        return [Finding("config", "FAIL", problem, fix) for problem in error.problems]
    findings = [Finding("config", "ok", f"env {spec.name} ({len(spec.tasks)} tasks) with model {cfg.model.model_type}")]
    if spec.task_bytes:
        workers = count_env_workers(cfg, cfg.env.train.total_num_envs)
        findings.append(Finding("simulators", "ok", memory_of_tasks(spec, cfg.env.train, workers)))
    return findings
