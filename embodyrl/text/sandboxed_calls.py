"""Calls between a program of a language model and its tests, in two processes.

In the test's process a `Link` is strict: operators of the program never compare its objects with values of the test.
"""

import copy
import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from embodyrl.text.sandboxed_objects import (
    BASES,
    BINARY,
    COMPARISONS,
    DATA,
    KINDS,
    NUMBERS,
    SPECIAL,
    CopiedValue,
    RejectedOperation,
    get_number,
    is_remote,
)
from embodyrl.text.sandboxed_values import Values

LONGEST = 16 << 20
"""Maximum size of a message in bytes."""
TEST = "__test__"
"""Name of the module of a test."""


class Link(Values):
    """Connection to the other process."""

    def __init__(self, incoming, outgoing, *, strict):
        super().__init__(strict=strict)
        self._in, self._out = os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")
        self.operations = {"special": _call_special_method, "data": _copy_data}
        self.makers, self._created, self._mixed = set(), set(), set()
        """Numbers of names with a capital letter, of objects that the test makes by them, and of results of operators
        with a value of the test."""
        self.rejections = []
        """Operations of the test that were refused, in words."""
        self.read_output: Callable[[], str] = str
        """Function that returns the output since the last message."""

    def close(self):
        """Close the connection, which ends the other process."""
        self._in.close()
        self._out.close()

    def send(self, message):
        """Write one message, with the content of changed containers."""
        message["news"] = self.collect_updates()
        self._out.write(json.dumps(message).encode("ascii") + b"\n")
        self._out.flush()

    def read(self):
        """Read the next message; raise EOFError if the other end is closed or the line is too long."""
        line = self._in.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError("The other process exited, or sent a message that is too long.")
        message = json.loads(line)
        self.apply_updates(*message["news"])
        return message

    def request(self, operation, *parts, **kwargs):
        """Send a request to the other process, execute its requests until it replies, and return the reply."""
        packed = {name: self.pack(value) for name, value in kwargs.items()}
        self.send({"do": operation, "with": [self.pack(part) for part in parts], "named": packed})
        while "do" in (reply := self.read()):
            self.handle(reply)
        if reply.get("printed") and sys.stdout is not sys.__stdout__:  # the test reads the output
            sys.stdout.write(reply["printed"])
        if "raised" not in reply:
            return self.unpack(reply["value"])
        error = self.unpack(reply["raised"])
        # As in a generator (PEP 479): StopIteration from a call would end a loop of the test early.
        follows = operation == "await" or (operation == "special" and parts[1] == "next")
        is_stop = isinstance(error, StopIteration | StopAsyncIteration) and not follows
        # unittest takes its own exceptions, such as SkipTest, for a result of the test.
        is_unittest = any(kind.__module__.partition(".")[0] == "unittest" for kind in type(error).__mro__)
        is_unusual = is_stop or is_unittest or not isinstance(error, Exception)
        raise RuntimeError(f"the program raised {type(error).__name__}: {error}") if is_unusual else error

    def handle(self, request):
        """Execute a request of the other process and send the result."""
        try:
            if self.strict and (request["with"][0][0] != "there" or request["do"] not in self.operations):
                raise TypeError("Only objects of the test can be used.")
            parts = [self.unpack(part) for part in request["with"]]
            value = self.operations[request["do"]](
                *parts, **{key: self.unpack(item) for key, item in request["named"].items()}
            )
            reply = {"value": self.pack(value)}
        except Exception as error:
            reply = {"raised": self.pack(error)}
        self.send(reply | {"printed": self.read_output()})

    def reject(self, reason):
        """Raise `RejectedOperation`, and store the reason."""
        self.rejections.append(reason)
        raise RejectedOperation(reason)

    def check_class(self, kind):
        """Return a built-in type or exception class that a name of the program means."""
        if self.strict and issubclass(kind, BaseException) and issubclass(AssertionError, kind):
            self.reject(f"uses a name of the program for {kind.__name__}, which would catch failures of the test")
        return kind

    def apply_special_method(self, target, name, args, kwargs):
        """Apply a special method, without underscores, of an object of the other process."""
        compares = name in COMPARISONS or name in BINARY or name == "contains"
        if not self.strict:
            return self.request("special", target, name, *args, **kwargs)
        if name in ("instancecheck", "subclasscheck") and not is_remote(args[0]):
            return False
        if compares and not all(map(is_remote, args)):
            return self._apply_mixed_operator(target, name, args)
        if name in NUMBERS and get_number(target) in self._mixed:
            self.reject(f"applies {name} to the result of the program's operator for a value of the test")
        if name in ("exit", "aexit"):
            return self._exit_context(target, name, args)
        result = self.request("special", target, name, *args, **kwargs)
        if name == "iter" and hasattr(type(target), "__len__") and get_number(target) not in self._created:
            items = [*result]
            if len(items) != len(target):
                self.reject("iterates over an object of the program whose length is another")
            return iter(items)
        numbers = {get_number(argument) for argument in (target, *args) if is_remote(argument)}
        if (name == "call" and get_number(target) in self.makers) or (name in BINARY and numbers & self._created):
            self._add_number(result, self._created)
        if name in BINARY and numbers & self._mixed:
            self._add_number(result, self._mixed)
        return result

    def get_type(self, value):
        """Return the type of an object of the other process."""
        if type(value).kind in KINDS and type(value).kind not in DATA:
            return KINDS[type(value).kind]
        kind = self.request("attribute", value, "__class__")
        return type(value) if isinstance(kind, type) else kind

    def _add_number(self, result, numbers):
        if is_remote(result):
            numbers.add(get_number(result))

    def _apply_mixed_operator(self, target, name, args):
        """Apply an operator to an object of the program and a value of the test."""
        kind, is_created = type(target).kind, get_number(target) in self._created
        is_copy = issubclass(type(target), CopiedValue)
        base = next((base for base in BASES if base.__name__ == kind), None) if is_copy else DATA.get(kind)
        is_in_place = name in BINARY and name.startswith("i") and name != "invert" and not is_copy
        if base and not is_in_place and not (is_created and name == "contains"):
            method = getattr(base, f"__{name}__", None)
            if method:
                return method(target if is_copy else self.request("data", target), *args)
            if name != "contains":
                return NotImplemented
        if name in ("eq", "ne"):
            if args[0] is not None:
                self.rejections.append("compares an object of the program, with its own ==, with a value of the test")
            return name == "ne"
        if name == "contains" and not is_created and hasattr(type(target), "__iter__"):
            return any(item is args[0] or item == args[0] for item in target)
        if not (is_created or is_in_place) or name in COMPARISONS:
            self.reject(f"applies {name} to an object of the program and a value of the test")
        result = self.request("special", target, name, *args)
        if name in BINARY and result is not NotImplemented:
            if not is_remote(result):
                self.reject(f"applies {name} to an object of the program and a value of the test")
            self._add_number(result, self._created)
            self._add_number(result, self._mixed)
        return result

    def _exit_context(self, target, name, args):
        """Leave a `with` block; the program may not suppress an exception, which could be a failure of the test."""
        if name == "aexit" and args[0] is not None:
            self.reject("leaves an asynchronous context manager of the program by an exception")
        is_suppressed = self.request("special", target, name, *args[:2], None)
        if name == "exit" and args[0] is not None and is_suppressed:
            self.reject("leaves a context manager of the program that suppresses an exception")
        return is_suppressed


