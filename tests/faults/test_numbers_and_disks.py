"""Non-finite numbers, full disks, damaged files and folders without write permission."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import run_cli
from test_killed_commands import LEARN, STEP_INDEX, TASKS, dagger_words
from toy_runs import TOY_COLLECT, TOY_OFT, resume_toy, rows, toy_config, toy_words, train_toy, weights

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cli.main import main
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.session import OnStep
from embodyrl.commands.sft import sft
from embodyrl.commands.train import train
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, NonFiniteError
from embodyrl.plan.config import load_config

EXPLODING = ("algorithm.normalize_advantages=false", "env.use_rel_reward=false", "env.kwargs.goal=0.7")
"""With the rewards below, advantages are finite and close to the maximum of float32."""
INFINITE_LOSS = (*EXPLODING, "env.kwargs.reward=3e37")
INFINITE_GRADIENT = (*EXPLODING, "env.kwargs.reward=1e37")
"""The loss is finite, but the gradient of the tiny OpenVLA-OFT is not."""
EXPLOSIONS = [
    pytest.param((), INFINITE_LOSS, "loss", id="loss"),
    pytest.param(TOY_OFT, INFINITE_GRADIENT, "gradient norm", id="gradient"),
]


@pytest.mark.parametrize(("model", "exploding", "what"), EXPLOSIONS)
def test_non_finite_update_stops_without_changing_weights(tmp_path, model, exploding, what):
    start = train_toy(tmp_path, *model, "actor.optim.lr=0", "runner.max_steps=1", name="start")
    words = (*model, f"ckpt={start}", "runner.max_steps=2", "runner.save_interval=1")
    message = rf"Non-finite {what} .*left the weights unchanged.*actor\.optim\.lr"
    with pytest.raises(NonFiniteError, match=message) as caught:
        train_toy(tmp_path, *words, *exploding, name="bad")
    assert caught.value.exit_code == 5
    assert CheckpointStore(tmp_path / "bad" / "checkpoints").steps() == []
    assert not (tmp_path / "bad" / "lock").exists()


@pytest.mark.parametrize(("model", "exploding", "what"), EXPLOSIONS)
def test_skipped_update_is_counted_and_keeps_weights(tmp_path, model, exploding, what):
    start = train_toy(tmp_path, *model, "actor.optim.lr=0", "runner.max_steps=1", name="start")
    words = (*model, f"ckpt={start}", "runner.max_steps=2", "faults.on_nonfinite=skip")
    run = train_toy(tmp_path, *words, *exploding, name="skipping")
    for row in rows(run):
        assert row["actor/skipped_nonfinite"] >= 1
        assert row["actor/optimizer_steps"] == 0
    assert weights(run, 2) == weights(start, 1)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("model", "what"), [((), "action"), pytest.param(TOY_OFT, "log-probability")], ids=["cnn", "oft"]
)
def test_diverging_learning_rate_exits_5(tmp_path, model, what):
    absurd = ("actor.optim.lr=1000", "actor.optim.weight_decay=1000", "actor.optim.warmup_steps=0")
    words = toy_words(tmp_path, *model, *absurd, "env.kwargs.goal=0.7", "runner.max_steps=5")
    done = run_cli("train", *words, "launcher=inline", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert f"non-finite {what}" in done.stderr
    assert "actor.optim.lr" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.integration
def test_non_finite_loss_exits_5_in_worker_processes(tmp_path):
    words = toy_words(tmp_path, *INFINITE_LOSS)
    done = run_cli("train", *words, cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "left the weights unchanged" in done.stderr
    assert "Traceback" not in done.stderr


LARGE = "model.hidden_sizes=[1024,1536]"
"""A checkpoint of 23 MiB."""


@pytest.fixture
def small_disk(tmp_path):
    """Mount a real file system of 96 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fills(disk: Path, left: int, at: int = 1) -> OnStep:
    """Fill the disk except for n bytes after a step, before its checkpoint."""

    def fill(step: int, metrics: Mapping[str, float]) -> None:
        if step == at:
            (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - left))

    return fill


