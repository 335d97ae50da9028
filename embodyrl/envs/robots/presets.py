"""Robot presets, read from robots.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Declared properties of a robot environment."""

    package: str
    """Name of the PyPI package."""
    module: str
    """Name of the module to import."""
    id: str
    """Gymnasium id or `package.module:attr` (see `env.id` of the environment `gym`)."""
    horizon: int
    """Time limit in env steps."""
    rate_hz: float
    """Number of actions per second."""
    success: str
    """Description of the success condition."""
    dense: bool = False
    """True if states without success have a positive reward."""
    instruction: str
    meaning: str
    """Meaning and units of an action."""
    action: tuple[str, ...]
    """Name of each action dimension."""
    state: Mapping[str, int]
    """Number of columns of each named part of the state vector, in order."""
    cameras: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    process: bool = False
    """True if the environment runs in a separate process of the interpreter `env.python`."""
    gripper: tuple[float, float] | None = None
    """Values of the last action dimension that open and close the gripper."""
    wrappers: tuple[str | dict[str, Any], ...] = ()


_FILE = Path(__file__).with_name("robots.toml")


def _read() -> tuple[dict[str, Preset], dict[str, Preset]]:
    raw: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    views = {name: of.pop("pixels") for name, of in raw.items() if "pixels" in of}
    return (
        {name: _preset(of) for name, of in raw.items()},
        {name: _preset(raw[name] | view) for name, view in views.items()},
    )


def _preset(values: Mapping[str, Any]) -> Preset:
    frozen: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Preset(**frozen)


PRESETS, PIXEL_PRESETS = _read()
"""Presets by name: PRESETS have state observations, PIXEL_PRESETS have camera images."""
