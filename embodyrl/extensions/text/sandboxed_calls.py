"""Remote calls between a program written by a language model and the program's tests, in two processes.

`sandboxed.py` runs this source in both processes. Names, arguments and results are sent over a pipe as JSON of plain
data, so comparisons do not depend on the state of the program's process. Objects of the program
stay in the program's process: a test refers to an object by a number, and can call the object, read its attributes
and iterate over it. Two such objects are equal only if they are identical.
"""

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import itertools
import json
import os
import sys
from types import ModuleType
from typing import Any

LONGEST = 16 << 20
"""Maximum size of a message in bytes."""
MOST_ITEMS = 1_000_000
_BY_TEXT = {
    "Fraction": fractions.Fraction,
    "Decimal": decimal.Decimal,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
}
_BY_ITEMS = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "defaultdict": lambda items: collections.defaultdict(None, items),
}
_PLAIN: tuple[Any, ...] = (bool, int, float, str)
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
_SHOWN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Link:
    """Connection to the other process; stores the objects to which messages refer by number."""

    def __init__(self, incoming, outgoing):
        self._in, self._out = os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")
        self._kept, self._numbers = [], {}
        self.deeds: dict[str, Any] = {"call": lambda function, *args, **named: function(*args, **named)}

    def send(self, message):
        """Write one message as a line of JSON."""
        self._out.write(json.dumps(message).encode("ascii") + b"\n")
        self._out.flush()

    def read(self):
        """Read the next message; raise EOFError if the other end is closed or the line is too long."""
        line = self._in.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError("The other process exited, or sent a message that is too long.")
        return json.loads(line)

    def _keep(self, value):
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)  # which keeps its id from being used again
        return number

    def pack(self, value):
        """Return a value as JSON data: plain data by value, other objects by number."""
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, Remote):
            return ["there", value._number]
        for kind in _PLAIN:
            if isinstance(value, kind):
                return kind.__str__(value) if kind is str else kind.__add__(value, kind())
        if isinstance(value, bytes | bytearray):
            return ["bytearray" if isinstance(value, bytearray) else "bytes", value.hex()]
        if isinstance(value, complex | range | datetime.timedelta):
            parts = {complex: ("real", "imag"), range: ("start", "stop", "step")}
            names = parts.get(type(value), ("days", "seconds", "microseconds"))
            return [type(value).__name__, *(getattr(value, name) for name in names)]
        for kind in (fractions.Fraction, decimal.Decimal):
            if isinstance(value, kind):
                return [kind.__name__, str(value)]
        for kind in (datetime.datetime, datetime.date, datetime.time):
            if isinstance(value, kind):
                return [kind.__name__, value.isoformat()]
        for name, kind in (("Counter", collections.Counter), ("OrderedDict", collections.OrderedDict), ("dict", dict)):
            if isinstance(value, kind):
                return [name, [[self.pack(k), self.pack(v)] for k, v in dict.items(value)]]
        for kind in _SEQUENCES:
            if isinstance(value, kind):
                return [kind.__name__, [self.pack(item) for item in kind.__iter__(value)]]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return ["numpy", str(value.dtype), self.pack(value.tolist())]
        return ["here", self._keep(value)]

    def unpack(self, packed):
        """Return the value that the other process packed with `pack`."""
        if not isinstance(packed, list):
            return packed
        name, *parts = packed
        if name in ("here", "there"):
            return Remote(self, parts[0]) if name == "here" else self._kept[parts[0]]
        if name in _BY_ITEMS:
            items = [self.unpack(item) for item in parts[0]] if name not in _PAIRS else self._pairs(parts[0])
            return _BY_ITEMS[name](items)
        if name in _BY_TEXT:
            return _BY_TEXT[name](parts[0])
        if name in ("bytes", "bytearray"):
            return (bytes if name == "bytes" else bytearray).fromhex(parts[0])
        if name == "numpy":
            return importlib.import_module("numpy").array(self.unpack(parts[1]), parts[0])[()]
        return {"complex": complex, "range": range, "timedelta": datetime.timedelta}[name](*parts)

    def _pairs(self, pairs):
        return {self.unpack(key): self.unpack(value) for key, value in pairs}

    def ask(self, what, *parts, in_place=False, **named):
        """Send a request to the other process, execute its calls until it replies, and return the reply.

        `in_place`: changes that the function makes to list, dict and set arguments are copied back.
        """
        values = [self.pack(part) for part in parts]
        self.send({"do": what, "with": values, "named": {name: self.pack(value) for name, value in named.items()}})
        while "do" in (reply := self.read()):
            self.answer(reply)
        for part, changed in zip(parts[1:], reply.get("changed", ()), strict=False):
            if changed is not None and in_place:
                _take_over(part, self.unpack(changed))
        if "raised" in reply:
            name, *about = reply["raised"]
            # As in a generator (PEP 479): StopIteration from a call would end a loop of the test early.
            raise self.exception("RuntimeError" if name == "StopIteration" and what != "next" else name, *about)
        return self.unpack(reply["value"])

    def answer(self, asked):
        """Execute a request of the other process and send the result."""
        try:
            parts = [self.unpack(part) for part in asked["with"]]
            before = asked["with"][1:]
            value = self.deeds[asked["do"]](*parts, **{n: self.unpack(v) for n, v in asked["named"].items()})
            reply = {"value": self.pack(value)}
            if asked["do"] == "call":  # arguments may be changed in place
                pairs = zip((self.pack(part) for part in parts[1:]), before, strict=True)
                reply["changed"] = [now if isinstance(now, list) and now != was else None for now, was in pairs]
            self.send(reply)
        except Exception as error:
            self.send({"raised": [type(error).__name__, str(error)[:1000], _shown(type(error))]})

    def exception(self, name, text, shown):
        """Rebuild an exception of the other process: a built-in exception, or the program's own class by name."""
        found = getattr(builtins, name, None)
        return (found if isinstance(found, type) and issubclass(found, Exception) else Foreign.of(name, shown))(text)


