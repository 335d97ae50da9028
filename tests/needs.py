"""Extensions that a test needs: those of its folder and of `pytest.mark.needs`.

`pytestmark = pytest.mark.needs("tabletop", "openvla_oft")` applies to a file, also to its imports; a decorator to one
test.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from embodyrl.manifests import FOLDERS, PACKAGE, extensions

TESTS = Path(__file__).parent
_OF_FILE = re.compile(r"^pytestmark = (?:[^\n]|\n[ \])])*?\bneeds\(([^)]*)\)", re.MULTILINE)


@cache
def _owners() -> dict[str, str]:
    return {path: name for name, extension in extensions().items() for path in extension.paths}


def needed_by_folder(path: Path) -> set[str]:
    """Return the extension that owns the code which `tests/<folder>/<name>` tests; a name without code is absent."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    if len(parts) < 2 or parts[0] not in FOLDERS or parts[1].endswith(".py") or parts[1].startswith("__"):
        return set()
    folder = "/".join(parts[:2])
    is_core = folder not in _owners() and any((PACKAGE / folder).glob("*.py"))
    return set() if is_core else {_owners().get(folder, parts[1])}


def needed_by(path: Path) -> set[str]:
    """Return the extensions that a test file needs before it can be imported."""
    needed = needed_by_folder(path)
    if path.suffix == ".py" and (found := _OF_FILE.search(path.read_text(encoding="utf-8"))):
        needed |= set(re.findall(r"\w+", found[1]))
    return needed


def absent(needed: set[str]) -> list[str]:
    """Return the names of extensions that this tree lacks."""
    return sorted(needed - extensions().keys())