def test_missing_disk_space_is_rejected_at_the_start(small_disk):
    (small_disk / "ballast").write_bytes(bytes(60 * 2**20))
    with pytest.raises(
        ConfigError, match=r"A checkpoint needs 23 MiB, and up to 3 .* 36 MiB are free .*checkpoint\.keep=1"
    ):
        train_toy(small_disk, LARGE, "runner.max_steps=3", "runner.save_interval=1")
    # Between the intervals, a checkpoint may be saved after some minutes.
    with pytest.raises(ConfigError, match=r"up to 2 checkpoints .*runner\.save_interval=-1"):
        train_toy(small_disk, LARGE, "runner.max_steps=3")
    assert not list(small_disk.rglob("metrics.jsonl"))


def test_full_disk_error_keeps_older_checkpoints(small_disk):
    cfg = toy_config(small_disk, LARGE, "runner.max_steps=3", "runner.save_interval=1", "checkpoint.on_error=stop")
    with pytest.raises(CheckpointError, match=r"No space left.*needs.*MiB.*Free some space\.") as caught:
        train(cfg, on_step=fills(small_disk, 12 * 2**20, at=2))
    assert caught.value.exit_code == 6
    store = CheckpointStore(small_disk / "run" / "checkpoints")
    assert store.steps() == [1]
    store.verify(store.path(1))
    assert [row["step"] for row in rows(small_disk / "run")] == [1, 2]


def test_full_disk_in_a_validation_exits_6_with_checkpoint_and_resume_command(small_disk):
    words = ("runner.max_steps=4", "runner.save_interval=1", "runner.val_check_interval=1")
    cfg = toy_config(small_disk, *words)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        train(cfg, on_step=fills(small_disk, 0, at=2))
    assert caught.value.exit_code == 6
    run = small_disk / "run"
    newest = CheckpointStore(run / "checkpoints").latest()
    assert newest is not None
    assert f"the newest checkpoint is {newest}; resume with: " in str(caught.value)
    (small_disk / "ballast").unlink()
    resume_toy(run)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]


def test_evaluation_on_a_full_disk_exits_6_and_prints_the_resume_command(small_disk, capsys):
    """The disk is filled up to the first write that fails."""
    words = ["eval", *toy_words(small_disk, "launcher=inline", command="eval")]
    errors = []
    for pages in range(8):
        shutil.rmtree(small_disk / "run", ignore_errors=True)
        (small_disk / "ballast").write_bytes(b"")
        (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - pages * 4096))
        code = main(words)
        errors += [capsys.readouterr().err]
        assert code == 6 or (code == 0 and pages), errors[-1]
        assert "unexpected" not in errors[-1]
        assert not (small_disk / "run" / "lock").exists()
    assert any(f"embodyrl eval --resume {small_disk}/run" in text for text in errors)


