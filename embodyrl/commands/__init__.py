"""Commands of the program, one module each."""

from collections.abc import Callable
from typing import Any

from embodyrl import parts
from embodyrl.registry import Registry, takes

COMMANDS: Registry[Callable[..., Any]] = Registry(
    "command",
    group="embodyrl.commands",
    parts=parts.COMMANDS,
    wants="a function of the parsed arguments or of a config",
    fits=takes(1),
)
