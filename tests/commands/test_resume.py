"""Resumed runs match uninterrupted runs."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from processes import run_cli, start_cli
from toy_runs import comparable, resume_toy, rows, toy_config, toy_words, train_toy, weights

from embodyrl.commands.train import train
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.reports.card import build_card, format_card
from embodyrl.reports.page import write_report

WORDS = (
    "runner.deterministic=true",
    "runner.val_check_interval=2",
    "eval.episodes=4",
    "env.kwargs.goal=0.7",
    "actor.optim.lr=0.001",
    "actor.optim.schedule=constant",
    "runner.save_interval=1",
    "checkpoint.keep=2",
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("golden"), *WORDS, "runner.max_steps=4")


@pytest.mark.integration
def test_run_resumed_after_two_steps_matches_uninterrupted_run(golden, tmp_path):
    run = train_toy(tmp_path, *WORDS, "runner.max_steps=2")
    resume_toy(run, "runner.max_steps=4")
    # The short run validates after its last step, which is the schedule of the long run as well.
    assert comparable(run) == comparable(golden)
    assert weights(run, 4) == weights(golden, 4)
    training_state = "checkpoints/step_000004/training_state.safetensors"
    assert (run / training_state).read_bytes() == (golden / training_state).read_bytes()


def test_interrupted_validation_is_repeated_on_resume(golden, tmp_path):
    run = train_toy(tmp_path, *WORDS, "runner.max_steps=2")
    # What a signal in the validation of step 2 leaves: its row without results.
    kept = [
        row if row["step"] < 2 else {k: v for k, v in row.items() if not k.startswith(("eval/", "time/validate"))}
        for row in rows(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    resume_toy(run, "runner.max_steps=4")
    assert comparable(run) == comparable(golden)


def test_old_checkpoints_are_deleted_except_the_best(golden):
    kept = sorted(p.name for p in (golden / "checkpoints").iterdir())
    scores = {
        row["step"]: (row["eval/success_once"], row["eval/return"]) for row in rows(golden)[1:] if "eval/return" in row
    }
    best = max(scores, key=lambda step: (*scores[step], -step))
    assert kept == sorted({"step_000003", "step_000004", f"step_{best:06d}"})


def test_resuming_a_finished_run_changes_nothing(golden):
    before = (golden / "metrics.jsonl").read_bytes(), weights(golden, 4)
    resume_toy(golden)
    assert ((golden / "metrics.jsonl").read_bytes(), weights(golden, 4)) == before
    assert "no training steps are left: the run is at step 4 of 4" in (golden / "logs" / "events.log").read_text()


@pytest.mark.integration
def test_killed_run_resumes_to_identical_results(golden, tmp_path):
    gate = tmp_path / "gate"
    hold = (f"env.kwargs.once={gate}", "env.kwargs.fault=gate", "env.kwargs.at=85", "launcher.env_workers=1")
    words = toy_words(tmp_path, *WORDS, "runner.max_steps=4", *hold)
    command = start_cli("train", *words, cwd=tmp_path)
    command.wait_for(gate)
    command.process.send_signal(signal.SIGKILL)
    command.wait()
    run = tmp_path / "run"
    assert len(rows(run)) < 5
    assert (run / "checkpoints").is_dir(), "it was killed in the middle, not before the first step"
    done = run_cli("train", "--resume", str(run), "trust=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert comparable(run) == comparable(golden)
    assert weights(run, 4) == weights(golden, 4)


@pytest.mark.integration
def test_resume_continues_the_learning_rate_decay(tmp_path):
    words = (*WORDS, "actor.optim.schedule=linear", "runner.max_steps=4", "checkpoint.keep=4")
    whole = train_toy(tmp_path, *words, name="whole")
    halves = train_toy(tmp_path, *words, name="halves")
    # Back to where a crash in step 3 would have left it.
    for step in (3, 4):
        shutil.rmtree(halves / "checkpoints" / f"step_{step:06d}")
    resume_toy(halves)
    assert comparable(halves) == comparable(whole)
    assert weights(halves, 4) == weights(whole, 4)
    assert len({row["actor/lr"] for row in rows(whole) if "actor/lr" in row}) > 1


def test_resumed_run_uses_new_optimizer_settings(tmp_path):
    run = train_toy(tmp_path, *WORDS, "runner.max_steps=2")
    resume_toy(run, "runner.max_steps=3", "actor.optim.lr=0", "checkpoint.keep=3")
    assert rows(run)[-1]["actor/lr"] == 0
    assert weights(run, 3) == weights(run, 2)


@pytest.mark.integration
def test_resume_with_more_steps_uses_the_longer_lr_schedule(tmp_path):
    run = train_toy(tmp_path, *WORDS, "actor.optim.schedule=linear", "runner.max_steps=2")
    resume_toy(run, "runner.max_steps=4", "checkpoint.keep=3")
    assert weights(run, 3) != weights(run, 2), "the shorter schedule ended at 0"
    assert 0.25e-3 < rows(run)[3]["actor/lr"] <= 0.5e-3


def test_damaged_checkpoint_error_names_the_checkpoint(tmp_path):
    run = train_toy(tmp_path, *WORDS)
    victim = next((run / "checkpoints" / "step_000002" / "policy").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{victim.name}.*next older complete checkpoint is .*step_000001"):
        resume_toy(run, "runner.max_steps=3")
    assert not (run / "lock").exists()


def test_config_with_python_tags_is_rejected(tmp_path):
    run = train_toy(tmp_path, "runner.max_steps=1")
    canary = tmp_path / "canary"
    with open(run / "config.yaml", "a", encoding="utf-8") as f:
        f.write(f"custom: !!python/object/apply:os.system ['touch {canary}']\n")
    with pytest.raises(ConfigError, match=r"YAML tag .* is refused"):
        resume_toy(run)
    assert not canary.exists()


def test_run_starts_from_the_weights_of_another_run(tmp_path):
    source = train_toy(tmp_path, "runner.max_steps=1", "actor.optim.lr=0.001", "env.kwargs.goal=0.7", name="source")
    target = train(toy_config(tmp_path, f"ckpt={source}", "actor.optim.lr=0", "runner.max_steps=1", name="target")).run
    assert weights(target, 1) == weights(source, 1)


def test_resumed_run_keeps_its_adapted_kl_coefficient(tmp_path):
    kl = ("algorithm.kl_beta=0.1", "algorithm.kl_in_reward=true", "algorithm.kl_target=1.0", "algorithm.kl_horizon=10")
    run = train_toy(tmp_path, *WORDS, *kl, "runner.val_check_interval=-1", "runner.max_steps=2")
    resume_toy(run, "runner.max_steps=3")
    betas = [row["train/kl_beta"] for row in rows(run)]
    # Four episodes far below the target: a fifth of 4/10 less each time.
    assert betas == pytest.approx([0.1, 0.092, 0.08464], rel=1e-6)


@pytest.mark.integration
def test_single_task_curriculum_saves_outcomes_per_reset_id(tmp_path):
    """The curriculum samples by these outcomes; outcomes by task id would never be used."""
    words = ("env.kwargs.tasks=3", "env.train.task_ids=[1]", "algorithm.curriculum=1")
    run = train_toy(tmp_path, *words, "runner.max_steps=1", "runner.val_check_interval=-1")
    seen = json.loads((run / "checkpoints" / "step_000001" / "algorithm.json").read_text())["seen"]
    assert {*seen} <= {"4", "5", "6", "7"}
    assert sum(played for _, played in seen.values()) == 4


@pytest.mark.integration
def test_curriculum_counts_filtered_groups(tmp_path):
    """The outcomes are those of four failures and of the four episodes of refill groups."""
    words = ("env.kwargs.tasks=3", "env.kwargs.goal=99", "algorithm.curriculum=1", "algorithm.filter_refills=1")
    run = train_toy(tmp_path, *words, "algorithm.filter_rewards=[0.1,0.9]", "runner.max_steps=1")
    seen = json.loads((run / "checkpoints" / "step_000001" / "algorithm.json").read_text())["seen"]
    assert sum(played for _, played in seen.values()) == 8


@pytest.mark.integration
def test_a_resumed_run_keeps_its_reference_policy(golden, tmp_path):
    words = (*WORDS, f"ckpt={golden}", "algorithm.kl_beta=0.5", "runner.val_check_interval=-1")
    whole = train_toy(tmp_path, *words, "runner.max_steps=2", name="whole")
    half = train_toy(tmp_path, *words, "runner.max_steps=1", name="half")
    resume_toy(half, "runner.max_steps=2")
    assert weights(half, 2) == weights(whole, 2)


def test_lost_rows_of_metrics_are_reported_in_the_log_the_card_and_the_report(tmp_path):
    """The end of the file is zeros after a power cut; only the first of four steps is left."""
    run = train_toy(tmp_path, "runner.max_steps=4")
    metrics = run / "metrics.jsonl"
    assert build_card(run)["missing_rows"] == 0
    first, *later = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first + bytes(sum(map(len, later))))
    resume_toy(run, "runner.max_steps=5")
    assert [row["step"] for row in rows(run)] == [1, 5]
    warning = "metrics.jsonl has no rows of 3 earlier training steps"
    assert (run / "logs" / "events.log").read_text().count(warning) == 1
    card = build_card(run)
    assert card["missing_rows"] == 3
    assert "rows of 3 training steps are missing" in format_card(card)
    assert any("rows of 3 training steps are missing" in line for line in write_report([run], tmp_path / "page.html"))


def test_settings_edited_in_the_saved_config_are_reported_on_resume(tmp_path):
    run = train_toy(tmp_path, "actor.optim.lr=0.001")
    saved, events = run / "config.yaml", run / "logs" / "events.log"
    resume_toy(run, "runner.max_steps=3")
    assert "was changed since" not in events.read_text()
    saved.write_text(saved.read_text().replace("lr: 0.001", "lr: 0.5", 1))
    resume_toy(run, "runner.max_steps=4")
    assert "config.yaml was changed since step 3: actor.optim.lr=0.5 (was 0.001); training" in events.read_text()
