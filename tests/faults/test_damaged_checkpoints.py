"""Damaged checkpoints are rejected; the error names the damaged file and an older complete checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
from toy_runs import TOY_OFT, resume_toy, rows, train_toy

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cli.main import main
from embodyrl.errors import CheckpointError
from embodyrl.monitor.history import read_rows
from embodyrl.plan.weights import resolve_weights


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("healthy"), "runner.save_interval=1")


def truncate(newest):
    victim = next((newest / "policy").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    return victim.name


def flip_a_bit(newest):
    victim = next((newest / "policy").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    return f"{victim.name}: sha256 differs"


def remove(newest):
    victim = next(newest.glob("training_state*.safetensors"))
    victim.unlink()
    return f"{victim.name} is missing"


def add(newest):
    (newest / "policy" / "pytorch_model.bin").write_bytes(b"surprise")
    return "pytorch_model.bin is not listed"


def empty_the_manifest(newest):
    (newest / "manifest.json").write_text("")
    return "manifest.json is damaged"


def come_from_the_future(newest):
    path = newest / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99, "version": "9.0"}))
    return "reads formats up to"


def lead_out_of_the_folder(newest):
    (newest / "loop.json").unlink()
    (newest / "loop.json").symlink_to("/etc/hostname")
    return "link or special file"


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_a_bit, remove, add, empty_the_manifest, come_from_the_future, lead_out_of_the_folder],
)
def test_resume_rejects_a_damaged_checkpoint_and_names_an_older_checkpoint(healthy, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    said = damage(run / "checkpoints" / "step_000002")
    before = rows(run)
    with pytest.raises(CheckpointError) as caught:
        resume_toy(run, "runner.max_steps=3")
    assert caught.value.exit_code == 6
    assert said in str(caught.value)
    assert f"next older complete checkpoint is {run}/checkpoints/step_000001" in str(caught.value)
    assert rows(run) == before
    assert not (run / "lock").exists()


def test_partial_checkpoint_is_ignored_and_deleted(healthy, tmp_path):
    """Files left by a kill between the data and the manifest, or before the rename."""
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    folder = run / "checkpoints"
    (folder / "step_000002" / "manifest.json").unlink()
    shutil.move(folder / "step_000002", folder / ".tmp-step_000002-999999999")
    resume_toy(run)
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert rows(run)[1]["train/return"] == rows(healthy)[1]["train/return"]
    assert sorted(p.name for p in folder.iterdir()) == ["step_000001", "step_000002"]


def test_checkpoint_without_manifest_is_renamed_and_rewritten(healthy, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    newest = run / "checkpoints" / "step_000002"
    (newest / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        resolve_weights(str(run))
    assert main(["ckpt", "verify", str(run)]) == 6
    assert f"FAIL  {newest}" in capsys.readouterr().out
    resume_toy(run)
    assert f"{newest} is damaged" in (run / "logs" / "events.log").read_text()
    CheckpointStore(run / "checkpoints").verify(newest)
    (aside,) = (run / "checkpoints").glob("damaged-*-step_000002")
    assert (aside / "loop.json").is_file()
    assert [row["step"] for row in rows(run)] == [1, 2]


def test_missing_checkpoints_are_an_error_on_resume(healthy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    shutil.rmtree(run / "checkpoints")
    before = rows(run)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"2 rows of metrics but no checkpoint .* start from step 0"):
            resume_toy(run)
        assert rows(run) == before
        (run / "checkpoints").mkdir(exist_ok=True)


def test_run_killed_before_its_first_checkpoint_restarts_with_a_warning(healthy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder)
    (run / "metrics.jsonl").write_text(json.dumps(rows(run)[0]) + "\n")
    resume_toy(run)
    assert [row["step"] for row in rows(run)] == [1, 2]
    said = (run / "logs" / "events.log").read_text()
    assert "no checkpoint was complete when this run ended; training continues from step 0" in said


@pytest.mark.parametrize("part", ["", "checkpoints/step_000002", "checkpoints/step_000002/policy"])
def test_flipped_bytes_are_detected(healthy, tmp_path, part):
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    said = flip_a_bit(run / "checkpoints" / "step_000002")
    with pytest.raises(CheckpointError, match=said):
        resolve_weights(str(run / part))
    if part.endswith("policy"):
        with pytest.raises(CheckpointError, match=said):
            train_toy(tmp_path, f"model.path={run / part}", name="by_path")


@pytest.mark.parametrize("name", ["link", "link_to_the_checkpoint", "copy", "copy/policy"])
def test_flipped_bytes_of_a_linked_or_copied_checkpoint_are_detected(healthy, tmp_path, name):
    shutil.copytree(healthy, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    path = tmp_path / name
    if name.startswith("link"):
        path.symlink_to(newest / "policy" if name == "link" else newest)
    else:
        shutil.copytree(newest, tmp_path / "copy")
    assert resolve_weights(str(path)).samefile(path if (path / "config.json").exists() else path / "policy")
    said = flip_a_bit(tmp_path / "copy" if name.startswith("copy") else newest)
    with pytest.raises(CheckpointError, match=said):
        resolve_weights(str(path))
    if name in ("link", "copy/policy"):
        with pytest.raises(CheckpointError, match=said):
            train_toy(tmp_path, f"model.path={path}", name="by_path")


def test_damaged_metric_rows_are_skipped(healthy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe{"step"\n[1, 2]\n"three"\n{"step": "four"}\n')
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2]
    resume_toy(run, "runner.max_steps=3")
    assert [row["step"] for row in rows(run)] == [1, 2, 3]


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm.adv_type=gae", "algorithm.group_size=1"),
        pytest.param(
            (
                "model.is_lora=true",
                "model.path=assets/openvla_oft_tiny_soup",
                "model.unnorm_key=libero_object_no_noops",
            )
        ),
    ],
    ids=["values", "adapters"],
)
def test_resume_with_other_trained_parameters_is_rejected(healthy, tmp_path, words):
    run = tmp_path / "run"
    if "model.is_lora=true" in words:
        train_toy(tmp_path, *TOY_OFT, "runner.save_interval=1")
    else:
        shutil.copytree(healthy, run)
    with pytest.raises(CheckpointError, match=r"contains other trained parameters .* start a new run with ckpt="):
        resume_toy(run, "runner.max_steps=3", *words)
