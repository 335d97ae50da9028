"""Selection of components by a name of `parts.py`, an entry point of an installed package, or an import path."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from embodyrl import parts
from embodyrl.errors import UnknownNameError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_NONE: Mapping[str, str] = {}


def closest(name: str, options: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return " Did you mean 'x'?" for the nearest option, or an empty string.

    >>> closest("libero_11", ["libero_10", "tabletop"])
    " Did you mean 'libero_10'?"
    >>> closest("PPO", ["grpo", "ppo"])
    " Did you mean 'ppo'?"
    """
    folded, options_by_folded = name.casefold(), {option.casefold(): option for option in options}
    matches = difflib.get_close_matches(folded, options_by_folded, n=3, cutoff=cutoff)
    if not matches:
        return ""
    # Among equally similar names, prefer a name with the same letters in another order.
    best = next((match for match in matches if sorted(match) == sorted(folded)), matches[0])
    return f" Did you mean '{options_by_folded[best]}'?"


def has(*names: str) -> Callable[[Any], bool]:
    """Return a check for `load` that accepts objects with all of the attributes `names`, but no classes."""
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names)


def takes(num_arguments: int) -> Callable[[Any], bool]:
    """Return a check for `load` that accepts a callable with `num_arguments` arguments; 0: any number of arguments.

    Callables of the standard library are rejected.
    """

    def check(value: Any) -> bool:
        while isinstance(value, functools.partial) and not value.keywords:
            return takes(num_arguments + len(value.args))(value.func)
        top_module = (getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]
        if not callable(value) or top_module in sys.stdlib_module_names:
            return False
        try:
            inspect.signature(value).bind(*range(num_arguments)) if num_arguments else None
        except (TypeError, ValueError):  # too few or too many; a C function without a signature
            return False
        return True

    return check


def find_entry_points(**criteria: Any) -> Iterable[EntryPoint]:
    """Return the entry points of installed packages with the given `group`, `name` or `value`."""
    return _load_entry_points(tuple(sys.path)).select(**criteria)


@functools.cache
def _load_entry_points(path: tuple[str, ...]) -> Any:
    from importlib.metadata import entry_points

    return entry_points()


def _get_local_module_hint(module: str) -> str:
    """Return a hint if a module that cannot be imported exists in the working folder or a subfolder."""
    name = module.partition(".")[0]
    for folder in (Path.cwd(), Path.cwd() / name):
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            return f" It is in {folder}, which is not on Python's path: export PYTHONPATH=$PYTHONPATH:{folder}"
    return ""


def load(name: str, kind: str, *, wants: str, fits: Callable[[Any], bool], names: Mapping[str, str] = _NONE) -> Any:
    """Import the object that a name of `names` or an import path `package.module:attr` selects, and check the object.

    Args:
        name: name or import path.
        kind: kind of the object in error messages, for example a config key.
        wants: description of the required object, for error messages.
        fits: check of the object; it does not call the object.
        names: import path of each short name.

    Raises:
        UnknownNameError: the name or path is unknown (the message suggests a similar name), or the object fails the
            check.

    >>> load("tau", "number", wants="a tau", fits=has("hex"), names={"tau": "math:tau"})
    6.283185307179586
    """
    if ":" not in name and names and name not in names:
        raise UnknownNameError(
            f"Unknown {kind} '{name}'.{closest(name, names)} Known: {', '.join(sorted(names))}. To plug in your own, "
            "use 'package.module:attr'."
        )
    target = names.get(name, name)
    value = _import(target, kind)
    if fits(value):
        return value
    module = get_current_path(target).partition(":")[0]
    others = [other for other, candidate in vars(importlib.import_module(module)).items() if fits(candidate)]
    hint = f" Did you mean {' or '.join(f'{module}:{other}' for other in others[:3])}?" if others else ""
    raise UnknownNameError(f"{kind} '{name}' is {type(value).__name__} {value!r:.80}, not {wants}.{hint}")


def name_problems(key: str, names: Iterable[str], find: Callable[[str], Any]) -> list[str]:
    """Return an error for each name in `names`, the value of the key `key`, that `find` cannot find."""
    problems: list[str] = []
    for name in names:
        try:
            find(name)
        except UnknownNameError as error:
            problems.append(f"{key}: {error}")
    return problems


