"""The command `embodyrl-gpu-check`: checks of a host with GPUs, each in a separate process with a deadline."""

import argparse
import dataclasses
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embodyrl.cli.doctor.probes import installed_version
from embodyrl.cli.output import show_result
from embodyrl.devices import query_gpus, visible_gpus
from embodyrl.errors import EmbodyError, MissingDependencyError, replace_control_characters
from embodyrl.files import available_bytes, available_cores, json_text, write_atomically
from embodyrl.isolation import NoResultError, call_isolated
from embodyrl.plan.rates import MeasuredRates, rates_file, read_measured_rates
from embodyrl.version import __version__
from embodyrl_gpu_check.checks import CHECKS, GpuCheck
from embodyrl_gpu_check.result import GpuResult

_PACKAGES = ("torch", "transformers", "numpy", "peft", "mujoco", "robosuite", "sapien", "mani_skill", "vllm", "ray")
_LOG_LINES = 40
"""Maximum number of log lines of a failed check in the report."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run checks.

    Returns:
        0: no check failed. 1: the report cannot be written. 2: usage. 3: a check failed.
    """
    parser = argparse.ArgumentParser(prog="embodyrl-gpu-check", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="check", help=f"{', '.join(CHECKS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"), metavar="FILE", help="JSON report")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_intermixed_args(argv)
    if unknown := [name for name in args.names if name not in CHECKS]:
        parser.error(f"there is no check '{unknown[0]}'; checks: {', '.join(CHECKS)}")
    if args.out.suffix == ".md":
        parser.error(f"--out={args.out} is also the name of the Markdown report; use a name that ends in .json")
    try:
        return check_gpus(args)
    except OSError as error:
        print(f"embodyrl-gpu-check: error: {error}. Choose another --out.", file=sys.stderr)
        return 1


def check_gpus(args: argparse.Namespace) -> int:
    """Run the checks in `args.names` (default: all); return 3 if a check fails.

    The JSON file is rewritten after each check; the Markdown report is written next to it at the end.
    """
    selected = {name: check for name, check in CHECKS.items() if not args.names or name in args.names}
    path = args.out.absolute()
    page = path.with_suffix(".md")
    report, rates_text = _build_header(), ""
    for name, check in selected.items():
        print(f"  ...   {name}: {check.title}", file=sys.stderr, flush=True)
        entry = _run_check(name, check)
        report["checks"].append(entry)
        rates_text = _save_rates(report, path)  # `presets` predicts with the rates of earlier checks
        write_atomically(path, json_text(report))
        if not args.json:
            print(replace_control_characters(_format_line(entry)), flush=True)
    report["rates"] = rates_text
    write_atomically(path, json_text(report))
    write_atomically(page, "\n".join(build_page(report)) + "\n")
    failed = sum(entry["level"] == "FAIL" for entry in report["checks"])
    lines = [f"{failed} of {len(selected)} checks failed. {rates_text}", f"report: {path}", f"page:   {page}"]
    show_result(args, report, lines)
    return 3 if failed else 0


def _build_header() -> dict[str, Any]:
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MUJOCO_GL", "NVIDIA_DRIVER_CAPABILITIES", "LD_PRELOAD")
    return {
        "embodyrl": __version__,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "cores": available_cores(),
        "free_bytes": available_bytes(),
        "gpus": [dataclasses.asdict(gpu) for gpu in query_gpus()],
        "visible": list(visible_gpus()),
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
        "checks": [],
    }


def _run_check(name: str, check: GpuCheck) -> dict[str, Any]:
    """Return the report entry of a check, even if its process fails."""
    started, log = time.monotonic(), ""
    missing = [module for module in check.needs if find_spec(module) is None]
    if check.needs_gpu and not visible_gpus():
        result = GpuResult(level="skip", text="no GPU is visible")
    elif missing:
        result = GpuResult(level="skip", text=f"{', '.join(missing)} is not installed")
    else:
        try:
            result = call_isolated(check.function, kind=GpuResult, timeout_s=check.timeout_s)
        except (NoResultError, EmbodyError) as error:
            level = "skip" if isinstance(error, MissingDependencyError) else "FAIL"
            log = "\n".join(getattr(error, "__notes__", []))
            result = GpuResult(level=level, text=str(error))
    entry = {"name": name, "title": check.title, "seconds": round(time.monotonic() - started, 1), "log": log}
    return entry | dataclasses.asdict(result)


def _save_rates(report: dict[str, Any], path: Path) -> str:
    """Save the measured rates, which `--dry-run` uses for predictions; return a sentence for the report."""
    measured: dict[str, dict[str, float]] = {}
    for entry in report["checks"]:
        measured |= entry["measured"]
    if not measured:
        return "No rates were measured."
    day = report["started"][:10]
    new = {name: MeasuredRates(rates=rates, report=str(path), day=day) for name, rates in measured.items()}
    file = rates_file()
    stored = {name: dataclasses.asdict(one) for name, one in (read_measured_rates() | new).items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json_text(stored))
    except OSError as error:
        return f"The rates cannot be saved for predictions: {error}."
    return f"`--dry-run` predicts with the measured rates in {file}."


def _format_line(entry: dict[str, Any]) -> str:
    fix = f"\n        fix: {entry['fix']}" if entry["fix"] else ""
    return f"  {entry['level']:<4}  {entry['name']} ({entry['seconds']:.0f} s): {entry['text']}{fix}"


def build_page(report: dict[str, Any]) -> list[str]:
    """Return the Markdown report: the results and values of all checks, and the logs of failed checks."""
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    gpus = [
        f"GPU {gpu['number']}: {gpu['name']}, {gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free, "
        f"driver {gpu['driver']}"
        for gpu in report["gpus"]
    ]
    host = f"{report['cores']} cores, {report['free_bytes'] / 2**30:.1f} GiB free"
    lines = [
        f"# GPU report of embodyrl {report['embodyrl']}, {report['started']}",
        "",
        "```text",
        f"{report['machine']}, Python {report['python']}, {host}",
        packages,
        *(gpus or ["nvidia-smi lists no GPU"]),
        f"visible: {', '.join(report['visible']) or 'none'}",
        *(f"{name}={value}" for name, value in report["environment"].items()),
        "",
        *map(_format_line, report["checks"]),
        "",
        report["rates"],
        "```",
    ]
    for entry in report["checks"]:
        values = [f"{name}: {value}" for name, value in entry["values"].items()]
        log = entry["log"].splitlines()[-_LOG_LINES:]
        if values or log:
            lines += ["", f"## {entry['name']}: {entry['title']}", "", "```text", *values, *log, "```"]
    return lines
