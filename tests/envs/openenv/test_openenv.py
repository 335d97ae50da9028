"""Environments of OpenEnv servers: messages, rewards, errors, and a training run on a real server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_server import HOSTILE, Parts, hostile_server, json_reply
from openenv_server import ACTION, OpenEnvServer, server
from settings import env_of

import embodyrl
from embodyrl.envs.openenv import session
from embodyrl.envs.openenv.environment import OpenEnv
from embodyrl.envs.openenv.factory import FACTORY
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError, EnvError
from embodyrl.text.messages import split_messages
from embodyrl.types import ChunkResult, EpisodeStart

PYTHON = os.environ.get("EMBODYRL_TEST_OPENENV")


@pytest.fixture
def place() -> Iterator[OpenEnvServer]:
    with server() as found:
        yield found


def begin(place: OpenEnvServer, env_indices: int = 2, **keys: Any) -> OpenEnv:
    given = {"url": place.url, "observation_key": "echo", "answer_timeout_s": 0.5, "connect_timeout_s": 2.0, **keys}
    env = FACTORY.make(env_of("openenv", **given), EnvContext(num_envs=env_indices))
    env.reset(
        list(range(env_indices)),
        [EpisodeStart(reset_id=7 + i, seed=0, max_episode_steps=9) for i in range(env_indices)],
    )
    return env


def reply(env: OpenEnv, *texts: str) -> ChunkResult:
    env_indices = list(range(len(texts)))
    env.set_replies(env_indices, texts, np.zeros(len(texts), np.bool_))
    tokens = np.full((len(texts), 4, 1), -1.0, np.float32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = 7.0
    return env.step_chunk(env_indices, tokens)


def test_openenv_reply_is_an_action_and_its_last_token_gets_the_reward(place: OpenEnvServer) -> None:
    env = begin(place, action={"tone": "calm"}, max_turns=2, reward_coef=2.0)
    assert sorted(place.seeds) == [7, 8]
    assert [split_messages(env.instruction(env_index))[0].content for env_index in (0, 1)] == ["say 7", "say 8"]
    result = reply(env, "ab", "win")
    assert sorted(action["message"] for action in place.actions) == ["ab", "win"]
    assert {action["tone"] for action in place.actions} == {"calm"}
    assert result.reward.tolist() == [[0, 1.0, 0, 0], [0, 0, 4.0, 0]]
    assert result.success.any(axis=1).tolist() == result.terminated.any(axis=1).tolist() == [False, True]
    assert not result.truncated.any()
    assert reply(env, "cd").truncated[0].tolist() == [False, True, False, False]
    env.close()


def test_openenv_prompt_contains_rules_history_and_truncated_observations(place: OpenEnvServer) -> None:
    env = begin(place, env_indices=1, prompt="Be loud.", history=1, max_turns=9, observation_bytes=16)
    for text in ("one", "x" * 40):
        reply(env, text)
    messages = [(m.role, m.content) for m in split_messages(env.instruction(0))]
    assert messages == [("system", "Be loud."), ("user", "one"), ("assistant", "x" * 40), ("user", "x" * 16)]
    assert len(env.instruction(0).encode()) <= env.spec.text.prompt_bytes
    env.close()


def test_observation_without_key_is_json_without_metadata(place: OpenEnvServer) -> None:
    env = begin(place, env_indices=1, observation_key=None)
    assert json.loads(split_messages(env.instruction(0))[0].content) == {"echo": "say 7", "inner": {"size": 5}}
    env.close()
    env = begin(place, env_indices=1, observation_key="inner.size")
    assert split_messages(env.instruction(0))[0].content == "5"
    env.close()
    with pytest.raises(
        EnvError, match=r"observation_key=inner.nope does not exist.*Choose one of: echo, inner, metadata"
    ):
        begin(place, env_indices=1, observation_key="inner.nope")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wait", r"no reply arrived within 0.5 s \(env.answer_timeout_s\)"),
        ("die", "the connection was closed"),
        ("fail", "the server reports: Invalid message message: too loud"),
        ("odd", "the message '<html>' is not in"),
        ("deep", r"the message '\[\["),
    ],
)
def test_openenv_error_names_the_address_of_the_server(place: OpenEnvServer, text: str, said: str) -> None:
    env = begin(place, env_indices=1)
    with pytest.raises(EnvError, match=rf"{place.url}.*{said}"):
        reply(env, text)
    env.close()


def test_openenv_session_limit_error_contains_the_fix() -> None:
    with server(sessions=1) as place, pytest.raises(EnvError, match=r"max_concurrent_envs.*total_num_envs"):
        begin(place, env_indices=2)


def test_missing_server_is_an_error_after_the_deadline() -> None:
    with server() as place:
        pass
    with pytest.raises(EnvError, match=r"No server answered.*connect_timeout_s"):
        FACTORY.spec(env_of("openenv", url=place.url, connect_timeout_s=0.1), EnvContext())


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE)
def test_unusable_action_schema_is_rejected(monkeypatch, parts: Parts) -> None:
    monkeypatch.setattr(session, "_MAX_BYTES", 1 << 22)
    with hostile_server(parts) as url, pytest.raises(EnvError, match=url):
        FACTORY.spec(env_of("openenv", url=url, connect_timeout_s=0.3), EnvContext())


@pytest.mark.parametrize(
    "schema", ["[]", '{"properties": []}', '{"properties": [], "required": ["a"]}', '{"required": 1}']
)
def test_malformed_action_schema_is_rejected(schema: str) -> None:
    reply = json_reply(b'{"action": %s}' % schema.encode())
    with hostile_server(lambda: reply) as url, pytest.raises(EnvError, match="does not return the schema"):
        FACTORY.spec(env_of("openenv", url=url, connect_timeout_s=0.3), EnvContext())


@pytest.mark.parametrize(
    ("fields", "keys", "said"),
    [
        (ACTION, {"action_key": "mesage"}, "no field mesage. Fields: message, tone"),
        (ACTION, {"action": {"tune": "calm"}}, "no field tune"),
        (ACTION | {"required": ["message", "tone"]}, {}, "Set env.action_key"),
        (
            ACTION | {"required": ["message", "tone"]},
            {"action_key": "message"},
            "require tone. Set its value in env.action",
        ),
        ({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, {}, "0 required text fields"),
    ],
)
def test_replies_must_match_the_action_schema_of_the_server(fields: dict, keys: dict, said: str) -> None:
    with server(fields) as place, pytest.raises(ConfigError, match=said):
        FACTORY.spec(env_of("openenv", url=place.url, **keys), EnvContext())


def test_missing_openenv_address_is_rejected() -> None:
    assert "env.url is not set" in FACTORY.validate(env_of("openenv"))[0]


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """Address of OpenEnv's own echo environment, as `openenv init` writes it, without the cap of newer versions."""
    if PYTHON is None:
        pytest.skip("EMBODYRL_TEST_OPENENV names no Python with openenv-core")
    folder = tmp_path / "openenv"
    folder.mkdir()
    tool = Path(PYTHON).with_name("openenv")
    subprocess.run([tool, "init", "echo_test"], cwd=folder, check=True, capture_output=True, timeout=300)
    app = folder / "echo_test" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=64"))
    (rules,) = app.parent.glob("*_environment.py")
    rules.write_text(rules.read_text().replace("min(length * 0.1, 1.0)", "length * 0.1"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "uvicorn", "echo_test.server.app:app", "--port", str(port)]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_language_model_learns_on_the_echo_environment(echo: str, tmp_path: Path) -> None:
    """The echo environment rewards each character with 0.1, so replies get longer."""
    words = ("env=text/openenv", f"env.url={echo}", "env.observation_key=echoed_message", "model=causal_lm_tiny")
    more = ("env.success_reward=2.35", "algorithm.sampling_params.max_new_tokens=24", "env.connect_timeout_s=120")
    short = ("runner.max_steps=12", "runner.val_check_interval=-1", "launcher=inline", f"runner.output_dir={tmp_path}")
    result = embodyrl.train(embodyrl.compose("train", *words, *more, *short))
    rows = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    success = [row["train/success_once"] for row in rows if "train/success_once" in row]
    assert np.mean(success[-3:]) > np.mean(success[:3]) + 0.2
