"""The core imports no extension, and an extension only those that it declares (extensions.toml)."""

from __future__ import annotations

from test_imports import EXTENSIONS, NOT_YET_INVERTED, ROOT, imports, owner


def crossing() -> list[tuple[str, str]]:
    """Imports between different owners whose target is an extension."""
    return [
        (module, target)
        for module, targets in imports().items()
        for target in targets
        if owner(target) not in (None, owner(module))
    ]


def test_every_listed_path_exists():
    for name, extension in EXTENSIONS.items():
        for path in extension["paths"]:
            assert (ROOT / "embodyrl" / path).exists(), (name, path)
        assert {*extension.get("imports", ())} <= {*EXTENSIONS}, name


def test_core_imports_no_further_extension():
    found = {f"{module} -> {target}" for module, target in crossing() if owner(module) is None}
    assert found <= NOT_YET_INVERTED, "the core must not import extensions: register an entry point instead"
    assert found >= NOT_YET_INVERTED, "remove inverted imports from core_imports.txt"


def test_extensions_import_only_declared_extensions():
    undeclared = [
        f"{module} ({mine}) -> {target} ({theirs})"
        for module, target in crossing()
        if (mine := owner(module)) and (theirs := owner(target)) not in EXTENSIONS[mine].get("imports", ())
    ]
    assert undeclared == []
