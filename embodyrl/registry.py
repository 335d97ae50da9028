"""One registry for every seam: short name, "package.module:attr", or installed entry point."""

import difflib
import importlib
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from embodyrl.errors import UnknownNameError

T = TypeVar("T")


def closest(name: str, options: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return " Did you mean 'x'?" for the nearest option, or an empty string.

    >>> closest("libero_11", ["libero_10", "tabletop"])
    " Did you mean 'libero_10'?"
    """
    matches = difflib.get_close_matches(name, list(options), n=3, cutoff=cutoff)
    if not matches:
        return ""
    # Among names that look equally close, swapped letters are the likeliest slip.
    best = next((match for match in matches if sorted(match) == sorted(name)), matches[0])
    return f" Did you mean '{best}'?"


class Registry(Generic[T]):
    """Names of one seam. Values are objects, or "module:attr" strings that are imported on first use.

    >>> shapes: Registry[type] = Registry("shape", group="embodyrl.shapes")
    >>> shapes.add("odict", "collections:OrderedDict")
    >>> shapes.get("odict").__name__
    'OrderedDict'
    """

    def __init__(self, kind: str, *, group: str) -> None:
        self.kind = kind
        self.group = group
        self._items: dict[str, Any] = {}

    def add(self, name: str, value: T | str) -> None:
        """Register an object or a "module:attr" string under a new name."""
        if name in self._items and self._items[name] != value:
            raise ValueError(f"{self.kind} '{name}' is already registered; pick another name.")
        self._items[name] = value

    def names(self) -> list[str]:
        """All short names, entry points of installed packages included."""
        return sorted({*self._items, *(e.name for e in entry_points(group=self.group))})

    def get(self, name: str) -> T:
        """Look a name up.

        Raises:
            UnknownNameError: nothing has this name; the message holds the nearest one.
        """
        if ":" in name:
            return self._load(name)
        if name in self._items:
            value = self._items[name]
            return self._load(value) if isinstance(value, str) else value
        for entry in entry_points(group=self.group):
            if entry.name == name:
                return entry.load()
        raise UnknownNameError(
            f"Unknown {self.kind} '{name}'.{closest(name, self.names())} Known: {', '.join(self.names())}. "
            f"To plug in your own, use 'package.module:attr' or an '{self.group}' entry point."
        )

    def _load(self, target: str) -> T:
        module_name, _, attribute = target.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise
            raise UnknownNameError(f"Cannot import '{module_name}' for {self.kind} '{target}': {error}.") from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise UnknownNameError(
                    f"Module '{module_name}' has no '{attribute}' ({self.kind} '{target}').{closest(part, dir(found))}"
                )
            found = getattr(found, part)
        return found
