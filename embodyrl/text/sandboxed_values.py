"""Values that a program of a language model and its tests send to each other between two processes, as JSON.

Plain data is copied. Lists, dictionaries, sets and arrays have a reference id in both processes, and each message
contains the content of changed containers. All other objects stay in their process; the other process has a `Remote`
for each of them, which forwards operators, attributes and calls.
"""

import array
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import pathlib
import sys
import uuid
from collections.abc import Callable
from typing import Any

from embodyrl.text.sandboxed_objects import (
    BASES,
    KINDS,
    SPECIAL,
    RemoteException,
    build_proxy_class,
    get_number,
    is_remote,
)

_TEXTS: dict[str, tuple[type, Callable[[str], Any]]] = {
    **{kind.__name__: (kind, kind) for kind in (fractions.Fraction, decimal.Decimal, uuid.UUID)},
    **{kind.__name__: (kind, kind) for kind in (pathlib.PurePosixPath, pathlib.PosixPath)},
    **{kind.__name__: (kind, kind.fromisoformat) for kind in (datetime.datetime, datetime.date, datetime.time)},
}
"""Types that are encoded as text, with the function that parses the text."""
_PARTS = {
    "complex": (complex, ("real", "imag")),
    "range": (range, ("start", "stop", "step")),
    "slice": (slice, ("start", "stop", "step")),
    "timedelta": (datetime.timedelta, ("days", "seconds", "microseconds")),
}
_VIEWS = {type(getattr({}, method)()).__name__: method for method in ("keys", "values", "items")}
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}
_PAIRS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_SHARED: tuple[Any, ...] = (*_PAIRS, list, set, collections.deque, bytearray, array.array)
"""Mutable types whose content is kept equal in both processes, in addition to numpy's array."""


def _is_shared(kind):
    return kind in _SHARED or (kind.__name__ == "ndarray" and kind.__module__ == "numpy")


def _build_array(items, dtype, shape):
    numpy = importlib.import_module("numpy")
    result = numpy.empty(len(items), dtype)
    result[:] = items
    return result.reshape(shape)


