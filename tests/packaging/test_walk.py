"""The number of files that a reader opens to follow `load_config` from the arguments to the final config.

A call is traced. Each function of config/ and plan/ is followed the first time that it is called, together with the
functions of its file that it names; then the reader returns to the caller. Methods and properties of records, lookups
in registries, components and errors are not followed. A stop is one file, from entering it to leaving it; a return is
a stop in a file that was read before.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "embodyrl"
WORDS = ("env=gym", "model=mlp", "algorithm=ppo", "algorithm.clip_ratio_low=0.1")


def test_following_load_config_takes_at_most_ten_stops():
    found = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True, timeout=120)
    stops = found.stdout.split()
    assert {"config/compose.py", "plan/schema.py", "plan/checks.py"} <= set(stops)
    assert stops[0] == stops[-1] == "plan/config.py"
    assert len(stops) <= 10, stops
    assert len(stops) - len(set(stops)) <= 5, stops


def file_of(code: CodeType) -> str:
    path = Path(code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def is_followed(code: CodeType) -> bool:
    return file_of(code).startswith(("config/", "plan/")) and code.co_name == code.co_qualname


class Reader:
    """Records the files of followed functions, in the order in which they are read."""

    def __init__(self) -> None:
        self.stops: list[str] = []
        self.read: set[CodeType] = set()

    def open(self, code: CodeType) -> None:
        if self.stops[-1:] != [file_of(code)]:
            self.stops.append(file_of(code))

    def read_on(self, code: CodeType) -> None:
        """Mark a function, and all functions of its file that it names, as read."""
        if code in self.read:
            return
        self.read.add(code)
        module = sys.modules["embodyrl." + file_of(code).removesuffix(".py").replace("/", ".")]
        parts = [code]
        for part in parts:
            parts += [inner for inner in part.co_consts if isinstance(inner, CodeType)]
            for name in part.co_names:
                found = getattr(module, name, None)
                named = getattr(getattr(found, "__wrapped__", found), "__code__", None)
                if named is not None and named.co_filename == code.co_filename:
                    self.read_on(named)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self.read or not is_followed(code):
            return
        callers = [caller for caller in above(frame) if file_of(caller) and caller.co_name[0] != "<"]
        if all(is_followed(caller) for caller in callers):
            for caller in callers[:1]:
                self.open(caller)
            self.open(code)
            self.read_on(code)


def above(frame: FrameType) -> Iterator[CodeType]:
    while (caller := frame.f_back) is not None:
        yield caller.f_code
        frame = caller


if __name__ == "__main__":
    from embodyrl.plan.config import load_config

    reader = Reader()
    sys.setprofile(reader)
    load_config("train", WORDS)
    sys.setprofile(None)
    reader.open(load_config.__code__)
    sys.stdout.write(" ".join(reader.stops))
