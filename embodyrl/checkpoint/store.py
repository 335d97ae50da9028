"""Storage of checkpoints. A scratch folder is filled and then renamed, so a checkpoint is complete or absent."""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, Field

from embodyrl.errors import CheckpointError, WorkerError
from embodyrl.files import is_full_disk, read_json
from embodyrl.version import __version__

MANIFEST_NAME = "manifest.json"
FORMAT = 2
"""Version of the manifest format; newer versions are rejected."""
LOOP_FILE = "loop.json"
"""Name of the file with the state of the training loop."""
HEADROOM = 1.2
"""Required free space as a multiple of the size of the previous checkpoint."""
_STEP_PATTERN = re.compile("step_([0-9]{6}|[1-9][0-9]{6,})")
_SCRATCH_PATTERN = re.compile(r"\.tmp-step_[0-9]{6,}-([0-9]{1,9})")


def parse_step(name: str) -> int | None:
    """Return the step of a folder name such as step_000200; None for other spellings, such as step_0000200."""
    match = _STEP_PATTERN.fullmatch(name)
    return int(match[1]) if match else None


class FileEntry(BaseModel, frozen=True):
    """Size and checksum of one file."""

    size: int
    """Size in bytes."""
    sha256: str
    """Hexadecimal checksum of the content."""


class Manifest(BaseModel, frozen=True):
    """Manifest of a checkpoint: its step, origin, and files with checksums."""

    format: Annotated[int, Field(ge=1)] = FORMAT
    step: int
    """Training step."""
    version: str
    """Version of embodyrl that wrote the checkpoint."""
    created: str
    """Time of creation in UTC, ISO 8601."""
    files: dict[str, FileEntry]
    """Files by path relative to the checkpoint, with forward slashes."""
    meta: dict[str, Any]
    """Additional JSON values from the caller, by name."""
    digest: str = ""
    """`compute_digest` of the manifest; empty in format 1."""

    def compute_digest(self) -> str:
        """Return the hexadecimal SHA-256 checksum of all other fields."""
        return hashlib.sha256(json.dumps(self.model_dump(exclude={"digest"}), sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint without checking the files.

    Raises:
        CheckpointError: the manifest is missing, malformed, of a newer format, or lists a path outside the folder.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointError(f"The folder {folder} does not exist. `embodyrl ckpt ls RUN` lists the checkpoints.")
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(
            f"{path} is missing: the folder is incomplete or not an embodyrl checkpoint. Use another checkpoint."
        )
    try:
        body = read_json(path)
        manifest = Manifest.model_validate(body) if int(body["format"]) <= FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {text}); use another checkpoint.") from error
    if manifest is None:
        raise CheckpointError(
            f"{path} has format {body['format']} of embodyrl {body.get('version')}, but this version reads formats up "
            f"to {FORMAT}. Upgrade embodyrl."
        )
    for name in manifest.files:
        _check_file_name(path, name)
    return manifest


def _check_file_name(path: Path, name: str) -> None:
    parts = PurePosixPath(name).parts
    is_unsafe = not parts or name.startswith("/") or "\\" in name or ":" in name or "\0" in name
    # Files are opened by these names; a name with `..` could be any file of this host.
    if is_unsafe or name != "/".join(parts) or {".", ".."} & set(parts) or name == MANIFEST_NAME:
        raise CheckpointError(
            f"{path}: the file name {name!r} is not a relative path inside the checkpoint. The checkpoint was tampered "
            "with; do not use it."
        )


def list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield all files of a folder except the manifest as (name, path), sorted by name.

    Raises:
        CheckpointError: the folder contains a link, device or other special file.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # `lstat` does not follow links, which may lead outside the checkpoint.
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) or name == MANIFEST_NAME:
            continue
        if not stat.S_ISREG(mode):
            raise CheckpointError(
                f"{path} is a link or special file, which a checkpoint must not contain. "
                f"Delete it, or use another "
                f"checkpoint."
            )
        yield name, path


def build_file_entry(path: Path) -> FileEntry:
    """Compute the size and the SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return FileEntry(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare the manifest with its digest, and every file with its manifest entry.

    Raises:
        CheckpointError: the manifest is damaged, or a file is missing, unexpected, a link, or of a wrong size or
            content; the message contains the path.
    """
    if manifest.format > 1 and manifest.digest != manifest.compute_digest():
        raise CheckpointError(
            f"{folder / MANIFEST_NAME} is damaged: its values do not match its digest. Use another checkpoint."
        )
    existing = dict(list_files(folder))
    for name, entry in manifest.files.items():
        path = folder / name
        if name not in existing:
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another checkpoint.")
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"{path} has {size} bytes instead of {entry.size}: it is truncated or changed. Use another checkpoint."
            )
    # Sizes and names are checked before the hashes, which take minutes.
    if unlisted := sorted(existing.keys() - manifest.files.keys()):
        raise CheckpointError(
            f"{folder / unlisted[0]} is not listed in {MANIFEST_NAME} ({len(unlisted)} such files). "
            "Delete or move the file."
        )
    for name, entry in manifest.files.items():
        if build_file_entry(folder / name).sha256 != entry.sha256:
            raise CheckpointError(
                f"{folder / name}: sha256 differs from {MANIFEST_NAME}, so the content is damaged or changed. "
                "Use another checkpoint."
            )