class Values:
    """Objects of this process and of the other process, by reference id."""

    def __init__(self, *, strict):
        self.strict, self._next = strict, int(strict)
        self._objects, self._numbers = {}, {}
        self._shared, self._queue, self._last_sent, self._released = {}, [], {}, []

    def register(self, value, number=None):
        """Return the reference id of an object; a new object gets `number`, or an id unused by the other process."""
        known = self._numbers.get(id(value))
        if known is None:
            if number is None:
                number, self._next = self._next, self._next + 2
            known = self._numbers[id(value)] = number
            self._objects[number] = value  # keeps the object alive, so that Python does not reuse its id
        return known

    def _forget(self, number):
        self._shared.pop(number, None)
        self._last_sent.pop(number, None)
        self._numbers.pop(id(self._objects.pop(number, None)), None)

    def collect_updates(self):
        """Return the content of new and changed containers, and the reference ids that are no longer used."""
        updates, removed, self._queue = {}, [], [*self._shared]
        for number in self._queue:  # `pack` extends the queue
            content = self._describe_container(self._objects[number])
            encoded = json.dumps(content)  # JSON distinguishes 1, 1.0 and true
            if self._last_sent.get(number) != encoded:
                self._last_sent[number], updates[number] = encoded, content
            elif sys.getrefcount(self._objects[number]) <= 2:
                self._forget(number)
                removed.append(number)
        return updates, removed

    def apply_updates(self, updates, removed):
        """Apply the updates of the other process."""
        for number in removed:
            self._forget(number)
        contents = {int(number): content for number, content in updates.items()}
        for number, content in contents.items():
            if number not in self._objects:
                self._shared[number] = None
                self.register(self._create_empty(*content), number)
        for number, content in contents.items():
            self._fill(self._objects[number], content)
        for number in contents:
            self._last_sent[number] = json.dumps(self._describe_container(self._objects[number]))

    def _describe_container(self, value):
        """Return type, items and further arguments of a container."""
        kind = type(value)
        name = kind.__name__
        if kind in _PAIRS:
            return [name, self._pack_pairs(value), self.pack(getattr(value, "default_factory", None))]
        if name == "ndarray":
            return [name, self._pack_all(value.ravel().tolist()), str(value.dtype), list(value.shape)]
        attribute = {collections.deque: "maxlen", array.array: "typecode"}.get(kind, "")
        return [name, self._pack_all(value), getattr(value, attribute, None)]

    def _pack_all(self, items):
        return [self.pack(item) for item in items]

    def _unpack_all(self, items) -> list[Any]:
        return [self.unpack(item) for item in items]

    def _pack_pairs(self, value):
        return [[self.pack(key), self.pack(item)] for key, item in value.items()]

    def _unpack_pairs(self, pairs):
        return {self.unpack(key): self.unpack(item) for key, item in pairs}

    def _create_empty(self, name, _, *more):
        """Return a container without content."""
        if name == "ndarray":
            return importlib.import_module("numpy").empty(more[1], more[0])
        kind = next(kind for kind in _SHARED if kind.__name__ == name)
        if kind is collections.defaultdict:
            return kind(self.unpack(more[0]))
        return kind(more[0]) if kind is array.array else kind([], more[0]) if kind is collections.deque else kind()

    def _fill(self, container, content):
        """Replace the content of a container in place."""
        name, items, *more = content
        kind: Any = type(container)
        if kind.__name__ != name or not _is_shared(kind):
            raise TypeError(f"A {kind.__name__} cannot become a {name}.")
        items: Any = self._unpack_pairs(items) if kind in _PAIRS else self._unpack_all(items)
        if name == "ndarray":
            container[...] = _build_array(items, *more)
        elif kind in (list, bytearray, array.array):
            container[:] = array.array(more[0], items) if kind is array.array else items
        else:
            container.clear()
            if kind is collections.deque:
                container.extend(items)
            else:
                kind.update(container, items)  # an empty Counter does not add counts

    def pack(self, value):
        """Encode a value as JSON: plain data by value, containers and other objects as numeric reference ids."""
        kind = type(value)
        name = kind.__name__
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 1 << 64):
            return value
        if is_remote(value):
            return ["there", get_number(value)]
        if _is_shared(kind):
            if (number := self.register(value)) not in self._shared:
                self._shared[number] = None
                self._queue.append(number)
            return ["ref", number]
        if name in _TEXTS and kind is _TEXTS[name][0]:
            return [name, str(value)]
        if name in _PARTS and kind is _PARTS[name][0]:
            return [name, *(self.pack(getattr(value, part)) for part in _PARTS[name][1])]
        if name in _VIEWS and kind.__module__ == "builtins":
            return [name, self._pack_pairs(dict(value.mapping))]
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return ["numpy", [self.pack(value.tolist())], str(value.dtype), []]
        if value is ... or value is NotImplemented:
            return ["constant", str(value)]
        if issubclass(kind, BaseException):
            description = self._pack_class(kind), str(value)[:1000], self._pack_all(value.args)
            return ["error", self.register(value.with_traceback(None)), *description]
        if issubclass(kind, type) and (issubclass(value, BaseException) or _is_builtin(value)):
            return self._pack_class(value)
        for base, plain in BASES.items():
            if issubclass(kind, base):
                packed = self._pack_plain(base, plain(value))
                return packed if kind is base else ["own", *self._describe(value, kind, base), packed]
        return ["here", *self._describe(value, kind, object)]

    def _pack_plain(self, base, value):
        if base in (tuple, frozenset):
            return [base.__name__, self._pack_all(value)]
        if base is bytes:
            return ["bytes", value.hex()]
        if base is int and abs(value) >= 1 << 64:
            return ["int", hex(value)]  # Python limits the decimal digits of an integer
        return self.pack(value)

    def _describe(self, value, kind, base):
        """Return the reference id of an object, its special methods, type and fields."""
        methods = [
            method
            for method in SPECIAL
            if getattr(kind, f"__{method}__", None) is not getattr(base, f"__{method}__", None)
        ]
        if base is not object or kind.__hash__ is None:
            methods = [method for method in methods if method != "hash"]
        elif "eq" in methods:
            methods.append("hash")
        names = [name for name, base_kind in KINDS.items() if issubclass(kind, base_kind)]
        name = base.__name__ if base is not object else "coroutine" if hasattr(kind, "__await__") else [*names, ""][0]
        return self.register(value), " ".join(methods), name, " ".join(getattr(kind, "__dataclass_fields__", ()))

    def _pack_class(self, kind):
        if issubclass(kind, RemoteException):
            return ["there", get_number(kind)]
        if _is_builtin(kind):
            return ["builtin", kind.__name__]
        bases = [self._pack_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return ["exception", self.register(kind), kind.__name__, bases, kind.__module__]

    def unpack(self, packed) -> Any:
        """Return the value that the other process packed with `pack`."""
        if not isinstance(packed, list):
            return packed
        name, *parts = packed
        is_new = name in ("here", "own", "error", "exception") and parts[0] not in self._objects
        if name in ("there", "ref", "here", "own", "error", "exception") and not is_new:
            return self.get_known(parts[0])
        if name in ("here", "own"):
            kind = build_proxy_class(*parts[1:4])
            instance = kind(self.unpack(parts[4])) if name == "own" else object.__new__(kind)
            object.__setattr__(instance, "_link", self)
            object.__setattr__(instance, "_number", parts[0])
            object.__setattr__(instance, "_marks", set())
            return self._objects[self.register(instance, parts[0])]
        if name == "error":
            return self._build_error(*parts)
        if name == "builtin":
            return self.check_class(_get_builtin_type(*parts))
        if name == "exception":
            return self.check_class(self._unpack_exception_class(packed))
        if name in ("tuple", "frozenset"):
            return (tuple if name == "tuple" else frozenset)(self._unpack_all(parts[0]))
        if name in _VIEWS:
            return getattr(self._unpack_pairs(parts[0]), _VIEWS[name])()
        if name in _TEXTS:
            return _TEXTS[name][1](parts[0])
        if name == "numpy":
            return _build_array(self._unpack_all(parts[0]), *parts[1:])[()]
        if name in ("int", "bytes"):
            return int(parts[0], 16) if name == "int" else bytes.fromhex(parts[0])
        return _CONSTANTS[parts[0]] if name == "constant" else _PARTS[name][0](*self._unpack_all(parts))

    def get_known(self, number):
        """Return the object with a reference id."""
        return self._objects[number]

    def check_class(self, kind):
        """Return the class that a name of the other process refers to."""
        return kind

    def _unpack_exception_class(self, packed):
        """Return the local class for an exception class.

        Raises:
            TypeError: the class is not an exception class, whose methods could decide about values of this process.
        """
        name, *parts = packed
        if name == "builtin" or name == "there" or parts[0] in self._objects:
            kind = _get_builtin_type(*parts) if name == "builtin" else self._objects[parts[0]]
            if not issubclass(type(kind), type) or not issubclass(kind, BaseException):
                raise TypeError(f"A {type(kind).__name__} is not an exception class.")
            return kind
        number, title, bases, module = parts
        if module.partition(".")[0] in sys.stdlib_module_names:
            local = getattr(sys.modules.get(module), title, None)
            if isinstance(local, type) and issubclass(local, BaseException):
                return self._objects[self.register(local, number)]
        bases = tuple(self._unpack_exception_class(base) for base in bases)
        bases = bases if any(issubclass(base, RemoteException) for base in bases) else (RemoteException, *bases)
        created = type(str(title), bases, {"_link": self, "_number": number})
        return self._objects[self.register(created, number)]

    def _build_error(self, number, kind, text, args):
        """Build an exception of the other process."""
        kind, args = self._unpack_exception_class(kind), self._unpack_all(args)
        if issubclass(kind, RemoteException):
            builtin_base: Any = next(base for base in kind.__mro__ if not issubclass(base, RemoteException))
            error = builtin_base.__new__(kind)
            vars(error).update(_number=number, _text=text)
            error.args = args
        else:
            try:
                error = kind(*args)
            except TypeError:
                error = kind.__new__(kind, *args)
        return self._objects[self.register(error, number)]


def _get_builtin_type(name):
    kind = getattr(builtins, name)
    if not isinstance(kind, type):
        raise TypeError(f"{kind!r} is not a type.")
    return kind


def _is_builtin(kind):
    return getattr(builtins, kind.__name__, None) is kind
