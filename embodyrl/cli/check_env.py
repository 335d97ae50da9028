"""The command `check-env`: does an environment keep the contract that training relies on?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from embodyrl.plan.config import load_config

if TYPE_CHECKING:
    from embodyrl.commands.check_env import Finding


def check_env(args: argparse.Namespace) -> int:
    """Run `embodyrl check-env`; 3 if a check fails."""
    cfg = load_config("check-env", args.words, config_dirs=args.config_dir)
    from embodyrl.commands.check_env import check_env as run
    from embodyrl.plan.checks import check_components

    check_components(cfg)
    findings: list[Finding] = []
    for finding in run(cfg.env, seed=cfg.seed, timeout_s=cfg.faults.step_timeout_s):
        findings.append(finding)
        if not args.json:
            _show(finding)
    failed = sum(finding.level == "FAIL" for finding in findings)
    skipped = sum(finding.level == "skip" for finding in findings)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"env": cfg.env.env_type, "failed": failed, "skipped": skipped, "checks": rows}, indent=2))
    else:
        print(f"{len(findings) - failed - skipped} checks ok, {failed} failed, {skipped} skipped")
    return 3 if failed else 0


def _show(finding: Finding) -> None:
    # Flushed, so that whoever waits for a slow simulator sees how far it has come.
    note = f": {finding.note}" if finding.note and not finding.violations else ""
    print(f"  {finding.level:<4}  {finding.check}{note}", flush=True)
    for v in finding.violations:
        print(f"        {v.field}\n          expected  {v.expected}\n          found     {v.found}", flush=True)
