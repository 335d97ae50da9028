"""Environments of the Hugging Face hub in LeRobot's EnvHub format: a repository whose env.py defines `make_env`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodyrl.config.paths import cached_snapshot
from embodyrl.errors import ConfigError, format_error

FILE, FUNCTION = "env.py", "make_env"


def load_program(name: str) -> Callable[..., Any]:
    """Import env.py of a downloaded repository `owner/name@commit` and return its `make_env`.

    Callers must check `trust=true` first. Modules next to env.py can be imported.

    Raises:
        ConfigError: the repository is not in the cache, has no env.py, or env.py fails or defines no `make_env`.
    """
    folder = cached_snapshot(name)
    if folder is None:
        raise ConfigError(
            f"env.id={name} is not in the Hugging Face cache. Start the run with `embodyrl`, which downloads it, or "
            "use the full id (40 digits) of a cached commit."
        )
    path = folder / FILE
    module_name = "embodyrl_hub_" + "".join(c if c.isalnum() else "_" for c in name)
    if module_name not in sys.modules:
        if not path.is_file():
            files = ", ".join(sorted(file.name for file in folder.iterdir()))
            raise ConfigError(
                f"env.id={name}: the repository has no {FILE} (files: {files}). Use an EnvHub repository."
            )
        _import(module_name, path, name)
    function = getattr(sys.modules[module_name], FUNCTION, None)
    if not callable(function):
        raise ConfigError(f"env.id={name}: {FILE} must define {FUNCTION}(n_envs, use_async_envs, cfg).")
    return function


def _import(module_name: str, path: Path, name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"env.id={name}: {FILE} cannot be imported: {format_error(error)}.") from error