def collect_words(out: Path) -> list[str]:
    places = (f"collect.out={out}/demos", f"runner.output_dir={out}/runs")
    return [*TOY_COLLECT, *TASKS, *STEP_INDEX[:2], *places, "collect.episodes=4"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with demonstrations."""
    folder = tmp_path_factory.mktemp("shared")
    assert main(["collect", *collect_words(folder)]) == 0
    return folder


FILLING = [("train", -1), ("train", 0), ("train", 6), ("eval", -1), ("eval", 0)]
FILLING += [("collect", -1), ("collect", 6), ("dagger", -1), ("dagger", 6)]


@pytest.mark.parametrize(("command", "left"), FILLING)
def test_disk_that_fills_during_episodes_exits_6_and_resumes(small_disk, shared, capsys, command, left):
    """The environment fills the disk except for n pages, or with -1 raises the error of a full disk."""
    out, ballast = small_disk / "out", small_disk / "ballast"
    words = {
        "train": toy_words(out, *STEP_INDEX, "runner.max_steps=3", "runner.save_interval=1"),
        "eval": toy_words(out, *STEP_INDEX[:2], "video=none", "eval.episodes=12", command="eval"),
        "collect": collect_words(out),
        "dagger": [*dagger_words(shared, out), "dagger.rounds=1"],
    }[command]
    at = 40 if command == "train" else 9
    fault = (f"env.kwargs.once={ballast}", f"env.kwargs.at={at}", f"env.kwargs.left={4096 * left}")
    words = [command, *words, "env.kwargs.fault=fill", *fault]
    code, error = main(words), capsys.readouterr().err
    assert ballast.stat().st_size > 0
    assert code == 6, error
    assert "Free some space" in error or "free disk space" in error
    assert ("worker env_0 raised Cannot write" in error) == (left == -1)
    again = words
    if command in ("train", "eval"):
        again = [command, "--resume", str(out / "run"), "trust=true"]
        assert f"embodyrl {' '.join(again)}" in error
    assert command != "collect" or "run the same command to resume" in error
    assert command != "dagger" or "to continue all rounds, run the same command again" in error
    newest = CheckpointStore(out / "run" / "checkpoints").latest()
    assert command != "train" or (newest is not None and str(newest) in error)
    os.truncate(ballast, 0)
    assert main(again) == 0, capsys.readouterr().err
    assert not list(out.rglob("lock"))


def test_run_without_any_checkpoint_prints_a_resume_command_that_works(small_disk, capsys):
    words = toy_words(small_disk, *STEP_INDEX[:2], "runner.max_steps=3", "runner.save_interval=1")
    fault = (f"env.kwargs.once={small_disk}/ballast", "env.kwargs.fault=fill", f"env.kwargs.left={1 << 16}")
    assert main(["train", *words, *fault]) == 6
    assert "there is no checkpoint: delete metrics.jsonl first; resume with" in capsys.readouterr().err
    os.truncate(small_disk / "ballast", 0)
    (small_disk / "run" / "metrics.jsonl").unlink()
    assert main(["train", "--resume", f"{small_disk}/run", "trust=true"]) == 0


@pytest.mark.parametrize("left", [0, 2**18])
def test_sft_on_a_full_disk_exits_6_and_resumes(small_disk, shared, left):
    often = ("runner.max_steps=3", "runner.save_interval=1", "runner.val_check_interval=1")
    places = (f"data.path={shared}/demos", f"runner.output_dir={small_disk}", "runner.experiment_name=run")
    cfg = load_config("sft", ["model=flow_small", *STEP_INDEX, *LEARN, *places, *often])
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        sft(cfg, on_step=fills(small_disk, left, at=2))
    run = small_disk / "run"
    newest = CheckpointStore(run / "checkpoints").latest()
    assert f"the newest checkpoint is {newest}; resume with: embodyrl sft --resume {run}" in str(caught.value)
    (small_disk / "ballast").unlink()
    assert main(["sft", "--resume", str(run)]) == 0
    assert CheckpointStore(run / "checkpoints").steps()[-1] == 3


AVERAGED = ("algorithm=filtered_bc", "algorithm.average=0.9", "algorithm.learning_starts=1")


@pytest.mark.parametrize(
    ("words", "left"),
    [((), 2**18), pytest.param(AVERAGED, 12 * 2**20)],
    ids=["the policy", "what the algorithm keeps"],
)
def test_training_continues_without_an_unwritable_checkpoint(small_disk, words, left):
    """There is no earlier checkpoint with a known size: the disk fills while the policy worker writes."""
    cfg = toy_config(small_disk, LARGE, "runner.max_steps=3", "runner.save_interval=1", *words)
    with pytest.raises(CheckpointError, match=r"No space left on device") as caught:
        train(cfg, on_step=fills(small_disk, left))
    assert caught.value.exit_code == 6, "the last checkpoint must succeed"
    run = small_disk / "run"
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert all(row["actor/optimizer_steps"] > 0 or row["train/groups_without_signal"] == 1 for row in rows(run))
    warnings = (run / "logs" / "events.log").read_text()
    assert warnings.count("a checkpoint could not be written, training continues") == 2
    assert "step_000001" in warnings
    assert "step_000002" in warnings
    assert list((run / "checkpoints").iterdir()) == []


@pytest.mark.integration
def test_damaged_checkpoint_exits_6(tmp_path):
    run = train_toy(tmp_path, "runner.max_steps=1")
    victim = next((run / "checkpoints" / "step_000001" / "policy").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    before = (run / "metrics.jsonl").read_bytes()
    done = run_cli("train", "--resume", str(run), "trust=true", "runner.max_steps=2", cwd=tmp_path)
    assert done.returncode == 6
    assert victim.name in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (run / "metrics.jsonl").read_bytes() == before


def test_an_unwritable_video_folder_fails_before_any_rollout(tmp_path):
    (tmp_path / "videos").write_text("a file where the folder should be")
    cfg = toy_config(tmp_path, "video=all", "eval.episodes=1", command="eval")
    with pytest.raises(EmbodyError, match=r"Cannot write recordings to .*video_cfg\.base_dir"):
        evaluate(cfg)
    assert not list(Path(tmp_path, "run").rglob("episodes.jsonl"))
