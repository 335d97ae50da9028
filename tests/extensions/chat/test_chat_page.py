"""The chat page of `embodyrl play`: both models of a run, rewards, and the page in a browser."""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, browser
from fuzzing import bodies
from processes import run_cli
from toy_runs import train_toy

from embodyrl.commands.train import train
from embodyrl.errors import ConfigError
from embodyrl.extensions.chat.play import Chat, chat_page, page
from embodyrl.extensions.conversation import Message, join_messages
from embodyrl.extensions.pages.loopback import Loopback
from embodyrl.plan.config import load_config
from embodyrl.policies.causal_lm.stream import PromptError
from embodyrl.types import Observation

pytestmark = pytest.mark.integration
WORDS = ("env=text/copy", "model=causal_lm_tiny", "launcher=inline", "runner.logger.backends=[jsonl]")
SIZES = ("env.train.total_num_envs=16", "algorithm.group_size=4")
SIZES += ("actor.global_batch_size=16", "actor.micro_batch_size=16", "data.val_share=0.25")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step with a learning rate that changes the replies."""
    where = (f"runner.output_dir={tmp_path_factory.mktemp('runs')}", "runner.experiment_name=copies")
    steps = ("runner.max_steps=1", "runner.save_interval=1", "runner.val_check_interval=-1", "actor.optim.lr=0.1")
    return train(load_config("train", [*WORDS, *SIZES, *where, *steps, "reward.weights.overlap=1.0"])).run


@pytest.fixture
def chat(run: Path) -> Iterator[Chat]:
    found = chat_page(run, ())
    assert found is not None
    yield found.posts["/hello"].__self__
    found.close()


def ask(chat: Chat, text: str, **more: Any) -> dict[str, Any]:
    """Both replies, once they have ended."""
    turns = [{"role": "user", "content": text}]
    name = read(chat.ask({"start": turns, "trained": turns, **more}))
    told = read(chat.next(name))
    while not all(side["finish"] for side in told.values()):
        told = read(chat.next(name))
    return told


def read(answer: tuple[str, bytes]) -> dict[str, Any]:
    kind, body = answer
    assert kind == "application/json"
    return json.loads(body)


def test_chat_replies_come_from_the_initial_and_the_trained_weights(run: Path, chat: Chat):
    told = ask(chat, "abc=")
    text = join_messages([Message(role="user", content="abc=")])
    obs = Observation(
        images=np.zeros((1, 0, 0, 0, 3), np.uint8), state=np.zeros((1, 0), np.float32), instructions=(text,)
    )
    expected = {side: model.act(obs, noise=None).replies[0] for side, model in chat.models.items()}
    assert {side: reply["text"] for side, reply in told.items()} == expected
    before, after = (dict(model.module.named_parameters()) for model in chat.models.values())
    assert any((before[name] != after[name]).any() for name in before), "the weights of the checkpoint are loaded"


def test_chat_replies_get_the_reward_of_the_run(chat: Chat):
    told = ask(chat, "abc=", reference="")
    (without,) = {side["reward"] is None for side in ask(chat, "abc=").values()}
    assert without, "without a reference there is no reward"
    for side in told.values():
        assert set(side["reward"]["parts"]) == {"exact", "overlap", "errors"}
        right = ask(chat, "abc=", reference=side["text"])
        assert any(s["reward"]["success"] for s in right.values() if s["text"] == side["text"] != "")


def test_chat_rows_are_sampled_from_held_out_rows(run: Path, chat: Chat):
    assert read(chat.hello({})) == {
        **{"run": run.name, "sides": ["start", "trained"], "rows": True, "rewards": True},
        "limit": chat.limit,
    }
    assert chat.rows is not None
    held = {chat.rows[i].reference for i in range(len(chat.rows) - chat.rows.held_out, len(chat.rows))}
    for _ in range(20):
        row = read(chat.row({}))
        assert row["messages"][-1]["role"] == "user"
        assert row["reference"] in held


@pytest.mark.parametrize(
    "change",
    [
        {"start": []},
        {"start": [{"role": "robot", "content": "1"}]},
        {"start": [{"role": "user"}]},
        {"start": [{"role": "user", "content": "\ud800"}]},
        {"temperature": 3},
        {"temperature": "1"},
        {"limit": 0},
        {"limit": True},
        {"reference": 3},
    ],
)
def test_invalid_chat_page_requests_are_rejected(chat: Chat, change: dict[str, Any]):
    turns = [{"role": "user", "content": "1"}]
    with pytest.raises(ValueError, match=r"."):
        chat.ask({"start": turns, "trained": turns, **change})
    with pytest.raises(ValueError, match="complete"):
        chat.next({"name": "other"})


def test_every_chat_page_request_gets_a_response(chat: Chat, capfd):
    turns = [
        {"role": "user", "content": "12="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4="},
    ]
    valid = {"start": turns, "trained": turns, "temperature": 0.5, "limit": 3, "reference": "12", "name": "a"}
    with Loopback(0, {}, chat.posts) as server:
        thread = threading.Thread(target=server.answer_forever)
        thread.start()
        try:
            for number, body in enumerate(bodies(valid, 500, seed=1)):
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
                name = ("/ask", "/ask", "/next", "/row", "/hello")[number % 5]
                connection.request("POST", name, body, {"X-Token": server.token})
                answer = connection.getresponse()
                assert answer.status in (200, 400), (name, body[:300], answer.status, answer.read()[:300])
                answer.read()
                connection.close()
        finally:
            server.stop()
            thread.join()
    assert "Traceback" not in capfd.readouterr().err


def test_a_prompt_longer_than_the_context_is_rejected(chat: Chat):
    with pytest.raises(PromptError, match="context"):
        ask(chat, "1" * 600)


def test_runs_of_other_policies_have_no_chat_page(tmp_path: Path):
    assert chat_page(train_toy(tmp_path, "runner.max_steps=1", "runner.val_check_interval=-1"), ("trust=true",)) is None


def test_a_chat_cannot_be_recorded(run: Path, tmp_path: Path):
    failed = run_cli("play", str(run), "--record", "demos", cwd=tmp_path)
    assert failed.returncode == ConfigError.exit_code
    assert "has no environment steps to record" in failed.stderr


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver on this machine")
@pytest.mark.parametrize("width", [1280, 400])
def test_page_shows_both_replies_with_rewards(chat: Chat, tmp_path: Path, width: int):
    server = Loopback(0, {"/": page}, chat.posts)
    thread = threading.Thread(target=server.answer_forever)
    thread.start()
    try:
        with browser(tmp_path / "profile", width=width) as window:
            window.open(server.url)
            window.until("document.querySelectorAll('section').length == 2")
            window.click("#row")
            window.until("document.getElementById('words').value && document.getElementById('reference').value")
            window.click("#send")
            window.until("document.querySelectorAll('.facts b').length == 2")
            window.write("#words", "12=")
            window.click("#send")
            window.until("document.querySelectorAll('.turn.assistant').length == 4")
            window.until("!document.getElementById('send').disabled")
            assert window.run("return document.querySelectorAll('.turn.user').length") == 4
            assert window.run("return document.querySelectorAll('.facts b').length") == 2, "a reference is used once"
            assert window.run("return document.documentElement.scrollWidth") <= width
            image = window.command("Page.captureScreenshot")["data"]
            (tmp_path / "page.png").write_bytes(base64.b64decode(image))
            window.write("#words", "1" * 600)
            window.click("#send")
            window.until("document.getElementById('problem').textContent.includes('context')")
            assert window.run("return document.querySelectorAll('.turn').length") == 8, "the message was not sent"
            window.click("#clear")
            window.until("document.querySelectorAll('.turn').length == 0")
    finally:
        server.stop()
        thread.join()
        server.server_close()
