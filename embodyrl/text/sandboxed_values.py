"""Values that a program of a language model and its tests, in two processes, send to each other as JSON.

Plain data is copied. Lists, dictionaries, sets and arrays have a number in both processes, and each message contains
the content of those that changed. All other objects stay in their process: the other process has a `Remote`, which
forwards operators, attributes and calls.
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
from typing import Any

from embodyrl.text.sandboxed_objects import BASES, KINDS, SPECIAL, Foreign, is_theirs, number_of, proxy_class

_TEXTS = {
    kind.__name__: kind
    for kind in (fractions.Fraction, decimal.Decimal, pathlib.PurePosixPath, pathlib.PosixPath, uuid.UUID)
}
_DATES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}
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
"""Mutable types whose content is kept equal in both processes; numpy's array is another."""


def _is_shared(kind):
    return kind in _SHARED or (kind.__name__ == "ndarray" and kind.__module__ == "numpy")


def _array(items, dtype, shape):
    numpy = importlib.import_module("numpy")
    made = numpy.empty(len(items), dtype)
    made[:] = items
    return made.reshape(shape)


class Values:
    """Objects of this process and of the other process, by number."""

    def __init__(self, *, strict):
        self.strict, self._next = strict, int(strict)
        self._kept, self._numbers = {}, {}
        self._shared, self._queue, self._last, self._gone = {}, [], {}, []

    def keep(self, value, number=None):
        """Return the number of an object; a new object gets `number`, or a number that the other process never uses."""
        found = self._numbers.get(id(value))
        if found is None:
            if number is None:
                number, self._next = self._next, self._next + 2
            found = self._numbers[id(value)] = number
            self._kept[number] = value  # which keeps its id from being used again
        return found

    def _forget(self, number):
        self._shared.pop(number, None)
        self._last.pop(number, None)
        self._numbers.pop(id(self._kept.pop(number, None)), None)

    def news(self):
        """Return the content of new and changed containers, and the numbers that are no longer used."""
        news, gone, self._queue = {}, [], [*self._shared]
        for number in self._queue:  # which `pack` extends
            content = self._content(self._kept[number])
            text = json.dumps(content)  # in which 1, 1.0 and true differ
            if self._last.get(number) != text:
                self._last[number], news[number] = text, content
            elif sys.getrefcount(self._kept[number]) <= 2:
                self._forget(number)
                gone.append(number)
        return news, gone

    def take(self, news, gone):
        """Apply the news of the other process."""
        for number in gone:
            self._forget(number)
        new = {int(number): content for number, content in news.items()}
        for number, content in new.items():
            if number not in self._kept:
                self._shared[number] = None
                self.keep(self._empty(*content), number)
        for number, content in new.items():
            self._fill(self._kept[number], content)
        for number in new:
            self._last[number] = json.dumps(self._content(self._kept[number]))

    def _content(self, value):
        """Return type, items and further arguments of a container."""
        kind = type(value)
        name = kind.__name__
        if kind in _PAIRS:
            return [name, self._pairs(value), self.pack(getattr(value, "default_factory", None))]
        if name == "ndarray":
            return [name, self._packed(value.ravel().tolist()), str(value.dtype), list(value.shape)]
        more = {collections.deque: "maxlen", array.array: "typecode"}.get(kind, "")
        return [name, self._packed(value), getattr(value, more, None)]

    def _packed(self, items):
        return [self.pack(item) for item in items]

    def _unpacked(self, items) -> list[Any]:
        return [self.unpack(item) for item in items]

    def _pairs(self, value):
        return [[self.pack(k), self.pack(v)] for k, v in value.items()]

    def _unpaired(self, pairs):
        return {self.unpack(k): self.unpack(v) for k, v in pairs}

    def _empty(self, name, _, *more):
        """Return a container without content."""
        if name == "ndarray":
            return importlib.import_module("numpy").empty(more[1], more[0])
        kind = next(kind for kind in _SHARED if kind.__name__ == name)
        if kind is collections.defaultdict:
            return kind(self.unpack(more[0]))
        return kind(more[0]) if kind is array.array else kind([], more[0]) if kind is collections.deque else kind()

    def _fill(self, own, content):
        """Replace the content of a container in place."""
        name, items, *more = content
        kind: Any = type(own)
        if kind.__name__ != name or not _is_shared(kind):
            raise TypeError(f"A {kind.__name__} cannot become a {name}.")
        items: Any = self._unpaired(items) if kind in _PAIRS else self._unpacked(items)
        if name == "ndarray":
            own[...] = _array(items, *more)
        elif kind in (list, bytearray, array.array):
            own[:] = array.array(more[0], items) if kind is array.array else items
        else:
            own.clear()
            update = (
                kind.extend
                if kind is collections.deque
                else dict.update
                if kind is collections.Counter
                else kind.update
            )
            update(own, items)

    def pack(self, value):
        """Return a value as JSON data: plain data by value, containers and other objects by number."""
        kind = type(value)
        name = kind.__name__
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 1 << 64):
            return value
        if is_theirs(value):
            return ["there", number_of(value)]
        if _is_shared(kind):
            if (number := self.keep(value)) not in self._shared:
                self._shared[number] = None
                self._queue.append(number)
            return ["ref", number]
        if kind in (_TEXTS.get(name), _DATES.get(name)):
            return [name, value.isoformat() if name in _DATES else str(value)]
        if name in _PARTS and kind is _PARTS[name][0]:
            return [name, *(self.pack(getattr(value, part)) for part in _PARTS[name][1])]
        if name in _VIEWS and kind.__module__ == "builtins":
            return [name, self._pairs(dict(value.mapping))]
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return ["numpy", [self.pack(value.tolist())], str(value.dtype), []]
        if value is ... or value is NotImplemented:
            return ["constant", str(value)]
        if issubclass(kind, BaseException):
            about = self._pack_class(kind), str(value)[:1000], self._packed(value.args)
            return ["error", self.keep(value.with_traceback(None)), *about]
        if issubclass(kind, type) and (issubclass(value, BaseException) or _is_builtin(value)):
            return self._pack_class(value)
        for base, plain in BASES.items():
            if issubclass(kind, base):
                packed = self._pack_plain(base, plain(value))
                return packed if kind is base else ["own", *self._describe(value, kind, base), packed]
        return ["here", *self._describe(value, kind, object)]

    def _pack_plain(self, base, value):
        if base in (tuple, frozenset):
            return [base.__name__, self._packed(value)]
        if base is bytes:
            return ["bytes", value.hex()]
        if base is int and abs(value) >= 1 << 64:
            return ["int", hex(value)]  # Python limits the decimal digits of an integer
        return self.pack(value)

    def _describe(self, value, kind, base):
        """Return the number of an object, its special methods, type and fields."""
        found = [one for one in SPECIAL if getattr(kind, f"__{one}__", None) is not getattr(base, f"__{one}__", None)]
        if base is not object or kind.__hash__ is None:
            found = [one for one in found if one != "hash"]
        elif "eq" in found:
            found.append("hash")
        names = [name for name, known in KINDS.items() if issubclass(kind, known)]
        name = base.__name__ if base is not object else "coroutine" if hasattr(kind, "__await__") else [*names, ""][0]
        return self.keep(value), " ".join(found), name, " ".join(getattr(kind, "__dataclass_fields__", ()))

    def _pack_class(self, kind):
        if issubclass(kind, Foreign):
            return ["there", number_of(kind)]
        if _is_builtin(kind):
            return ["builtin", kind.__name__]
        bases = [self._pack_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return ["exception", self.keep(kind), kind.__name__, bases, kind.__module__]

    def unpack(self, packed) -> Any:
        """Return the value that the other process packed with `pack`."""
        if not isinstance(packed, list):
            return packed
        name, *parts = packed
        if name in ("there", "ref"):
            return self._kept[parts[0]]
        if name in ("here", "own", "error", "exception") and parts[0] in self._kept:
            return self._kept[parts[0]]
        if name in ("here", "own"):
            kind = proxy_class(*parts[1:4])
            made = kind(self.unpack(parts[4])) if name == "own" else object.__new__(kind)
            object.__setattr__(made, "_link", self)
            object.__setattr__(made, "_number", parts[0])
            return self._kept[self.keep(made, parts[0])]
        if name == "error":
            return self._error(*parts)
        if name in ("exception", "builtin"):
            return self.checked(self._unpack_class(packed))
        if name in ("tuple", "frozenset"):
            return (tuple if name == "tuple" else frozenset)(self._unpacked(parts[0]))
        if name in _VIEWS:
            return getattr(self._unpaired(parts[0]), _VIEWS[name])()
        if name in _TEXTS:
            return _TEXTS[name](parts[0])
        if name in _DATES:
            return _DATES[name].fromisoformat(parts[0])
        if name == "numpy":
            return _array(self._unpacked(parts[0]), *parts[1:])[()]
        if name in ("int", "bytes"):
            return int(parts[0], 16) if name == "int" else bytes.fromhex(parts[0])
        return _CONSTANTS[parts[0]] if name == "constant" else _PARTS[name][0](*self._unpacked(parts))

    def checked(self, kind):
        """Return a class that a name of the other process means."""
        return kind

    def _unpack_class(self, packed):
        """Return the local class for an exception class or a built-in type."""
        name, *parts = packed
        if name == "builtin":
            found = getattr(builtins, parts[0])
            if not isinstance(found, type):
                raise TypeError(f"{found!r} is not a type.")
            return found
        if name == "there" or parts[0] in self._kept:
            return self._kept[parts[0]]
        number, title, bases, module = parts
        if module.partition(".")[0] in sys.stdlib_module_names:
            found = getattr(sys.modules.get(module), title, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                return self._kept[self.keep(found, number)]
        bases = tuple(self._unpack_class(base) for base in bases)
        bases = bases if any(issubclass(base, Foreign) for base in bases) else (Foreign, *bases)
        made = type(str(title), bases, {"_link": self, "_number": number})
        return self._kept[self.keep(made, number)]

    def _error(self, number, kind, text, args):
        """Build an exception of the other process."""
        kind, args = self._unpack_class(kind), self._unpacked(args)
        if issubclass(kind, Foreign):
            plain: Any = next(base for base in kind.__mro__ if not issubclass(base, Foreign))
            made = plain.__new__(kind)
            vars(made).update(_number=number, _text=text)
            made.args = args
        else:
            try:
                made = kind(*args)
            except TypeError:
                made = kind.__new__(kind, *args)
        return self._kept[self.keep(made, number)]


def _is_builtin(kind):
    return getattr(builtins, kind.__name__, None) is kind