def read_loop(folder: Path) -> tuple[int, list[float] | None, int | None]:
    """Return the training step, the best validation score so far (None: no validation), and the step of that score.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    try:
        loop = read_json(folder / LOOP_FILE)
        step, best, best_step = loop["step"], loop["best"], loop["best_step"]
        best = [best] if isinstance(best, float) else best  # written by older versions
        are_numbers = all(type(number) is int for number in (step, 0 if best_step is None else best_step))
        if not are_numbers or not all(type(score) is float for score in ([] if best is None else best)):
            raise ValueError("step, best or best_step has a wrong type")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / LOOP_FILE} cannot be read: {error}. Use another checkpoint.") from error
    return step, best, best_step


class CheckpointStore:
    """Checkpoints of a run in folders such as `root/step_000200/`, each with a manifest of files and checksums."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def path(self, step: int) -> Path:
        """Return the folder of a step; the folder may not exist."""
        return self.root / f"step_{step:06d}"

    def folders(self) -> list[int]:
        """Return the steps of all checkpoint folders, ascending, including damaged folders without a manifest."""
        if not self.root.is_dir():
            return []
        steps = (parse_step(entry.name) for entry in self.root.iterdir())
        return sorted(step for step in steps if step is not None)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        return [step for step in self.folders() if (self.path(step) / MANIFEST_NAME).is_file()]

    def rename_damaged(self) -> list[str]:
        """Rename folders without a manifest, so that their steps can be saved again; return one warning per folder."""
        warnings: list[str] = []
        for step in {*self.folders()} - {*self.steps()}:
            damaged = self.path(step).with_name(f"damaged-{time.strftime('%Y%m%d-%H%M%S')}-{self.path(step).name}")
            os.replace(self.path(step), damaged)
            warnings.append(
                f"{self.path(step)} is damaged ({MANIFEST_NAME} is missing) and was renamed to {damaged.name}"
            )
        return warnings

    def latest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint without verification; None: there is no checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a step without verification of the files."""
        return read_manifest(self.path(step))

    def best(self) -> int | None:
        """Return the step of the best validation; None if the step is unknown or its checkpoint was deleted."""
        newest = self.latest()
        if newest is None or not (newest / LOOP_FILE).is_file():
            return None
        step = read_loop(newest)[2]
        return step if step in self.steps() else None

    def stage(self, step: int, fill: Callable[[Path], None]) -> None:
        """Call `fill(folder)` to write the files of a checkpoint into a scratch folder, which is deleted after errors.

        Args:
            step: training step, which must not have a checkpoint yet.
            fill: writes plain files and folders.

        Raises:
            CheckpointError: the step has a checkpoint, or the disk is full (before or while writing).
        """
        target = self.path(step)
        if target.exists():
            raise CheckpointError(f"{target} exists; a checkpoint is never overwritten. Delete it or use another run.")
        self.root.mkdir(parents=True, exist_ok=True)
        newest = self.latest()
        # Checked before minutes of writing; the best estimate is the size of the previous checkpoint.
        needed = int(HEADROOM * size_bytes(newest)) if newest else 0
        free = shutil.disk_usage(self.root).free
        if needed > free:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise CheckpointError(_format_full_disk_error(target, needed=needed, free=free)) from error
        scratch = self._scratch(step)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with self._clean_up_on_error(step, needed):
            fill(scratch)

    def commit(self, step: int, meta: Mapping[str, Any]) -> Path:
        """Flush the staged files to disk, add the manifest and rename the folder to its final name.

        Args:
            step: training step.
            meta: JSON values for the manifest.

        Raises:
            CheckpointError: the disk is full; the scratch folder is deleted.
        """
        target = self.path(step)
        with self._clean_up_on_error(step):
            _write_manifest(self._scratch(step), step, meta)
            # A rename in the same folder is atomic.
            os.replace(self._scratch(step), target)
        # The rename itself must be flushed, too.
        _flush_to_disk(self.root)
        return target

    @contextmanager
    def _clean_up_on_error(self, step: int, needed: int = 0) -> Iterator[None]:
        """Delete the scratch folder if the block fails, and report a full disk."""
        scratch = self._scratch(step)
        try:
            yield
        except BaseException as error:
            written = size_bytes(scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            # The error of an exited worker stays a WorkerError, because training cannot continue without the worker.
            if is_full_disk(error) and not isinstance(error, WorkerError):
                free = shutil.disk_usage(self.root).free
                text = _format_full_disk_error(self.path(step), needed=max(needed, written), free=free, cause=error)
                raise CheckpointError(text) from error
            raise

    def verify(self, path: Path) -> Manifest:
        """Verify the size and the checksum of each file of a checkpoint, and return the manifest.

        Raises:
            CheckpointError: a file is damaged; the message contains its path and the next older complete checkpoint.
        """
        path = Path(path)
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest)
        except CheckpointError as error:
            older = [step for step in self.steps() if step < (parse_step(path.name) or 0)]
            hint = f" The next older complete checkpoint is {self.path(older[-1])}." if older else ""
            raise CheckpointError(f"{error}{hint}") from error
        return manifest

    def prune(self, keep: int, protect: Collection[int] = (), replaced: Collection[int] = ()) -> list[int]:
        """Delete all checkpoints except the newest `keep` and the steps in `protect`; return the deleted steps.

        Steps in `replaced` do not count towards `keep`.
        """
        assert keep >= 1, keep
        steps = self.steps()
        remaining = {*protect, *[step for step in steps if step not in replaced][-keep:]}
        stale = [step for step in steps if step not in remaining]
        for step in stale:
            # Renamed first: an interrupted deletion must not leave a partial checkpoint.
            scratch = self._scratch(step)
            os.replace(self.path(step), scratch)
            _delete(scratch)
        return stale

    def clean_stale(self) -> list[Path]:
        """Delete the scratch folders of exited processes. Call this method before the first checkpoint is written."""
        if not self.root.is_dir():
            return []
        matches = ((_SCRATCH_PATTERN.fullmatch(entry.name), entry) for entry in self.root.iterdir())
        stale = sorted(entry for match, entry in matches if match and not _is_other_process(int(match[1])))
        for path in stale:
            _delete(path)
        return stale

    def _scratch(self, step: int) -> Path:
        return self.root / f".tmp-{self.path(step).name}-{os.getpid()}"


def _delete(path: Path) -> None:
    """Delete a folder tree, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_manifest(folder: Path, step: int, meta: Mapping[str, Any]) -> None:
    """Flush the files to disk, write the manifest, and flush the folder."""
    files = {}
    for name, path in list_files(folder):
        # Hashes of the written files: later changes on the disk are detected on use.
        files[name] = build_file_entry(path)
        _flush_to_disk(path)
    assert files, "fill wrote no file"
    assert not (folder / MANIFEST_NAME).exists(), f"fill must not write {MANIFEST_NAME}"
    for path in folder.rglob("*"):
        if path.is_dir():
            _flush_to_disk(path)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(step=step, version=__version__, created=created, files=files, meta=dict(meta))
    text = json.dumps(manifest.model_dump() | {"digest": manifest.compute_digest()}, indent=1, allow_nan=False)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    _flush_to_disk(folder / MANIFEST_NAME)
    for name in files:  # safetensors creates files with mode 600
        (folder / name).chmod((folder / MANIFEST_NAME).stat().st_mode)
    _flush_to_disk(folder)


