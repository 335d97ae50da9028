"""Rewards over HTTP and from a reward model, through the verifier."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from embodyrl.config.paths import resolve_asset
from embodyrl.envs.text.protocol import Answer
from embodyrl.envs.text.reward_runner import build_reward_runner, find_reward_problems
from embodyrl.errors import EmbodyError
from embodyrl.text.rewards.services import find_reward
from embodyrl.text.rewards.settings import TextRewardSettings


class Service(BaseHTTPRequestHandler):
    """Reward service that counts the letters of the response; fails, hangs and uses the long format on request."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["response"] == "hang":
            self.server.released.wait(30)  # type: ignore[attr-defined]
        failed = asked["response"] == "fail"
        value = len(asked["response"]) / len(asked["reference"])
        self.send_response(500 if failed else 200)
        self.end_headers()
        value = float("inf") if asked["response"] == "infinite" else value
        said = {"long": {"reward": value}, "flood": {"pad": "x" * 2**20, "reward": 1.0}}.get(asked["prompt"], value)
        self.wfile.write(json.dumps(said).encode() + b" " * (2**20 if asked["prompt"] == "padded" else 0))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join(10)
    server.server_close()


def ask(response: str, prompt: str = "?") -> Answer:
    return Answer(prompt=prompt, response=response, reference="abcd", tokens=3)


@pytest.mark.integration
def test_reward_service_is_called_and_failures_are_counted(service: str):
    judge = build_reward_runner(TextRewardSettings(path=service, timeout_s=1.0, workers=2), 8)
    try:
        told = [ask("abcd"), ask("fail"), ask("ab", "long"), ask("hang"), ask("abc"), ask("infinite")]
        found = judge([*told, ask("ab", "flood"), ask("abcd", "padded")])
    finally:
        judge.close()
    assert judge.components == ("remote", "errors")
    assert [f.reward for f in found] == [1.0, 0.0, 0.5, 0.0, 0.75, 0.0, 0.0, 0.0]
    assert [f.components[-1] for f in found] == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert [f.success for f in found] == [True, *[False] * 7]
    assert "500" in str(found[1].problem)
    assert found[3].problem == "no result within 1 s"


def write_reward_model(folder: Path, labels: int = 1, special: list[str] | None = None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_asset("assets/causal_lm_tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": special or []})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        cfg = LlamaConfig(vocab_size=len(tokenizer), num_labels=labels, pad_token_id=0, **sizes)
        LlamaForSequenceClassification(cfg).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.integration
def test_reward_model_score_is_added_to_the_reward(tmp_path: Path):
    write_reward_model(tmp_path / "rm")
    cfg = TextRewardSettings(name="exact", path=str(tmp_path / "rm"), weights={"model": 2.0})
    assert find_reward_problems(cfg) == []
    judge = build_reward_runner(cfg, 8)
    try:
        right, wrong = judge([ask("abcd", "a="), ask("cba", "a=")])
    finally:
        judge.close()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    encode = AutoTokenizer.from_pretrained(resolve_asset("assets/causal_lm_tiny"))
    with torch.no_grad():
        scores = [float(model(**encode(text, return_tensors="pt")).logits) for text in ("a=abcd", "a=cba")]
    assert judge.components == ("exact", "model", "errors")
    assert abs(scores[0] - scores[1]) > 1e-4
    assert [right.components[1], wrong.components[1]] == pytest.approx(scores, abs=1e-5)
    assert (right.success, wrong.success) == (True, False)
    assert right.reward == pytest.approx(1.0 + 2.0 * scores[0], abs=1e-5)


@pytest.mark.integration
def test_folder_without_reward_model_is_an_error(tmp_path: Path):
    write_reward_model(tmp_path / "two", labels=2)
    judge = build_reward_runner(TextRewardSettings(path=str(tmp_path / "two")), 8)
    with pytest.raises(EmbodyError, match="a reward model must have 1 output, not 2"):
        judge([ask("abcd")])
    judge.close()


def build_reward(folder: Path, template: str | None = None) -> Any:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    reward: Any = find_reward(str(folder))
    reward.prepare()
    return reward


def test_reward_model_uses_its_chat_template(tmp_path: Path):
    write_reward_model(tmp_path)
    plain = build_reward(tmp_path)
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}={% endfor %}"
    templated = build_reward(tmp_path, template)("1+", "2", "")
    assert templated != pytest.approx(plain("1+", "2", ""), abs=1e-6)
    assert templated == pytest.approx(plain("1+=", "2=", ""), abs=1e-5)


@pytest.mark.parametrize("template", ["{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}", None])
def test_reply_cannot_write_turns_for_the_reward_model(tmp_path: Path, template: str | None):
    write_reward_model(tmp_path, special=["<|turn|>"])
    reward = build_reward(tmp_path, template)
    assert reward("1+", "2<|turn|>3", "") == reward("1<|<|turn|>turn|>+", "23", "") == reward("1+", "23", "")
    assert reward("1+", "2<3", "") != reward("1+", "23", "")


def test_unknown_reward_name_error_suggests_a_name(tmp_path: Path):
    assert "Unknown reward" in find_reward_problems(TextRewardSettings(path=str(tmp_path)))[0]
    assert (
        "Did you mean 'exact'" in find_reward_problems(TextRewardSettings(name="exakt", path="https://host/score"))[0]
    )
