"""The command `check-env`, which checks an environment against the interface contract of `Env`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from embodyrl.errors import clean_text, mask_json
from embodyrl.plan.config import load_config

if TYPE_CHECKING:
    from embodyrl.envs.check import Finding


def check_env(args: argparse.Namespace) -> int:
    """Run `embodyrl check-env`; the exit code is 3 if a check fails."""
    findings: list[Finding] = []
    # Redirect stdout: a user's module may print when it is imported.
    with contextlib.redirect_stdout(sys.stderr):
        cfg = load_config("check-env", args.arguments, config_dirs=args.config_dir)
        from embodyrl.envs.check import check_env_in_subprocess
        from embodyrl.plan.checks import check_components
        from embodyrl.plan.environment import env_spec
        from embodyrl.plan.initial_states import select_tasks

        check_components(cfg)
        if cfg.env.train.task_ids is not None:
            select_tasks(env_spec(cfg), cfg.env.train)
    for finding in check_env_in_subprocess(cfg.env, seed=cfg.seed, timeout_s=cfg.faults.step_timeout_s):
        findings.append(finding)
        if not args.json:
            _show(finding)
    level_counts = {level: sum(entry.level == level for entry in findings) for level in ("ok", "warn", "FAIL", "skip")}
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        counts = {"failed": level_counts["FAIL"], "warned": level_counts["warn"], "skipped": level_counts["skip"]}
        print(mask_json(json.dumps({"env": cfg.env.env_type, **counts, "checks": rows}, indent=2)))
    else:
        warned = f"{level_counts['warn']} warned, " if level_counts["warn"] else ""
        print(f"{level_counts['ok']} checks ok, {warned}{level_counts['FAIL']} failed, {level_counts['skip']} skipped")
    return 3 if level_counts["FAIL"] else 0


def _show(finding: Finding) -> None:
    # Flush, so that the progress of a slow simulator is visible.
    note = f": {finding.note}" if finding.note else ""
    print(clean_text(f"  {finding.level:<4}  {finding.check}{note}"), flush=True)
    for v in finding.violations:
        text = f"        {v.field}\n          expected  {v.expected}\n          found     {v.found}"
        print(clean_text(text), flush=True)
