"""Small arithmetic over a config's keys, so that what follows from several keys can be written down as data."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

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
    """Count the devices of ROLL's device_mapping, "list(range(0,16))" or a list; it is read, not run.

    >>> devices("list(range(0,4)) + list(range(8,16,2))"), devices("[4, 5]"), devices([0, 1, 2])
    (8, 2, 3)
    """
    if isinstance(value, list):
        return len(value)
    ranges = [tuple(map(int, found.split(","))) for found in re.findall(r"range\(([\d,\s]+)\)", str(value))]
    if any(len(bounds) > 3 or 0 in bounds[2:] for bounds in ranges):
        return None
    singles = re.findall(r"\[([\d,\s]+)\]", str(value))
    count = sum(len(range(*bounds)) for bounds in ranges)
    return count + sum(len(re.findall(r"\d+", one)) for one in singles) or None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "min": min,
    "max": max,
    "length": len,
    "last": lambda values: values[-1],
    "devices": devices,
}


class Unknown(Exception):
    """A key has no number here."""


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """Work out an expression of dotted keys; None where a key that it needs says nothing.

    `first(a, b)` is the first that says something; `a if b else c`, `and`, `or`, comparisons and arithmetic are
    Python's.

    >>> evaluate("ceil(data.size / first(batch, 4)) * 2", {"data.size": 10})
    6
    """
    try:
        return _Evaluator(values).value(ast.parse(text, mode="eval").body)
    except (Unknown, ZeroDivisionError, TypeError, OverflowError, ValueError):
        return None


def number(text: str) -> float | None:
    """Work out arithmetic without keys; None if it is none."""
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
                wanted = isinstance(node.op, ast.Or)
                return next((result for result in results if bool(result) is wanted), results[-1])
            case ast.UnaryOp(op=ast.Not()):
                return not self._or_none(node.operand)
            case ast.UnaryOp():
                return _OPERATORS[type(node.op)](self.value(node.operand))
            case ast.BinOp():
                return _OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))
            case ast.Compare(ops=[one]):
                return _OPERATORS[type(one)](self._or_none(node.left), self._or_none(node.comparators[0]))
            case ast.Call(func=ast.Name(id="first")):
                results = (self._or_none(part) for part in node.args)
                return next((result for result in results if result is not None), None)
            case ast.Call(func=ast.Name(id=function)):
                return _FUNCTIONS[function](*(self.value(part) for part in node.args))
        raise SyntaxError(f"{ast.unparse(node)} is no expression of keys")

    def _or_none(self, node: ast.expr) -> Any:
        try:
            return self.value(node)
        except Unknown:
            return None

    def _key(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None or value == "" or (isinstance(value, str) and "$" in value):
            raise Unknown(name)
        return value
