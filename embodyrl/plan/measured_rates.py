"""Rates that `tools/gpu_check` measures and stores in the user's cache, for speed predictions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from embodyrl.config.paths import cache_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured rates of a GPU or an environment."""

    rates: Mapping[str, float]
    report: str
    """Path of the report with the measurements."""
    day: str


_FILE = TypeAdapter(dict[str, Measured])


def rates_file() -> Path:
    """Return the path of the cache file with the measured rates."""
    return cache_dir() / "gpu_rates.json"


def read_measured_rates() -> dict[str, Measured]:
    """Return the cached measurements by name of the GPU or environment; empty if the cache file cannot be read."""
    try:
        return _FILE.validate_json(rates_file().read_bytes())
    except (OSError, ValidationError):
        return {}
