"""Results of GPU checks."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResult:
    """Result of a GPU check."""

    level: str
    """Outcome: ok, warn, FAIL or skip."""
    text: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """Measured values by name, for the JSON report."""
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    """Measured rates for the planner, by GPU name or `EnvCosts.chunk_name`."""


class GpuParts:
    """Collects the results of a GPU check with several parts; a failed part does not end the check.

    Values are also printed to standard error, so that they are not lost if the process is killed.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.measured: dict[str, dict[str, float]] = {}
        self.failures: list[str] = []
        self.warnings: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run the block as a named part of the check. An exception fails only this part; its traceback is stored."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or ["no message"]
            self.failures.append(f"{name}: {type(error).__name__}: {lines[0]}")
            self.record(f"traceback of {name}", traceback.format_exc())

    def record(self, name: str, value: Any) -> None:
        """Store a measured value and print it to standard error."""
        self.values[name] = value
        print(f"{name}: {value}", file=sys.stderr, flush=True)

    def result(self, text: str, fix: str = "") -> GpuResult:
        """Return the result of the whole check: FAIL if a part failed, else warn if a part has a warning, else ok."""
        level = "FAIL" if self.failures else "warn" if self.warnings else "ok"
        message = "; ".join([*self.failures, *self.warnings, *([text] if text else [])])
        return GpuResult(level=level, text=message, fix=fix, values=self.values, measured=self.measured)
