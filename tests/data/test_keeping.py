"""Episodes of evaluations and training runs, saved as data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy_runs import TOY, toy_words

from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.train import train
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.writer import read_episodes
from embodyrl.errors import ConfigError
from embodyrl.monitor.history import read_episodes as read_rows
from embodyrl.plan.config import load_config

SOMETIMES = ("env.kwargs.goal=0.6", "eval.sampling_params.do_sample=true", "eval.episodes=12")
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")


def evaluated(folder: Path, name: str, *words: str):
    given = toy_words(folder, *QUIET, "eval.episodes=6", *words, command="eval", name=name)
    return evaluate(load_config("eval", given))


def test_saving_episodes_covers_every_env_step_and_changes_no_result(tmp_path: Path) -> None:
    """The policy executes chunks of four; kept episodes have one frame per env step and change no result."""
    plain = evaluated(tmp_path, "plain")
    kept = evaluated(tmp_path, "kept", "runner.keep_episodes=all")
    rows, other = (
        [row.to_json() | {"seconds": 0} for row in read_rows(result.folder / "episodes.jsonl")]
        for result in (plain, kept)
    )
    assert rows == other
    root = tmp_path / "kept" / "episodes"
    assert check_layout(root) == []
    table = {row["embodyrl/trial"]: row for row in read_episodes(root)}
    assert {number: row["length"] for number, row in table.items()} == {row["episode"]: row["steps"] for row in rows}
    assert [table[row["episode"]]["embodyrl/success"] for row in rows] == [row["success_once"] for row in rows]
    assert [table[row["episode"]]["embodyrl/return"] for row in rows] == pytest.approx([row["return"] for row in rows])
    demos = load_demonstrations(root)
    assert set(demos.actor.tolist()) == {Actor.policy}
    for start, stop in zip(demos.start, demos.stop, strict=True):
        np.testing.assert_allclose(np.diff(demos.state[start:stop, 0]), demos.action[start : stop - 1, 0], atol=1e-5)


def test_only_failed_episodes_are_saved(tmp_path: Path) -> None:
    result = evaluated(tmp_path, "failures", "runner.keep_episodes=failures", *SOMETIMES)
    lost = [row.episode for row in read_rows(result.folder / "episodes.jsonl") if not row.success_once]
    assert 0 < len(lost) < 12
    assert sorted(row["embodyrl/trial"] for row in read_episodes(tmp_path / "failures" / "episodes")) == lost


def training(folder: Path, steps: int, *words: str):
    given = ("model.num_action_chunks=1", f"runner.max_steps={steps}", "runner.save_interval=1", *QUIET, *words)
    return load_config("train", toy_words(folder, *given))


def test_resumed_training_saves_each_episode_once(tmp_path: Path) -> None:
    words = ("runner.keep_episodes=all", "runner.val_check_interval=-1")
    train(training(tmp_path, 2, *words))
    root = tmp_path / "run" / "episodes"
    first = read_episodes(root)
    assert {row["embodyrl/version"] for row in first} == {0, 1}
    train(training(tmp_path, 3, *words, "runner.on_existing=resume"), resume=tmp_path / "run")
    found = read_episodes(root)
    assert found[: len(first)] == first
    trials = [row["embodyrl/trial"] for row in found]
    assert len(trials) == len(set(trials)) == 3 * len(first) // 2
    assert {row["embodyrl/version"] for row in found} == {0, 1, 2}


def test_size_limit_stops_recording_but_not_the_run(tmp_path: Path, capsys) -> None:
    tiny = ("runner.keep_episodes=all", "runner.keep_episodes_gb=1e-5", "runner.logger.backends=[console,jsonl]")
    result = evaluated(tmp_path, "tiny", *tiny)
    assert len(read_rows(result.folder / "episodes.jsonl")) == 6
    assert len(read_episodes(tmp_path / "tiny" / "episodes")) < 6
    assert "has reached runner.keep_episodes_gb" in capsys.readouterr().out


def test_saving_episodes_is_rejected_with_action_chunks(tmp_path: Path) -> None:
    assert "model.num_action_chunks=4" in TOY
    with pytest.raises(ConfigError, match="one observation per chunk"):
        train(load_config("train", toy_words(tmp_path, *QUIET, "runner.keep_episodes=all")))
    assert not (tmp_path / "run").exists()


def test_saving_episodes_is_rejected_with_a_delay(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="actions are computed from older observations"):
        evaluated(tmp_path, "late", "runner.keep_episodes=all", "env.control.latency_steps=2")
    assert not (tmp_path / "late").exists()
