"""`env.render_profile=lean`: reduced copies of meshes and textures, made once and kept on disk."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from embodyrl.errors import EnvError

_VERSION = 2
"""Part of the cache key; raise it when the same settings give other files."""


def cache_folder() -> Path:
    """Where small copies are kept; may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodyrl" / "lean"


def small_copy(source: Path, setting: str, suffix: str, make: Callable[[], bytes]) -> Path:
    """Path of the copy of `source`; made under another name first, so that no process ever sees half a file.

    A process that is killed while it writes may leave a `.new-*` folder, which nothing reads.

    Raises:
        EnvError: the cache folder cannot be written.
    """
    stat = source.stat()
    key = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns} {setting} {_VERSION}"
    folder = cache_folder()
    target = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{suffix}"
    if target.is_file():
        return target
    content = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as own:
            new = Path(own) / target.name
            new.write_bytes(content)
            os.replace(new, target)
    except OSError as error:
        raise EnvError(
            f"env.render_profile=lean: its cache {folder} cannot be written: {error}. "
            "Fix: free some space (60 MB), or set XDG_CACHE_HOME to a writable folder."
        ) from error
    return target
