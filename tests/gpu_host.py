"""Hosts with a stub `nvidia-smi` that lists GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

H100 = ("0", "GPU-a", "81559", "81559", "Disabled", "580.65.06", "NVIDIA H100 80GB HBM3")
"""One row: index, uuid, free and total MiB, MIG mode, driver, name."""


def stub_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, ...], more: str = "") -> None:
    """Put a stub program first on the PATH that prints these rows; `more` are lines of its shell script."""
    lines = "\n".join(", ".join(row) for row in rows)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n{more}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def of_size(*sizes: int) -> list[tuple[str, ...]]:
    """Return rows of equal GPUs with this free memory, MiB."""
    return [(str(number), f"GPU-{number}", str(mib), str(mib), *H100[4:]) for number, mib in enumerate(sizes)]
