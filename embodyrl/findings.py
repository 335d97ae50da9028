"""Findings of `embodyrl doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report of `embodyrl doctor`."""

    name: str
    level: str
    """Severity: ok, warn, FAIL, or ? for a property that cannot be determined from the files."""
    text: str
    fix: str = ""
