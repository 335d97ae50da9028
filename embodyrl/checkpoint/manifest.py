"""`manifest.json`: what a checkpoint folder holds. It is written last, so a folder with it is complete."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from embodyrl.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and content of one file."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's table of contents."""

    step: int
    version: str
    """Version of embodyrl that wrote it."""
    created: str
    """ISO 8601, UTC."""
    files: Mapping[str, FileEntry]
    """By path relative to the checkpoint, with forward slashes."""
    meta: Mapping[str, Any]
    """JSON values of the caller."""

    def to_json(self) -> str:
        """Return the file's text."""
        files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())}
        body = {"format": FORMAT, "step": self.step, "version": self.version, "created": self.created}
        return json.dumps(body | {"files": files, "meta": self.meta}, indent=1, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the table of contents without looking at the files.

    Raises:
        CheckpointError: missing, malformed, of a newer format, or with names that leave the folder.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder; `embodyrl ckpt ls RUN` shows what exists.")
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(
            f"{folder}: {MANIFEST_NAME} is missing: incomplete, or not a checkpoint of ours; use another one."
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if int(body["format"]) > FORMAT:
            raise CheckpointError(
                f"{path}: format {body['format']} was written by embodyrl {body.get('version')}, newer than this one "
                f"(format {FORMAT}); upgrade embodyrl."
            )
        files = {str(k): FileEntry(size=int(v["size"]), sha256=str(v["sha256"])) for k, v in body["files"].items()}
        manifest = Manifest(
            step=int(body["step"]),
            version=str(body["version"]),
            created=str(body["created"]),
            files=files,
            meta=dict(body["meta"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint."
        ) from error
    for name in files:
        _require_plain_name(path, name)
    return manifest


def _require_plain_name(path: Path, name: str) -> None:
    parts = PurePosixPath(name).parts
    tricky = not parts or name.startswith("/") or "\\" in name or ":" in name or "\0" in name
    if tricky or name != "/".join(parts) or {".", ".."} & set(parts) or name == MANIFEST_NAME:
        raise CheckpointError(
            f"{path}: the file name {name!r} leaves the checkpoint or is not a plain relative path; "
            "somebody tampered with this checkpoint, do not use it."
        )


def contents(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file below a folder but the manifest as (name, path), sorted by name.

    Raises:
        CheckpointError: a link, device or other special file.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) or name == MANIFEST_NAME:
            continue
        if not stat.S_ISREG(mode):
            raise CheckpointError(
                f"{path}: links and special files have no place in a checkpoint; do not use it, or delete this one."
            )
        yield name, path


def describe(path: Path) -> FileEntry:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return FileEntry(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file with its manifest entry.

    Raises:
        CheckpointError: names the first file that is missing, surplus, linked, of a wrong size or content.
    """
    found = dict(contents(folder))
    for name, entry in manifest.files.items():
        path = folder / name
        if name not in found:
            raise CheckpointError(f"{path} is missing; the checkpoint is incomplete, use another one.")
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"{path} has {size} bytes instead of {entry.size}: truncated or changed; use another checkpoint."
            )
    if surplus := sorted(found.keys() - manifest.files.keys()):
        raise CheckpointError(
            f"{folder / surplus[0]} is not listed in {MANIFEST_NAME} ({len(surplus)} such files); "
            "somebody added it, delete it or move it out."
        )
    for name, entry in manifest.files.items():
        if describe(folder / name).sha256 != entry.sha256:
            raise CheckpointError(
                f"{folder / name}: sha256 differs from {MANIFEST_NAME}, the content was damaged or changed; "
                "use another checkpoint."
            )