_DEEDS = {
    "attribute": getattr,
    "set": setattr,
    "items": lambda value: list(itertools.islice(value, MOST_ITEMS)),
    "next": next,
    "length": len,
    "item": lambda value, key: value[key],
    "text": lambda value, form: str(value) if form == "s" else repr(value),
    "truth": bool,
}
"""Operations that a test can apply to objects of the program, in addition to calls."""
_PAIRS = ("dict", "OrderedDict", "Counter", "defaultdict")


def _shown(kind):
    return next((base.__name__ for base in kind.__mro__ if base in _SHOWN), "Exception")


def _take_over(own, changed):
    """Replace the content of a list, bytearray, dict or set `own` with `changed`, received from the other process."""
    if type(own) is type(changed) and isinstance(own, list | bytearray):
        own[:] = changed
    elif type(own) is type(changed) and isinstance(own, dict | set):
        own.clear()
        own.update(changed)


class Foreign:
    """Cache, by name, of the local classes that represent the program's own exceptions."""

    known = {}

    @classmethod
    def of(cls, name, shown):
        """Return the local exception class with this name, derived from the built-in exception `shown`."""
        base = next((base for base in _SHOWN if base.__name__ == shown), Exception)
        return cls.known.setdefault(name, type(str(name), (base,), {}))


class Remote:
    """Proxy for an object in the other process."""

    def __init__(self, link, number):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **named):
        return self._link.ask("call", self, *args, **named)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __setattr__(self, name, value):
        self._link.ask("set", self, name, value)

    def __iter__(self):
        return iter(self._link.ask("items", self))

    def __next__(self):
        return self._link.ask("next", self)

    def __len__(self):
        return self._link.ask("length", self)

    def __getitem__(self, key):
        return self._link.ask("item", self, key)

    def __contains__(self, item):
        return any(found == item for found in self)

    def __bool__(self):
        return self._link.ask("truth", self) is True

    def __str__(self):
        return self._link.ask("text", self, "s")

    def __repr__(self):
        return self._link.ask("text", self, "r")

    def __eq__(self, other):
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self):
        return hash(self._number)


def serve_program(program, incoming, outgoing):
    """Load a program, then handle the requests of a test until the test process exits."""
    link = Link(incoming, outgoing)
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
    except BaseException as error:
        link.send({"failed": f"{type(error).__name__}: {error}"[:500]})
        raise
    kinds = {}
    for name, value in module.__dict__.items():
        kind = "module" if isinstance(value, ModuleType) else "name"
        if isinstance(value, type) and issubclass(value, Exception):
            kind = "exception"
        kinds[name] = [kind, value.__name__ if kind == "module" else _shown(value) if kind == "exception" else ""]
    link.send({"names": kinds})
    link.deeds |= _DEEDS | {"name": lambda name: module.__dict__[name]}
    while True:
        link.answer(link.read())