def _call_special_method(value, name, *args, **kwargs):
    if name not in SPECIAL:
        raise TypeError(f"{name} is not a special method.")
    return getattr(type(value), f"__{name}__")(value, *args, **kwargs)


def _copy_data(value: Any):
    """Return the content of an object whose class is derived from a container type."""
    if isinstance(value, dict):
        return dict(value.items())
    base: Any = next(base for base in DATA.values() if isinstance(value, base))
    return base(base.__iter__(value))


def read_attribute(value, name):
    """Return an attribute of an object that a test passes to the program.

    Only public attributes of the test's own classes and of file-like objects are readable, because functions and
    generators refer to the source of the test.
    """
    _require_public(value, name)
    return getattr(value, name)


def write_attribute(value, name, new):
    """Set an attribute of an object that a test passes to the program; see `read_attribute`."""
    _require_public(value, name)
    if isinstance(value, type):
        raise AttributeError(name)
    setattr(value, name, new)


def _require_public(value, name):
    kind = value if isinstance(value, type) else type(value)
    if name.startswith("_") or (kind.__module__ != TEST and kind not in (SimpleNamespace, io.StringIO, io.BytesIO)):
        raise AttributeError(f"{kind.__name__}.{name} is not available to the program.")


def serve_program(program, incoming, outgoing):
    """Load a program, then handle the requests of a test until the test process exits."""
    link = Link(incoming, outgoing, strict=False)
    module = sys.modules["__main__"] = ModuleType("__main__")
    buffer = io.BytesIO()
    sys.stdout = io.TextIOWrapper(buffer, encoding="utf-8", write_through=True)

    def read_output():
        text = buffer.getvalue().decode(errors="replace")
        buffer.seek(0)
        buffer.truncate()
        return text

    loops = []

    def run_coroutine(coroutine):
        async def result():
            return await coroutine

        loops[:] = loops or [importlib.import_module("asyncio").new_event_loop()]
        return loops[0].run_until_complete(result())

    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
    except BaseException as error:
        link.send({"failed": f"{type(error).__name__}: {error}"[:500]})
        raise
    read_output()
    names = {name: value.__name__ if isinstance(value, ModuleType) else "" for name, value in module.__dict__.items()}
    link.send({"names": names})
    link.operations |= {
        "name": lambda name: module.__dict__[name],
        "attribute": getattr,
        "set": setattr,
        "delete": delattr,
    }
    link.operations |= {"copy": copy.copy, "deepcopy": copy.deepcopy, "await": run_coroutine}
    link.read_output = read_output
    while True:
        link.handle(link.read())
