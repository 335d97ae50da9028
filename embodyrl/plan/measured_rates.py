"""Rates that `embodyrl doctor --gpu` measures and stores in the user's cache, for speed predictions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from embodyrl.config.paths import cache_dir
from embodyrl.files import json_text, write_atomically


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


def read_measured() -> dict[str, Measured]:
    """Return the cached measurements by name of the GPU or environment; empty if the cache file cannot be read."""
    try:
        return _FILE.validate_json(rates_file().read_bytes())
    except (OSError, ValidationError):
        return {}


def keep_measured(found: Mapping[str, Mapping[str, float]], report: Path, day: str) -> None:
    """Add measurements to the cache file; replace older measurements with the same name.

    Raises:
        OSError: the cache cannot be written.
    """
    new = {name: Measured(rates=dict(rates), report=str(report), day=day) for name, rates in found.items()}
    path = rates_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json_text(json.loads(_FILE.dump_json(read_measured() | new))))
