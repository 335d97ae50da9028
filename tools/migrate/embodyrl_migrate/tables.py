"""Tables of the source systems: keys, defaults, identity, facts, and the expressions in them."""

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


class MigrationError(Exception):
    """Problems that end the command with exit code 2, one line each."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def format_value(value: Any) -> str:
    """Format a value for the command line: null, true, [0,1], {a:1}.

    >>> format_value({"a": [None, True]})
    '{a:[null,true]}'
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{format_value(one)}" for key, one in value.items()) + "}"
    return str(value)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def devices(value: Any) -> int | None:
    """Count the devices of ROLL's device_mapping, "list(range(0,16))" or a list; the expression is parsed, not
    executed.

    >>> devices("list(range(0,4)) + list(range(8,16,2))"), devices("[4, 5]"), devices([0, 1, 2])
    (8, 2, 3)
    """
    if isinstance(value, list):
        return len(value)
    ranges = [tuple(map(int, match.split(","))) for match in re.findall(r"range\(([\d,\s]+)\)", str(value))]
    if any(len(bounds) > 3 or 0 in bounds[2:] for bounds in ranges):
        return None
    singles = re.findall(r"\[([\d,\s]+)\]", str(value))
    count = sum(len(range(*bounds)) for bounds in ranges)
    return count + sum(len(re.findall(r"\d+", text)) for text in singles) or None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "min": min,
    "max": max,
    "length": len,
    "devices": devices,
}


class UnknownValue(Exception):
    """A value is unknown or not a number."""


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """Evaluate an expression of dotted keys; None if a required key has no value.

    `first(a, b)` is the first argument with a value; `a if b else c`, `and`, `or`, comparisons and arithmetic are
    Python's.

    >>> evaluate("ceil(data.size / first(batch, 4)) * 2", {"data.size": 10})
    6
    """
    try:
        return _Evaluator(values).value(ast.parse(text, mode="eval").body)
    except (UnknownValue, ZeroDivisionError, TypeError, OverflowError, ValueError):
        return None


def number(text: str) -> float | None:
    """Evaluate arithmetic without keys; None for any other text."""
    try:
        return evaluate(text, {})
    except (SyntaxError, RecursionError):
        return None


