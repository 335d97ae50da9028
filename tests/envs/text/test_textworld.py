"""TextWorld's games: made by `tw-make`, played by commands, credited turn by turn."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gates import train_gate
from toy_runs import rows

from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.text.game import FACTORY, GameEnv, GameSettings
from embodyrl.errors import MissingDependencyError
from embodyrl.types import ChunkResult, EpisodeStart

SIZES = ("--world-size", "2", "--quest-length", "2", "--nb-objects", "4")


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("textworld", reason="TextWorld is not installed here")
    folder = tmp_path_factory.mktemp("games")
    make = Path(sys.executable).parent / "tw-make"
    for seed in ("3", "7"):
        subprocess.run([make, "custom", *SIZES, "--seed", seed, "--output", folder / f"{seed}.z8"], check=True)
    return folder


def play(env: GameEnv, *replies: str) -> ChunkResult:
    env.set_replies([*range(len(replies))], replies, np.zeros(len(replies), np.bool_))
    return env.step_chunk([*range(len(replies))], np.zeros((len(replies), 3, 1), np.float32))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generated_game_is_won_by_its_walkthrough(games: Path) -> None:
    cfg = GameSettings(env_type="text_game", id=str(games), max_turns=5)
    env = FACTORY.make(cfg, EnvContext(num_slots=2))
    starts = [EpisodeStart(reset_id=n, seed=n, max_episode_steps=15, ignore_terminations=False) for n in (0, 1)]
    env.reset([0, 1], starts)
    first, second = env.instruction(0), env.instruction(1)
    assert first != second, "the reset id chooses the game"
    assert "keycard" in first.split("Commands: ")[0]
    assert "take type K keycard" in first.split("Commands: ")[1]
    env.reset([1], [starts[0]])
    assert env.instruction(1) == first
    taken = play(env, "I take type K keycard.", "dance")
    assert taken.reward[:, -1].tolist() == [0.0, pytest.approx(-0.1)]
    assert "pick up" in env.instruction(0)
    assert env.instruction(1) == first, "a reply without a command leaves the game as it was"
    won = play(env, "unlock type K chest with type K keycard", "look")
    assert won.reward[:, -1].tolist() == [1.0, 0.0]
    assert won.terminated.any(axis=1).tolist() == won.success.any(axis=1).tolist() == [True, False]
    env.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_textworld_run_credits_each_turn(games: Path, tmp_path: Path) -> None:
    sizes = ("env.train.total_num_envs=8", "algorithm.group_size=4", "env.max_turns=3", "eval.episodes=2")
    sizes = (*sizes, "env.eval.total_num_envs=2", "runner.max_steps=1", "launcher=inline", "video=none")
    words = ("env=text/gym", f"env.id={games}", "env.kwargs={}", "model=causal_lm_tiny")
    result = train_gate(tmp_path, *words, *sizes, "actor.global_batch_size=8", "actor.micro_batch_size=8")
    assert result.last is not None
    assert any("train/success_once" in row or "train/return" in row for row in rows(result.run))


def test_missing_textworld_error_contains_the_package(tmp_path: Path) -> None:
    if find_spec("textworld") is not None:
        pytest.skip("TextWorld is installed")
    (tmp_path / "quest.z8").write_bytes(b"")
    with pytest.raises(MissingDependencyError, match="pip install textworld"):
        FACTORY.spec(GameSettings(env_type="text_game", id=str(tmp_path / "quest.z8")), EnvContext())
