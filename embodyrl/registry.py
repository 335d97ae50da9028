"""Registry of components by short name, "package.module:attr", or entry point of a package or extension."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from embodyrl.errors import UnknownNameError
from embodyrl.manifests import declared

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def closest(name: str, options: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return " Did you mean 'x'?" for the nearest option, or an empty string.

    >>> closest("libero_11", ["libero_10", "tabletop"])
    " Did you mean 'libero_10'?"
    >>> closest("PPO", ["grpo", "ppo"])
    " Did you mean 'ppo'?"
    """
    typed, spelled = name.casefold(), {option.casefold(): option for option in options}
    matches = difflib.get_close_matches(typed, spelled, n=3, cutoff=cutoff)
    if not matches:
        return ""
    # Of equally similar names, prefer swapped letters.
    best = next((match for match in matches if sorted(match) == sorted(typed)), matches[0])
    return f" Did you mean '{spelled[best]}'?"


def has(*names: str) -> Callable[[Any], bool]:
    """Return a check for `Registry` that accepts objects with all of the attributes `names`, but no classes."""
    return lambda found: not isinstance(found, type) and all(hasattr(found, name) for name in names)


def takes(arguments: int) -> Callable[[Any], bool]:
    """Return a check for `Registry` that accepts a callable with n arguments; 0: any number of arguments.

    Callables of the standard library are rejected.
    """

    def check(found: Any) -> bool:
        while isinstance(found, functools.partial) and not found.keywords:
            return takes(arguments + len(found.args))(found.func)
        home = (getattr(found, "__module__", None) or type(found).__module__).partition(".")[0]
        if not callable(found) or home in sys.stdlib_module_names:
            return False
        try:
            inspect.signature(found).bind(*range(arguments)) if arguments else None
        except (TypeError, ValueError):  # too few or too many; a C function without a signature
            return False
        return True

    return check


def installed(**chosen: Any) -> Iterable[EntryPoint]:
    """Return entry points of installed packages, filtered by `group` or `value`; `sys.path` is searched once."""
    return _entry_points(tuple(sys.path)).select(**chosen)


@functools.cache
def _entry_points(path: tuple[str, ...]) -> Any:
    from importlib.metadata import entry_points

    return entry_points()


def _found_here(module: str) -> str:
    """Return a hint if a module that cannot be imported exists in the working folder or a subfolder."""
    name = module.partition(".")[0]
    for folder in (Path.cwd(), Path.cwd() / name):
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            return f" It is in {folder}, which is not on Python's path: export PYTHONPATH=$PYTHONPATH:{folder}"
    return ""


class Registry(Generic[T]):
    """Named components of one kind. Values are objects, or "module:attr" strings that are imported on first use.

    Components must pass the check `fits`, which does not call them; `wants` describes the requirement in errors.

    >>> numbers: Registry[float] = Registry("number", group="my.numbers", wants="a tau", fits=has("hex"))
    >>> numbers.add("tau", "math:tau")
    >>> numbers.get("tau")
    6.283185307179586
    """

    def __init__(self, kind: str, *, group: str, wants: str, fits: Callable[[Any], bool]) -> None:
        self.kind = kind
        self.group = group
        self._wants, self._fits = wants, fits
        self._items: dict[str, Any] = {}

    def add(self, name: str, value: T | str) -> None:
        """Register an object or a "module:attr" string under a new name."""
        if name in self._items and self._items[name] != value:
            raise ValueError(f"{self.kind} '{name}' is already registered; choose another name.")
        self._items[name] = value

    def names(self) -> list[str]:
        """Return all short names, including entry points of extensions and installed packages."""
        return sorted({*self._items, *declared(self.group), *(e.name for e in installed(group=self.group))})

    def every(self) -> list[T]:
        """Return all registered components, sorted by name."""
        return [self.get(name) for name in self.names()]

    def problems(self, names: Iterable[str], key: str) -> list[str]:
        """Return an error for each unknown name in `names`, the value of `key`; short names are not imported."""
        found: list[str] = []
        others = {*names} - {*self._items, *declared(self.group)}
        for name in others - {*self.names()} if others else ():  # names of installed packages take time to read
            try:
                self.get(name)
            except UnknownNameError as error:
                found.append(f"{key}: {error}")
        return found

    def get(self, name: str) -> T:
        """Return the component that `name` selects.

        Raises:
            UnknownNameError: the name is unknown (the message suggests a similar name), or the component fails the
                check.
        """
        value: Any = name
        if ":" not in name:
            value = self._items[name] if name in self._items else self._entry_point(name)
            if value is None:
                known = ", ".join(self.names()) or "none"
                raise UnknownNameError(
                    f"Unknown {self.kind} '{name}'.{closest(name, self.names())} Known: {known}. "
                    f"To plug in your own, use 'package.module:attr' or an '{self.group}' entry point."
                )
        found = self._load(value) if isinstance(value, str) else value
        if not self._fits(found):
            raise UnknownNameError(
                f"{self.kind} '{name}' is {type(found).__name__} {found!r:.80}, not {self._wants}."
                f"{self._fitting(value)}"
            )
        return found

    def _fitting(self, target: Any) -> str:
        """Return a hint with the components of this kind in the module of a "module:attr" string."""
        if not isinstance(target, str):
            return ""
        module = target.partition(":")[0]
        fitting = [name for name, value in vars(importlib.import_module(module)).items() if self._fits(value)]
        return f" Did you mean {' or '.join(f'{module}:{name}' for name in fitting[:3])}?" if fitting else ""

    def _entry_point(self, name: str) -> str | None:
        """Return the target of an entry point; entry points of embodyrl's extensions take precedence."""
        if (found := declared(self.group).get(name)) is not None:
            return found
        return next((entry.value for entry in installed(group=self.group) if entry.name == name), None)

    def _load(self, target: str) -> Any:
        module_name, _, attribute = target.partition(":")
        if not re.fullmatch(r"[\w.]+:[\w.]+", target):
            raise UnknownNameError(f"{self.kind} '{target}' must have the form package.module:attr.")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # The plugin lacks a dependency: that is its author's error, and its traceback shows where.
            if error.name and not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise
            hint = _found_here(module_name) if error.name == module_name.partition(".")[0] else ""
            raise UnknownNameError(
                f"Cannot import '{module_name}' for {self.kind} '{target}': {error}.{hint}"
            ) from error
        except (SystemExit, Exception) as error:
            if isinstance(error, ImportError):
                raise
            raise UnknownNameError(
                f"Cannot import '{module_name}' for {self.kind} '{target}': {type(error).__name__}: {error}. Repair or "
                "remove the package; --traceback shows the line."
            ) from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise UnknownNameError(
                    f"Module '{module_name}' has no '{attribute}' ({self.kind} '{target}').{closest(part, dir(found))}"
                )
            found = getattr(found, part)
        return found
