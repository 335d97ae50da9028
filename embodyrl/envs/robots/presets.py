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
    """Language instruction of every episode."""
    meaning: str
    """Meaning and units of an action, shown in the start banner."""
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
    """Wrappers of the environment, in the format of `env.wrappers`."""


_PRESETS_FILE = Path(__file__).with_name("robots.toml")


def _read_presets() -> tuple[dict[str, Preset], dict[str, Preset]]:
    raw: dict[str, dict[str, Any]] = tomllib.loads(_PRESETS_FILE.read_text(encoding="utf-8"))
    pixel_values = {name: values.pop("pixels") for name, values in raw.items() if "pixels" in values}
    return (
        {name: _build_preset(values) for name, values in raw.items()},
        {name: _build_preset(raw[name] | pixels) for name, pixels in pixel_values.items()},
    )


def _build_preset(values: Mapping[str, Any]) -> Preset:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Preset(**fields)


PRESETS, PIXEL_PRESETS = _read_presets()
"""Presets by name: PRESETS have state observations, PIXEL_PRESETS have camera images."""
