"""A folder of checkpoints. A step is written aside and renamed into place: it is there completely or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embodyrl import __version__
from embodyrl.checkpoint.manifest import MANIFEST_NAME, Manifest, contents, describe, read_manifest, verify_files
from embodyrl.errors import CheckpointError

LOOP_FILE = "loop.json"
"""Where a training loop stands; written by the loop itself."""
HEADROOM = 1.2
"""Free space asked for, in sizes of the previous checkpoint."""
_STEP = re.compile(r"step_(\d{6,})")
_SCRATCH = re.compile(r"\.tmp-step_\d{6,}-(\d+)")
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class CheckpointStore:
    """Checkpoints `root/step_000200/`, each with a manifest of sizes and sha256."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def path(self, step: int) -> Path:
        """Folder of a step, whether it exists or not."""
        return self.root / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        if not self.root.is_dir():
            return []
        found = {int(match[1]) for entry in self.root.iterdir() if (match := _STEP.fullmatch(entry.name))}
        return sorted(step for step in found if (self.path(step) / MANIFEST_NAME).is_file())

    def latest(self) -> Path | None:
        """Newest complete checkpoint, not verified yet."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def manifest(self, step: int) -> Manifest:
        """Table of contents of a step, not verified."""
        return read_manifest(self.path(step))

    def best(self) -> int | None:
        """Step with the best validation, as the newest checkpoint remembers it; None if it is gone or unknown."""
        newest = self.latest()
        if newest is None or not (newest / LOOP_FILE).is_file():
            return None
        step = json.loads((newest / LOOP_FILE).read_text(encoding="utf-8")).get("best_step")
        return step if step in self.steps() else None

    def stage(self, step: int, fill: Callable[[Path], None]) -> None:
        """Let `fill(folder)` put the files of a checkpoint into a scratch folder.

        Args:
            step: training step; must not exist yet.
            fill: writes plain files and folders.

        Raises:
            CheckpointError: the step exists, or the disk is full (before or while writing). Nothing is left behind.
        """
        target = self.path(step)
        if target.exists():
            raise CheckpointError(f"{target} exists; a checkpoint is never overwritten. Delete it or use another run.")
        self.root.mkdir(parents=True, exist_ok=True)
        newest = self.latest()
        needed = int(HEADROOM * size_bytes(newest)) if newest else 0
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise CheckpointError(_full_disk(target, needed=needed, free=free))
        scratch = self._scratch(step)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with self._cleaned_up(step, needed):
            fill(scratch)

    def commit(self, step: int, meta: Mapping[str, Any]) -> Path:
        """Bring what was staged to the disk, seal it with its manifest and move it into place.

        Args:
            step: training step.
            meta: JSON values kept in the manifest.

        Raises:
            CheckpointError: the disk is full. Nothing is left behind.
        """
        target = self.path(step)
        with self._cleaned_up(step):
            _seal(self._scratch(step), step, meta)
            os.replace(self._scratch(step), target)
        _sync(self.root)
        return target

    @contextmanager
    def _cleaned_up(self, step: int, needed: int = 0) -> Iterator[None]:
        """Leave no scratch folder behind when the body fails, and name a full disk."""
        scratch = self._scratch(step)
        try:
            yield
        except BaseException as error:
            written = size_bytes(scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            if _is_full_disk(error):
                free = shutil.disk_usage(self.root).free
                text = _full_disk(self.path(step), needed=max(needed, written), free=free, cause=error)
                raise CheckpointError(text) from error
            raise

    def verify(self, path: Path) -> Manifest:
        """Check a checkpoint byte by byte before it is used.

        Raises:
            CheckpointError: names the file at fault and, where there is one, the next older complete checkpoint.
        """
        path = Path(path)
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest)
        except CheckpointError as error:
            match = _STEP.fullmatch(path.name)
            older = [step for step in self.steps() if match and step < int(match[1])]
            hint = f" The next older complete checkpoint is {self.path(older[-1])}." if older else ""
            raise CheckpointError(f"{error}{hint}") from error
        return manifest

    def prune(self, keep: int, protect: Collection[int] = ()) -> list[int]:
        """Delete all but the newest `keep` checkpoints and those in `protect`; returns the deleted steps."""
        assert keep >= 1, keep
        doomed = [step for step in self.steps()[:-keep] if step not in protect]
        for step in doomed:
            # Renamed first: a deletion that is interrupted must not leave half a checkpoint under its name.
            scratch = self._scratch(step)
            os.replace(self.path(step), scratch)
            shutil.rmtree(scratch)
        return doomed

    def clean_stale(self) -> list[Path]:
        """Delete scratch folders whose process is gone; call at start, before this process writes."""
        if not self.root.is_dir():
            return []
        matches = ((_SCRATCH.fullmatch(entry.name), entry) for entry in self.root.iterdir())
        stale = sorted(entry for match, entry in matches if match and not _is_other_process(int(match[1])))
        for folder in stale:
            shutil.rmtree(folder)
        return stale

    def _scratch(self, step: int) -> Path:
        return self.root / f".tmp-{self.path(step).name}-{os.getpid()}"


def _seal(folder: Path, step: int, meta: Mapping[str, Any]) -> None:
    """Bring the files to the disk, then the manifest, then the folder."""
    files = {}
    for name, path in contents(folder):
        files[name] = describe(path)
        _sync(path)
    assert files, "fill wrote no file"
    assert not (folder / MANIFEST_NAME).exists(), f"fill must not write {MANIFEST_NAME}"
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync(path)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(step=step, version=__version__, created=created, files=files, meta=meta)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    _sync(folder / MANIFEST_NAME)
    _sync(folder)


def size_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_full_disk(error: BaseException) -> bool:
    """Also behind a wrapper: safetensors reports the system's error as text only."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL_DISK:
            return True
        if any(f"os error {code}" in str(seen) for code in _FULL_DISK):
            return True
        seen = seen.__cause__
    return False


def _full_disk(target: Path, *, needed: int, free: int, cause: BaseException | None = None) -> str:
    reason = f"No space left on device for {target}" + (f" ({cause})" if cause else "")
    need = f"needs {'more than ' if cause else ''}{needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free"
    return f"{reason}: {need}; older checkpoints are intact. Free some space, or set checkpoint.keep=1."


def _is_other_process(pid: int) -> bool:
    """Whether a process other than this one has the pid. In containers a restarted run often has the same pid again."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, under another user
        pass
    return True
