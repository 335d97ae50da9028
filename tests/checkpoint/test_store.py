import contextlib
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import embodyrl
from embodyrl.checkpoint.store import CheckpointStore, read_loop
from embodyrl.errors import CheckpointError, WorkerError

KILL_AT = {
    "in the middle of the data": "fill_hook = die",
    "between data and manifest": "import embodyrl.checkpoint.store as module\nmodule.Manifest = lambda **_: die()",
    "in the middle of the manifest": "write = Path.write_text\n"
    "Path.write_text = lambda path, text, **_: (write(path, text[:40]), die())",
    "between manifest and rename": "os.replace = lambda *paths: die()",
}


def fill(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "loop.json").write_text('{"step": 1}')
    (folder / "loop.json").chmod(0o600)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_to(store: CheckpointStore, step: int, fill, meta) -> Path:
    store.stage(step, fill)
    return store.commit(step, meta)


def run_child(root: Path, body: str) -> subprocess.CompletedProcess:
    code = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from embodyrl.checkpoint.store import CheckpointStore

        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        fill_hook = lambda: None
        store = CheckpointStore(Path(sys.argv[1]))

        def write_to(store, step, fill, meta):
            store.stage(step, fill)
            return store.commit(step, meta)

        def fill(folder):
            (folder / "model.bin").write_bytes(b"x" * 100_000)
            fill_hook()
            (folder / "optimizer.bin").write_bytes(b"y" * 100_000)
        """
    )
    return subprocess.run(
        [sys.executable, "-c", code + textwrap.dedent(body), str(root)], capture_output=True, text=True, check=False
    )


def test_checkpoint_round_trips(tmp_path: Path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == []
    assert store.latest() is None
    path = write_to(store, 200, fill, {"config_hash": "abc", "success": 0.5})
    assert path == tmp_path / "checkpoints" / "step_000200"
    manifest = store.verify(path)
    assert (manifest.step, manifest.version) == (200, embodyrl.__version__)
    assert manifest.meta == {"config_hash": "abc", "success": 0.5}
    assert sorted(manifest.files) == ["loop.json", "policy/model.safetensors"]
    entry = manifest.files["policy/model.safetensors"]
    assert entry.size == 16384
    assert entry.sha256 == hashlib.sha256(bytes(range(256)) * 64).hexdigest()
    assert [p.name for p in store.root.iterdir()] == ["step_000200"]


def test_steps_method_lists_complete_checkpoints_in_order(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for step in (1_000_000, 9, 200):
        write_to(store, step, fill, {})
    (tmp_path / "step_000300").mkdir()
    for name in ("step_0000200", "step_400", "step_\u0660\u0660\u0660\u0662\u0660\u0660"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    assert store.steps() == [9, 200, 1_000_000]
    assert store.latest() == tmp_path / "step_1000000"


def test_an_existing_step_is_never_overwritten(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = write_to(store, 5, fill, {})
    before = snapshot(path)
    with pytest.raises(CheckpointError, match=r"step_000005 exists"):
        write_to(store, 5, lambda folder: None, {})
    assert snapshot(path) == before


def test_failed_write_leaves_no_files(tmp_path: Path):
    store = CheckpointStore(tmp_path)

    def broken(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        write_to(store, 5, broken, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
@pytest.mark.parametrize("moment", KILL_AT)
def test_killed_writer_keeps_the_previous_checkpoint(moment: str, tmp_path: Path):
    store = CheckpointStore(tmp_path)
    previous = write_to(store, 100, fill, {})
    before = snapshot(previous)
    child = run_child(tmp_path, f"{KILL_AT[moment]}\nwrite_to(store, 200, fill, {{}})")
    assert child.returncode == -signal.SIGKILL, child.stderr
    (scratch,) = [p for p in tmp_path.iterdir() if p != previous]
    assert scratch.name.startswith(".tmp-step_000200-")
    assert (scratch / "manifest.json").exists() is ("data" not in moment)
    assert store.steps() == [100]
    assert store.clean_stale() == [scratch]
    assert list(tmp_path.iterdir()) == [previous]
    assert snapshot(previous) == before
    store.verify(write_to(store, 200, fill, {}))


@pytest.mark.integration
def test_writer_killed_after_rename_leaves_a_complete_checkpoint(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    write_to(store, 100, fill, {})
    after = "replace = os.replace\nos.replace = lambda *paths: (replace(*paths), die())\nwrite_to(store, 200, fill, {})"
    assert run_child(tmp_path, after).returncode == -signal.SIGKILL
    assert store.steps() == [100, 200]
    store.verify(store.path(200))
    assert store.clean_stale() == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kill", "left", "scratch"),
    [
        ("os.replace = lambda *paths: die()", [1, 2, 3], 0),
        ("replace = os.replace\nos.replace = lambda *paths: (replace(*paths), die())", [2, 3], 1),
        ("import shutil\nshutil.rmtree = lambda *a, **k: die()", [2, 3], 1),
        ("os.rmdir = lambda *a, **k: die()", [2, 3], 1),
    ],
    ids=["before the rename", "after the rename", "before the deletion", "in the middle of the deletion"],
)
def test_killed_prune_leaves_no_partial_checkpoint(kill: str, left, scratch, tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        write_to(store, step, fill, {})
    child = run_child(tmp_path, f"{kill}\nstore.prune(1)")
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert store.steps() == left
    for step in left:
        store.verify(store.path(step))
    assert len(store.clean_stale()) == scratch
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_{step:06d}" for step in left]


def test_scratch_folder_of_a_running_process_is_kept(tmp_path: Path):
    living = tmp_path / f".tmp-step_000001-{os.getppid()}"
    reused_pid = tmp_path / f".tmp-step_000002-{os.getpid()}"
    living.mkdir()
    reused_pid.mkdir()
    assert CheckpointStore(tmp_path).clean_stale() == [reused_pid]
    assert living.is_dir()
    living.rmdir()


def test_other_spellings_of_a_step_are_not_checkpoints(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    other_names = ["step_0000002", "step_00002", "step_\u0660\u0660\u0660\u0660\u0660\u0662", "step_0000007"]
    for step in (1, 2):
        write_to(store, step, fill, {})
    for name in other_names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes((store.path(2) / "manifest.json").read_bytes())
    assert store.folders() == store.steps() == [1, 2]
    assert store.prune(2) == store.rename_damaged() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["step_000001", "step_000002", *other_names])


def test_links_and_files_are_deleted_without_their_targets(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    before = snapshot(write_to(store, 2, fill, {}))
    for name in ("step_000001", ".tmp-step_000009-999999999", ".tmp-step_000009-99999999999999999999"):
        (tmp_path / name).symlink_to("step_000002")
    (tmp_path / ".tmp-step_000008-999999999").write_text("file")
    assert [path.name[:16] for path in store.clean_stale()] == [".tmp-step_000008", ".tmp-step_000009"]
    assert store.prune(1) == [1]
    (tmp_path / ".tmp-step_000009-99999999999999999999").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]
    assert snapshot(store.path(2)) == before


def test_prune_keeps_newest_and_protected_steps(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30, 40, 50):
        write_to(store, step, fill, {})
    assert store.prune(2, protect=[10, 45]) == [20, 30]
    assert store.steps() == [10, 40, 50]
    assert store.prune(3) == []


def flip_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: flip_bit(c / "policy" / "model.safetensors"), r"policy/model.safetensors: sha256 differs"),
        (lambda c: os.truncate(c / "policy" / "model.safetensors", 10_000), r"model.safetensors has 10000 bytes inst"),
        (lambda c: (c / "loop.json").unlink(), r"loop.json is missing"),
        (lambda c: (c / "manifest.json").unlink(), r"manifest.json is missing"),
        (lambda c: (c / "manifest.json").write_text(""), r"manifest.json is damaged"),
        (lambda c: (c / "manifest.json").write_text("[" * 100_000), r"manifest.json is damaged"),
        (lambda c: (c / "manifest.json").write_bytes(b"\xff\xfe\x00"), r"manifest.json is damaged"),
        (lambda c: (c / "extra.pt").write_bytes(b"pickle"), r"extra.pt is not listed"),
    ],
)
def test_damaged_checkpoint_error_names_the_next_older_checkpoint(damage, message: str, tmp_path: Path):
    store = CheckpointStore(tmp_path)
    _, older, path, _ = (write_to(store, step, fill, {}) for step in (50, 100, 200, 300))
    store.verify(path)
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        store.verify(path)
    assert f"The next older complete checkpoint is {older}." in str(caught.value)
    store.verify(older)


def edit_manifest(path: Path, change) -> None:
    body = json.loads((path / "manifest.json").read_text())
    change(body)
    (path / "manifest.json").write_text(json.dumps(body))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.bin",
        "/etc/hostname",
        "policy/../../outside.bin",
        "./loop.json",
        "a//b",
        "a\\b",
        "C:x",
        "",
        "..",
        "a/",
    ],
)
def test_malicious_file_names_are_rejected(name: str, tmp_path: Path):
    secret = b"outside"
    (tmp_path / "outside.bin").write_bytes(secret)
    store = CheckpointStore(tmp_path)
    path = write_to(store, 1, fill, {})
    entry = {"size": len(secret), "sha256": hashlib.sha256(secret).hexdigest()}
    edit_manifest(path, lambda body: body["files"].update({name: entry}))
    with pytest.raises(CheckpointError, match="not a relative path"):
        store.verify(path)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_symlinks_are_rejected_even_with_matching_content(what: str, tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    path = write_to(store, 1, fill, {})
    inside = path / ("loop.json" if what == "file" else "policy")
    outside = tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(CheckpointError, match="link or special file"):
        store.verify(path)


def test_symlink_in_a_new_checkpoint_is_rejected(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="link or special file"):
        write_to(store, 1, lambda folder: (folder / "x").symlink_to("/etc/hostname"), {})
    assert list(tmp_path.iterdir()) == []


def test_newer_format_error_suggests_an_upgrade(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = write_to(store, 1, fill, {})
    edit_manifest(path, lambda body: body.update(format=3, version="9.9"))
    with pytest.raises(CheckpointError, match=r"embodyrl 9\.9.*Upgrade"):
        store.verify(path)


def test_verifying_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"folder .* does not exist"):
        CheckpointStore(tmp_path).verify(tmp_path / "step_000009")


def test_files_are_synced_before_manifest_and_rename(tmp_path: Path, monkeypatch):
    order, fsync = [], os.fsync

    def noted(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    path = write_to(CheckpointStore(tmp_path), 1, fill, {})
    assert order[:-1] == ["loop.json", "model.safetensors", "policy", "manifest.json", order[-2]]
    assert [order[-2].rpartition("-")[0], order[-1]] == [".tmp-step_000001", tmp_path.name]
    assert len({file.stat().st_mode for file in path.rglob("*") if file.is_file()}) == 1, "all are for the same people"


def test_missing_disk_space_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path)
    needed = int(1.2 * sum(map(len, snapshot(write_to(store, 1, fill, {})).values())))
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with contextlib.nullcontext() if fits else pytest.raises(CheckpointError, match="No space left"):
            write_to(store, 2 if fits else 3, fill, {})
    monkeypatch.undo()
    monkeypatch.setattr("embodyrl.checkpoint.store.HEADROOM", 2**40)
    with pytest.raises(CheckpointError, match=r"No space left.*needs \d{6,}\.\d MiB.*checkpoint\.keep=1"):
        write_to(store, 3, lambda folder: pytest.fail("filled all the same"), {})
    assert store.steps() == [1, 2]


@pytest.mark.parametrize(
    "writer",
    [
        '(folder / "big.bin").write_bytes(bytes(400_000))',
        'save_file({"w": torch.zeros(100_000)}, folder / "big.safetensors")',
    ],
    ids=["plain", "safetensors"],
)
def test_file_size_limit_is_reported_as_full_disk(writer: str, tmp_path: Path):
    previous = write_to(CheckpointStore(tmp_path), 100, fill, {})
    child = run_child(
        tmp_path,
        f"""
        import resource, signal, torch
        from safetensors.torch import save_file
        from embodyrl.errors import CheckpointError
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

        def big(folder):
            {writer}

        try:
            write_to(store, 200, big, {{}})
        except CheckpointError as error:
            sys.exit(str(error))
        """,
    )
    assert child.returncode == 1, (child.returncode, child.stderr)
    assert "No space left on device" in child.stderr
    assert "MiB are free, or a quota or file-size limit is reached" in child.stderr
    assert list(tmp_path.iterdir()) == [previous]


def test_full_disk_is_reported(tmp_path: Path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        store = CheckpointStore(tmp_path)
        previous = write_to(store, 100, fill, {})

        def big(folder: Path) -> None:
            for part in range(20):
                (folder / f"{part}.bin").write_bytes(bytes(100_000))

        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            write_to(store, 200, big, {})
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.ENOSPC
        assert list(tmp_path.iterdir()) == [previous]
        store.verify(previous)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_worker_death_is_not_a_checkpoint_error(tmp_path: Path):
    """A checkpoint error would be tolerated, and the run would wait for the dead worker without end."""

    def dies(folder: Path) -> None:
        raise WorkerError("worker policy raised OSError: No space left on device (os error 28)")

    with pytest.raises(WorkerError, match="worker policy"):
        write_to(CheckpointStore(tmp_path), 1, dies, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "loop",
    [
        "[]",
        "{}",
        "nonsense",
        '{"step": "3", "best": null, "best_step": null}',
        '{"step": true, "best": null, "best_step": null}',
        '{"step": 3, "best": "a", "best_step": 1}',
        '{"step": 3, "best": [1.0], "best_step": [1]}',
    ],
)
def test_malformed_training_state_file_is_an_error(loop: str, tmp_path: Path):
    (tmp_path / "loop.json").write_text(loop)
    with pytest.raises(CheckpointError, match=r"loop\.json cannot be read"):
        read_loop(tmp_path)


def test_training_state_of_an_older_version_loads(tmp_path: Path):
    (tmp_path / "loop.json").write_text('{"step": 3, "best": 0.5, "best_step": 2}')
    assert read_loop(tmp_path) == (3, [0.5], 2)


def test_flipped_bits_of_a_manifest_are_detected(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    manifest = write_to(store, 4, fill, {"env": "toy", "score": 0.25}) / "manifest.json"
    content = manifest.read_bytes()
    unnoticed = []
    for bit in range(0, 8 * len(content), 7):  # at least one bit of each byte
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        with contextlib.suppress(CheckpointError):
            store.verify(store.path(4))
            unnoticed.append(bytes(flipped[max(0, bit // 8 - 20) : bit // 8 + 10]))
    assert not unnoticed
    manifest.write_bytes(content)
    assert store.verify(store.path(4)).step == 4


def test_checkpoints_of_format_1_are_still_read(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    manifest = write_to(store, 4, fill, {}) / "manifest.json"
    content = json.loads(manifest.read_text()) | {"format": 1}
    del content["digest"]
    manifest.write_text(json.dumps(content))
    assert store.verify(store.path(4)).format == 1
