"""Proxies for objects of another process, used by a program of a language model and its tests in two processes."""

import collections
import functools
import importlib
import types
from typing import Any

BASES = {
    **{int: int.__pos__, float: float.__pos__, complex: complex.__pos__, str: str.__str__},
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
"""Functions that convert an object to its plain value, by immutable base class of the object."""
DATA = {kind.__name__: kind for kind in (list, dict, set, bytearray, collections.deque)}
KINDS = DATA | {kind.__name__: kind for kind in (types.GeneratorType, types.FunctionType, types.AsyncGeneratorType)}
"""Types that proxies report as their `__class__`, by name."""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
BINARY = {prefix + name for name in _ARITHMETIC.split() for prefix in ("", "r", "i")}
UNARY = ("neg", "pos", "invert")
COLLECTING = {prefix + name for name in ("add", "mul", "or", "and") for prefix in ("", "r", "i")}
"""Operators that join or repeat items; other operators can compare their operands, for example by a difference."""
NUMBERS = ("abs", "int", "float", "complex", "round", "trunc", "floor", "ceil", "index", "bool")
ITEMS = ("len", "getitem", "iter", "next", "reversed")
_OTHER_METHODS = (
    "call iter next len getitem setitem delitem contains reversed missing str repr format bytes fspath enter exit "
    "aiter anext aenter aexit instancecheck subclasscheck dir hash"
)
SPECIAL = (*_OTHER_METHODS.split(), *UNARY, *COMPARISONS, *sorted(BINARY), *NUMBERS)
"""Names, without underscores, of the special methods that are forwarded if the class of the object defines them."""
_READABLE = {
    f"__{name}__" for name in ("name", "qualname", "dict", "members", "mro", "bases", "annotations", "wrapped")
}


class RejectedOperation(BaseException):
    """Operation of a test that is rejected because the program could determine a value of the test."""


class Remote:
    """Proxy for an object in the other process; its subclasses have the special methods of the object's class."""

    __slots__ = ("_link", "_marks", "_number")
    _link: Any
    _number: int
    _marks: set[str]
    __doc__ = property(lambda self: self._link.request("attribute", self, "__doc__"))  # type: ignore[assignment]
    kind = ""

    def __getattr__(self, name):
        if name.startswith("__") and name not in _READABLE:
            raise AttributeError(name)
        return self._link.request("attribute", self, name)

    def __setattr__(self, name, value):
        self._link.request("set", self, name, value)

    def __delattr__(self, name):
        self._link.request("delete", self, name)

    def __copy__(self):
        return self._link.request("copy", self)

    def __deepcopy__(self, _):
        return self._link.request("deepcopy", self)

    @property
    def __class__(self):  # type: ignore[override]
        return KINDS.get(type(self).kind, type(self))


class _Awaitable(Remote):
    """Proxy for a coroutine, which runs to its end in the other process when the proxy is awaited."""

    __slots__ = ()

    def __await__(self):
        return self._link.request("await", self)
        yield

    def send(self, _):
        raise StopIteration(self._link.request("await", self))

    def throw(self, error, *_):
        raise error

    def close(self):
        pass


class CopiedValue:
    """Base of copies of immutable values, such as named tuples, whose class is defined in the other process."""

    kind: str
    _marks: set[str]

    __getattr__ = Remote.__getattr__


class RemoteException(BaseException):
    """Base of the local classes for exception classes of the other process."""

    _link: Any
    _number: int
    _text: str

    def __new__(cls, *args, **kwargs):
        return cls._link.request("special", cls, "call", *args, **kwargs)

    def __init__(self, *args, **kwargs):
        pass

    def __str__(self):
        return self._text

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._link.request("attribute", self, name)


def is_remote(value):
    """Return True for an object or exception class of the other process."""
    kind = type(value)  # `isinstance` would call the other process
    return issubclass(kind, (Remote, CopiedValue, RemoteException)) or (
        issubclass(kind, type) and issubclass(value, RemoteException)
    )


def get_number(value):
    """Return the reference id of an object or exception class of the other process."""
    return value._number


def get_marks(value):
    """Return the set of marks of an object of the other process (see `Link`); other values have no marks."""
    return value._marks if issubclass(type(value), (Remote, CopiedValue)) else set()


def _make_forwarder(name):
    """Return a special method that forwards to the other process."""

    def method(self, *args, **kwargs):
        return self._link.apply_special_method(self, name, args, kwargs)

    return method


@functools.cache
def build_proxy_class(special, kind, fields):
    """Return a proxy class for objects of the type `kind`.

    Args:
        special: names of special methods without underscores, separated by spaces.
        kind: name of the type.
        fields: names of dataclass fields, separated by spaces; empty for other types.
    """
    base = next((base for base in BASES if base.__name__ == kind), None)
    bases = (CopiedValue, base) if base else (_Awaitable if kind == "coroutine" else Remote,)
    methods = {f"__{name}__": _make_forwarder(name) for name in special.split() if name in SPECIAL}
    if "__eq__" in methods and base:
        methods["__hash__"] = base.__hash__
    if fields:
        dataclasses = importlib.import_module("dataclasses")
        methods["__dataclass_fields__"] = dataclasses.make_dataclass("Fields", fields.split()).__dataclass_fields__
    return type("Remote", bases, {"kind": kind} | methods | ({} if base else {"__slots__": ()}))
