"""Findings of `embodyrl doctor`, which extensions add to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    level: str
    """ok, warn or FAIL."""
    text: str
    fix: str = ""