class _Evaluator:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                return self._key(ast.unparse(node))
            case ast.IfExp():
                return self.value(node.body if self._or_none(node.test) else node.orelse)
            case ast.List():
                return [self.value(part) for part in node.elts]
            case ast.BoolOp():
                results = [self._or_none(part) for part in node.values]
                is_or = isinstance(node.op, ast.Or)
                return next((result for result in results if bool(result) is is_or), results[-1])
            case ast.UnaryOp(op=ast.Not()):
                return not self._or_none(node.operand)
            case ast.UnaryOp():
                return _OPERATORS[type(node.op)](self.value(node.operand))
            case ast.BinOp():
                return _OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))
            case ast.Compare(ops=[ast.In()]):  # of paths, also with variables of a shell in them
                return self.value(node.left) in str(self._values.get(ast.unparse(node.comparators[0])))
            case ast.Compare(ops=[one]):
                return _OPERATORS[type(one)](self._or_none(node.left), self._or_none(node.comparators[0]))
            case ast.Call(func=ast.Name(id="first")):
                results = (self._or_none(part) for part in node.args)
                return next((result for result in results if result is not None), None)
            case ast.Call(func=ast.Name(id=function)):
                return _FUNCTIONS[function](*(self.value(part) for part in node.args))
        raise SyntaxError(f"{ast.unparse(node)} is not an expression of keys")

    def _or_none(self, node: ast.expr) -> Any:
        try:
            return self.value(node)
        except UnknownValue:
            return None

    def _key(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None or value == "" or (isinstance(value, str) and "$" in value):
            raise UnknownValue(name)
        return value


FOLDER = files("embodyrl_migrate")
PROGRAM = "(program)"
"""Name of the program of a shell script in conditions, in place of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One source system, with files in systems/<folder>/."""

    folder: str
    keys: Mapping[str, Any]
    """name, version, layouts, kinds; terms: expressions that several keys share; keys, "not needed", "unsupported"
    and "without effect": unsupported, but the result stays the same."""
    identity: list[Mapping[str, Any]]
    """Questions whose answers select components of embodyrl, or report that embodyrl has none."""
    defaults: Mapping[str, Any]
    """Default values of the system's version, by key."""
    facts: Mapping[str, Any]
    """Expressions of the system's keys for settings that affect results."""
    sources: Mapping[str, str]
    """File and function of the source system in which each fact was read."""

    @property
    def name(self) -> str:
        """Name in the spelling of the system's authors."""
        return self.keys["name"]


@cache
def read(*parts: str) -> Any:
    """Read a table of the package."""
    text = FOLDER.joinpath(*parts).read_text(encoding="utf-8")
    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where there is libyaml
    return safe(text).get_single_data()


def systems() -> list[str]:
    """Return the names of the known systems."""
    return sorted(entry.name for entry in FOLDER.joinpath("systems").iterdir() if entry.joinpath("keys.yaml").is_file())


def load_system(folder: str) -> System:
    """Read a system.

    Raises:
        MigrationError: the system is unknown.
    """
    if folder not in systems():
        raise MigrationError(f"--from {folder}: unknown system. Use one of {', '.join(systems())}.")
    parts = {name: read("systems", folder, f"{name}.yaml") for name in ("keys", "identity", "defaults", "facts")}
    facts = {name: rule for name, rule in parts.pop("facts").items() if name != "(sources)"}
    facts_by_source = read("systems", folder, "facts.yaml")["(sources)"]
    sources = {fact: location for location, names in facts_by_source.items() for fact in names}
    return System(folder=folder, facts=facts, sources=sources, **parts)


def detect(values: Mapping[str, Any]) -> str:
    """Find the system whose table contains most of the keys.

    Raises:
        MigrationError: no table contains a third of the keys.
    """
    known_keys = {}
    for system in systems():
        table = read("systems", system, "keys.yaml")
        has_signs = "signs" not in table or any(key in values for key in table["signs"])
        known_keys[system] = sum(find(table, key)[0] != "unknown" for key in values) if has_signs else 0
    best = max(known_keys, key=lambda system: known_keys[system])
    if known_keys[best] * 3 < len(values) or not values:
        raise MigrationError(f"not a config of {', '.join(systems())}: too few of its keys are known. Set --from.")
    return best


def find(table: Mapping[str, Any], key: str) -> tuple[str, Any]:
    """Return the state of a key and its entry in the table."""
    if key in table["keys"]:
        return "mapped", table["keys"][key]
    # In this order: a harmless key may well fit the broad pattern of an unsupported section.
    for state in ("not needed", "unsupported", "without effect"):
        for reason, patterns in table.get(state, {}).items():
            if fits(key, patterns):
                return state, reason
    return "unknown", f"the reference of {table['name']} has no such key"


def fits(key: str, patterns: Iterable[str]) -> bool:
    """Return whether a key matches one of the patterns (*, ?, {a,b})."""
    return any(_compile(pattern)(key) for pattern in patterns)


@cache
def _compile(pattern: str) -> Any:
    alternatives = _expand_braces(pattern)
    return lambda key: any(fnmatchcase(key, part) for part in alternatives)


def _expand_braces(pattern: str) -> list[str]:
    """Expand each {a,b} in a pattern."""
    match = re.match(r"(.*?)\{(.*?)\}(.*)", pattern)
    if match is None:
        return [pattern]
    return [f"{match[1]}{part}{suffix}" for part in match[2].split(",") for suffix in _expand_braces(match[3])]


def conditions_are_met(when: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether all conditions hold: patterns of a key's value, in lower case.

    Null is `none` and a missing key `absent`; patterns with * or ? match neither. A key with `*` holds if one of the
    matching keys has such a value.
    """
    return all(_condition_is_met(key, wanted, values) for key, wanted in when.items())


def _condition_is_met(key: str, expected: Any, values: Mapping[str, Any]) -> bool:
    patterns = [
        str(expected_value).lower() for expected_value in (expected if isinstance(expected, list) else [expected])
    ]
    names = [name for name in values if fnmatchcase(name, key)] if "*" in key else [key]
    texts = [_format_setting(values, name) for name in names] or ["absent"]
    unset = ("absent", "none")
    return any(
        value in patterns if value in unset else any(fnmatchcase(value, pattern) for pattern in patterns)
        for value in texts
    )


def _format_setting(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    value = values[name]
    return "none" if value is None or value == "" else format_value(value).lower()
