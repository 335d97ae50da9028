"""Gymnasium games as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from settings import env_of

from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.text.game import FACTORY, GameEnv
from embodyrl.errors import ConfigError, NoImageError
from embodyrl.text.messages import split_messages
from embodyrl.types import EpisodeStart

DOWN, RIGHT = "1", "2"
SOLUTION = [DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT]
"""Path through the four by four lake."""


def lake(**keys: Any) -> Any:
    given = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "unread_reward": -0.5, **keys}
    return env_of("text_game", **given)


def make(**keys: Any) -> GameEnv:
    env = FACTORY.make(lake(**keys), EnvContext(num_envs=2))
    env.reset([0, 1], [EpisodeStart(reset_id=i, seed=0, max_episode_steps=80) for i in (0, 1)])
    return env


def say(env: GameEnv, *replies: str) -> Any:
    env_indices = list(range(len(replies)))
    env.set_replies(env_indices, replies, np.zeros(len(replies), np.bool_))
    tokens = np.full((len(replies), 4, 1), -1.0, np.float32)
    for row, reply in enumerate(replies):
        tokens[row, : len(reply)] = 7.0
    return env.step_chunk(env_indices, tokens)


def test_game_is_won_by_action_words() -> None:
    env = make(reward_coef=2.0)
    assert "[S]FFF" in env.instruction(0)
    for turn, action in enumerate(SOLUTION):
        result = say(env, f"x {action}", "?")
        won = turn == len(SOLUTION) - 1
        assert result.terminated[0].tolist() == result.success[0].tolist() == [False, False, won, False]
        assert result.reward[0].tolist() == [0, 0, 2.0 * won, 0]
        assert result.reward[1].tolist() == [-1.0, 0, 0, 0], "a reply without an action costs and changes nothing"
        assert result.valid[0].tolist() == [True, True, True, False]
        assert not result.done[1]
    assert "[S]FFF" in env.instruction(1)
    env.close()


def test_game_has_no_image() -> None:
    with pytest.raises(NoImageError, match="video=none"):
        make().render(0)


def test_falling_into_a_hole_fails_and_the_turn_limit_truncates() -> None:
    env = make(max_turns=2)
    say(env, RIGHT, "")
    result = say(env, DOWN, "")
    assert result.terminated[0].any()
    assert not result.success.any()
    assert (result.truncated.any(axis=1)).tolist() == [False, True]
    env.close()


@pytest.mark.parametrize("reply", ["10", "21", "x1y", "1_0", "upright"])
def test_partial_words_are_not_actions(reply: str) -> None:
    """Fails where "10" is read as the actions 1 and 0."""
    env = make(action_words=["left", "1", "2", "right"])
    assert say(env, reply).reward[0].sum() == -0.5
    assert "[S]FFF" in env.instruction(0)
    env.close()


@pytest.mark.parametrize("reply", ["(1)", "1.", "**1**", "first 0, then 1!", "向1走"])
def test_action_word_is_found_between_punctuation(reply: str) -> None:
    env = make()
    assert say(env, reply).reward[0].sum() == 0.0
    env.close()


def test_prompt_contains_rules_and_history() -> None:
    env = make(prompt="Reach G.", history=1, words="test_text_game:place", action_words=["left", "down", "right", "up"])
    for word in ("down", "so: up or right"):
        say(env, word)
    told = [(m.role, m.content) for m in split_messages(env.instruction(0))]
    assert told == [("system", "Reach G."), ("user", "place 4"), ("assistant", "so: up or right"), ("user", "place 5")]
    assert len(env.instruction(0).encode()) <= env.spec.text.prompt_bytes
    env.close()


def test_episode_depends_on_its_reset_id_only() -> None:
    """Slippery lake, in which the seed determines the transitions."""
    env = make(kwargs={"is_slippery": True}, words="test_text_game:place", history=9)
    for reset_id in (3, 4):
        env.reset([0], [EpisodeStart(reset_id=reset_id, seed=9, max_episode_steps=80)])
        theirs = gymnasium.make("FrozenLake-v1", is_slippery=True)
        turns = [("user", place(*theirs.reset(seed=reset_id)))]
        over = False
        while not over:
            over = bool(say(env, RIGHT).done[0])
            seen, _, terminated, truncated, info = theirs.step(int(RIGHT))
            turns += [("assistant", RIGHT), ("user", place(seen, info))]
            assert [(m.role, m.content) for m in split_messages(env.instruction(0))] == turns[-19:]
            assert over == (terminated or truncated or len(turns) == 41)
    env.close()


def place(seen: Any, info: Any) -> str:
    return f"place {int(seen)}"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"id": "NoSuchGame-v1"}, "`NoSuchGame` doesn't exist"),
        ({"id": "no_such_module:Game-v0"}, "needs a package that is not installed"),
        ({"kwargs": {"map_name": "9x9"}}, "cannot be built"),
        ({"id": "CartPole-v1", "kwargs": {}}, r"no text rendering.*Set env\.words"),
        ({"id": "Blackjack-v1", "kwargs": {}}, r"no text rendering.*Set env\.words"),
        ({"kwargs": {"wind": 3}}, "cannot be built"),
        ({"action_words": ["left", "right"]}, "4 different words"),
        ({"id": "Pendulum-v1", "kwargs": {}, "words": "test_text_game:place"}, "not supported, only Discrete"),
    ],
)
def test_unsupported_text_games_are_rejected(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FACTORY.spec(lake(**keys), EnvContext())


def test_missing_game_id_is_rejected() -> None:
    assert "env.id is not set" in FACTORY.validate(lake(id=None))[0]


def test_action_words_of_a_textworld_game_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "game.z8").touch()
    assert FACTORY.validate(lake(id=str(tmp_path))) == []
    assert "lists its own commands" in FACTORY.validate(lake(id=str(tmp_path), action_words=["left"]))[0]
