"""Positional arguments of commands."""

from collections.abc import Collection, Sequence

from embodyrl.errors import ConfigError
from embodyrl.registry import closest


def choose_name(arguments: Sequence[str], names: Collection[str], error_start: str) -> str:
    """Return the first argument, which must be one of `names`.

    Raises:
        ConfigError: the argument is missing or unknown; the message starts with `error_start`.
    """
    name = arguments[0] if arguments else ""
    if name in names:
        return name
    problem = f" '{name}' is unknown.{closest(name, names)}" if name else ""
    raise ConfigError(f"{error_start}.{problem} Choose one of {', '.join(names)}.")


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into paths, and overrides such as `seed=1`."""
    paths = [argument for argument in arguments if "=" not in argument]
    return paths, [argument for argument in arguments if "=" in argument]
