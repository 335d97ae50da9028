"""Output of commands as text lines or JSON."""

import argparse
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from embodyrl.files import json_text


def printable(text: str) -> str:
    """Replace control characters, which a terminal interprets as commands, with question marks."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def show_result(args: argparse.Namespace, data: Any, lines: Iterable[str]) -> None:
    """Print `data` as JSON if `--json` is set, otherwise print `lines`."""
    print(json_text(data) if args.json else printable("\n".join(lines)) + "\n", end="")


@contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector, which would traverse permanent objects repeatedly during imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def about(group: str, option: str, file: Path) -> str:
    """Return the description of a group option: the first comment of its file other than `# @package ...`."""
    from embodyrl.config.compose import variants

    if option in variants(group):
        return variants(group)[option][1]
    comments = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    texts = (line.lstrip("# ").strip() for line in comments)
    return next((text for text in texts if text and not text.startswith("@")), "")