MOVED_MODULES = {
    "embodyrl.datasets.tasks": "embodyrl.text.tasks",
    "embodyrl.extensions.objectives": "embodyrl.algorithms.objectives",
    "embodyrl.extensions.openenv": "embodyrl.envs.openenv",
    "embodyrl.extensions.text": "embodyrl.text",
}
"""Current path of each module and package that configs of earlier versions refer to by another name."""


FORMER_NAMES = {f"{name}_history": name for name in ("gym", "libero", "maniskill", "metaworld", "robots", "tabletop")}
"""Current name of each component that configs of earlier versions refer to by another name."""


def get_current_path(target: str) -> str:
    """Return an import path in which a module name of an earlier version is replaced by the current name."""
    module, colon, attribute = target.partition(":")
    for old, new in MOVED_MODULES.items():
        if f"{module}.".startswith(f"{old}."):
            module = new + module.removeprefix(old)
    return f"{module}{colon}{attribute}"


def _import(target: str, kind: str) -> Any:
    module_name, _, attribute = get_current_path(target).partition(":")
    if not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise UnknownNameError(f"{kind} '{target}' must have the form package.module:attr.")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The plugin lacks a dependency, which its author must fix; the traceback shows the import.
        if error.name and not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        hint = _get_local_module_hint(module_name) if error.name == module_name.partition(".")[0] else ""
        raise UnknownNameError(f"Cannot import '{module_name}' for {kind} '{target}': {error}.{hint}") from error
    except (SystemExit, Exception) as error:
        if isinstance(error, ImportError):
            raise
        raise UnknownNameError(
            f"Cannot import '{module_name}' for {kind} '{target}': {type(error).__name__}: {error}. Repair or "
            "remove the package; --traceback shows the line."
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UnknownNameError(
                f"Module '{module_name}' has no '{attribute}' ({kind} '{target}').{closest(part, dir(value))}"
            )
        value = getattr(value, part)
    return value


class Registry(Generic[T]):
    """Components of one kind, selected by a name of `parts.py`, the name of an entry point or an import path.

    Each selected component must pass the check `fits`, which does not call the component. `wants` describes the
    requirement in errors.
    """

    def __init__(
        self, kind: str, *, group: str, parts: Mapping[str, str], wants: str, fits: Callable[[Any], bool]
    ) -> None:
        self.kind = kind
        self.group = group
        self._parts, self._wants, self._fits = parts, wants, fits

    def names(self) -> list[str]:
        """Return all names: built-in components and entry points of installed packages."""
        return sorted({*self._parts, *(entry.name for entry in find_entry_points(group=self.group))})

    def problems(self, names: Iterable[str], key: str) -> list[str]:
        """Return an error for each unknown name in `names`, the value of `key`; built-in ones are not imported."""
        return name_problems(key, {*names} - {*self._parts}, self.get)

    def get(self, name: str) -> T:
        """Return the component that `name` selects.

        Raises:
            UnknownNameError: the name is unknown (the message suggests a similar name) or belongs to several
                components, or the component fails the check.
        """
        targets = self._find_targets(name)
        if len(targets) > 1:
            raise UnknownNameError(
                f"{self.kind} '{name}' is defined by {' and by '.join(targets)}. Uninstall one of the packages, or "
                "select the part by its import path package.module:attr."
            )
        if ":" not in name and not targets:
            names = self.names()
            raise UnknownNameError(
                f"Unknown {self.kind} '{name}'.{closest(name, names)} Known: {', '.join(names) or 'none'}. "
                f"To plug in your own, use 'package.module:attr' or an '{self.group}' entry point."
            )
        target = next(iter(targets.values()), name)
        return load(name, self.kind, wants=self._wants, fits=self._fits, names={name: target})

    def _find_targets(self, name: str) -> dict[str, str]:
        """Return the import paths of a short name by the package that defines the name."""
        targets = {f"embodyrl ({self._parts[name]})": self._parts[name]} if name in self._parts else {}
        for entry in find_entry_points(group=self.group, name=name) if ":" not in name else ():
            targets[f"{entry.dist.name if entry.dist else 'a package'} ({entry.value})"] = entry.value
        return targets if targets or name not in FORMER_NAMES else self._find_targets(FORMER_NAMES[name])


REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward", group="embodyrl.rewards", parts=parts.REWARDS, wants="a function", fits=takes(0)
)
"""Reward functions of replies and of simulator steps; the callers of `get` check the number of arguments."""
