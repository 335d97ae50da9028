"""What `doctor` looks at: one function per fact about this machine."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from embodyrl.files import available_bytes

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    level: str
    """ok, warn or FAIL."""
    text: str
    fix: str = ""


def probe_python() -> Finding:
    """Python version."""
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def probe_torch() -> Finding:
    """Torch version and the devices that it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        return Finding("torch", "FAIL", f"cannot be imported: {reason}", "pip install --upgrade torch")
    if not torch.cuda.is_available():
        return Finding("torch", "ok", f"{torch.__version__}, CPU only")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
    return Finding("torch", "ok", f"{torch.__version__}, {len(names)} CUDA devices ({', '.join(names)}), {bf16}")


def probe_memory() -> Finding:
    """Free memory per usable core; a LIBERO worker needs 1 to 2 GiB."""
    free = available_bytes()
    cores = len(os.sched_getaffinity(0))
    text = f"{free / _GIB:.1f} GiB free, {cores} cores ({free / cores / _GIB:.1f} GiB per core)"
    if free / cores < 1.5 * _GIB:
        workers = max(1, int(free // (2 * _GIB)))
        return Finding("memory", "warn", text, f"launcher.env_workers={workers}, or close other programs")
    return Finding("memory", "ok", text)


def probe_open_files() -> Finding:
    """Limit of open files; every worker takes a few dozen."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Finding("ulimit -n", "warn", str(soft), f"ulimit -n {min(4096, hard) if hard > 0 else 4096}")
    return Finding("ulimit -n", "ok", str(soft))


def probe_folders(folders: Sequence[Path]) -> list[Finding]:
    """Output folders can be written and their disk has room; nothing is left there."""
    findings = []
    for folder in folders:
        absolute = folder.absolute()
        place = next(p for p in (absolute, *absolute.parents) if p.exists())
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"\0")
        except OSError as error:
            fix = "choose another place with runner.output_dir=DIR and video_cfg.base_dir=DIR"
            findings.append(Finding(f"folder {folder}", "FAIL", f"cannot write to {place}: {error.strerror}", fix))
            continue
        free = shutil.disk_usage(place).free
        text = f"writable, {free / _GIB:.1f} GiB free on its disk"
        level, fix = ("warn", "free some space, or lower checkpoint.keep") if free < 2 * _GIB else ("ok", "")
        findings.append(Finding(f"folder {folder}", level, text, fix))
    return findings


def probe_extras() -> list[Finding]:
    """Versions of the required packages and of each optional set."""
    extras: dict[str, list[Requirement]] = {}
    for text in metadata.requires("embodyrl") or []:
        requirement = Requirement(text)
        named = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        extras.setdefault(named[1] if named else "", []).append(requirement)
    return [_judge_extra(name, requirements) for name, requirements in extras.items()]


def _judge_extra(name: str, requirements: Iterable[Requirement]) -> Finding:
    have, wrong = [], []
    for requirement in requirements:
        version = installed_version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
            continue
        have.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} instead of {requirement.specifier}")
    if not wrong:
        return Finding(f"extra {name}" if name else "packages", "ok", ", ".join(have))
    if not name:
        return Finding("packages", "FAIL", "; ".join(wrong), "pip install embodyrl")
    return Finding(f"extra {name}", "warn", "; ".join(wrong), f"pip install 'embodyrl[{name}]'")


def installed_version(package: str) -> str | None:
    """Version of an installed package; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