def size_bytes(folder: Path) -> int:
    """Return the total size in bytes of all files in a folder tree."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _format_full_disk_error(target: Path, *, needed: int, free: int, cause: BaseException | None = None) -> str:
    reason = f"No space left on device for {target}" + (f" ({cause})" if cause else "")
    requirement = f"needs {'more than ' if cause else ''}{needed / 2**20:.1f} MiB, " if needed >= 2**17 else ""
    requirement += f"{free / 2**20:.1f} MiB are free"
    if needed <= free:
        requirement += ", or a quota or file-size limit is reached"
    other_folders = [folder for folder in target.parent.glob("step_*") if folder.name != target.name]
    hint = ", or set checkpoint.keep=1" if len(other_folders) > 1 else ""
    return f"{reason}: {requirement}; older checkpoints are intact. Free some space{hint}."


def _is_other_process(pid: int) -> bool:
    """Return True if a running process other than this one has the pid. Restarted containers often reuse pids."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def read_step(weights: Path | None) -> int:
    """Return the training step of a verified policy folder; 0 if the folder is not part of a checkpoint.

    Raises:
        CheckpointError: the file with the step is missing or malformed.
    """
    if weights is None or not (weights.parent / MANIFEST_NAME).is_file():
        return 0
    return read_loop(weights.parent)[0]