class Names(dict):
    """Globals of a test: a name that the test does not define is looked up in the program.

    Built-ins, and the modules and functions of `_trusted_names`, are never those of the program.
    """

    def __init__(self, link, kinds, tree):
        super().__init__(__name__="__test__", __builtins__=builtins, _in_place=_in_place)
        results = _results(tree)
        self._link, self._kinds, self._trusted = link, kinds, _trusted_names(tree, results, kinds)
        _mark_tested_calls(tree, results)

    def __missing__(self, name):
        tested, name = name.startswith(_TESTED), name.removeprefix(_TESTED)
        if tested and (name in self or name not in self._kinds):
            return self[name] if name in self or not hasattr(builtins, name) else getattr(builtins, name)
        kind, about = self._kinds.get(name, ("", ""))
        if not kind or name.startswith("__") or (hasattr(builtins, name) and not tested):
            raise KeyError(name)
        if name in self._trusted:
            return self._trusted[name]
        if kind == "module" and about.partition(".")[0] in (*sys.stdlib_module_names, "numpy"):
            return importlib.import_module(about)  # the program may have changed its own copy
        return Foreign.of(name, about) if kind == "exception" else self._link.ask("name", name)


def _in_place(function, *args, **named):
    """Call a function and copy changed arguments back, because a test may check the arguments."""
    if isinstance(function, Remote):
        return function._link.ask("call", function, *args, in_place=True, **named)
    return function(*args, **named)


class _Statements(ast.NodeTransformer):
    """AST transformer that replaces call statements with calls of `_in_place`."""

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            own = ast.Name("_in_place", ast.Load())
            node.value = ast.Call(own, [node.value.func, *node.value.args], node.value.keywords)
        return node


_TESTED = "tested "
"""Prefix of names in the syntax tree of a test that are looked up in the program, even if a built-in has the name."""
_MODULES = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "numpy", "operator", "random", "re", "statistics", "string"),
)
_FUNCTIONS = {
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    **{"isclose": "math", "allclose": "numpy", "array_equal": "numpy", "Fraction": "fractions", "Decimal": "decimal"},
}
"""Module of each function that a test may apply to results, by function name.

Tests use the real functions: a program could redefine a function to accept any result."""


def _results(tree):
    """Return the names of the test variables that may contain results, directly or through other variables."""
    found, size = set(), -1
    while len(found) != size:
        size = len(found)
        for node in tree.body:
            if any(_is_result(part, found) for part in ast.walk(node)):
                found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found


def _is_result(node, results):
    return isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in results)


def _takes_results(call, results):
    return any(_is_result(n, results) for part in (*call.args, *call.keywords) for n in ast.walk(part))


def _mark_tested_calls(tree, results):
    """Mark calls of the tested function, as in `assert sum(1, 2) == 3`, because it can have the name of a built-in.

    In `assert sorted(f(x)) == [1]` or `assert len(y) == 2`, the built-in is applied to a result.
    """
    for node in tree.body:
        test = node.test if isinstance(node, ast.Assert) else None
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Call) and isinstance(test.ops[0], ast.Eq):
            function = test.left.func
            if isinstance(function, ast.Name) and not _takes_results(test.left, results):
                function.id = _TESTED + function.id


def _trusted_names(tree, results, kinds):
    """Return the original modules and functions that a test applies to results, by name."""
    found, attributes = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            attributes.setdefault(node.value.id, set()).add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _takes_results(node, results):
            name = node.func.id
            found |= {name: getattr(importlib.import_module(_FUNCTIONS[name]), name)} if name in _FUNCTIONS else {}
    for name, used in attributes.items():
        real = {"np": "numpy"}.get(name, name)
        # A variable of the program may have the name of a module.
        if real in _MODULES and all(hasattr(module := importlib.import_module(real), one) for one in used):
            found[name] = module
    return found


def run_test(test, incoming, outgoing):
    """Run a test against the program in the other process; raise an exception if the test fails."""
    sys.set_int_max_str_digits(0)
    link = Link(incoming, outgoing)
    began = link.read()
    if "failed" in began:
        raise RuntimeError(str(began["failed"]))
    tree = ast.parse(test, "<test>")
    names = Names(link, began["names"], tree)
    exec(compile(ast.fix_missing_locations(_Statements().visit(tree)), "<test>", "exec"), names)
