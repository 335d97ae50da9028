"""OpenAI's chat completions of `embodyrl serve`: by raw HTTP, by the openai package, and as a command."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import bodies
from processes import run_cli, start_cli, wait_until
from settings import model_of

from embodyrl.config.shared import Precision
from embodyrl.extensions.chat.replies import Served
from embodyrl.extensions.chat.server import ChatServer
from embodyrl.extensions.conversation import Message, join_messages
from embodyrl.extensions.text.plan import ANY_TEXT
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.policy import CausalLMPolicy
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.remote.settings import ServeSettings
from embodyrl.types import Observation

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ m.content }}={% endfor %}"
)
LIMIT = 12


def build(**request: Any) -> CausalLMPolicy:
    cfg = model_of(model_type="causal_lm_tiny", precision=Precision.fp32, num_action_chunks=LIMIT)
    policy = POLICIES.get(cfg.model_type).build(cfg, PolicyRequest(env=ANY_TEXT, device="cpu", seed=3, **request))
    assert isinstance(policy, CausalLMPolicy)
    return policy


@pytest.fixture(scope="module")
def policy() -> CausalLMPolicy:
    return build(trainable=False)


@contextmanager
def serving(policy: CausalLMPolicy, **settings: Any) -> Iterator[int]:
    """Port of a server in this process."""
    cfg = ServeSettings(port=0, **settings)
    with ChatServer(Served(policy=policy, name="tiny", created=7), cfg, lambda _: None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def port(policy: CausalLMPolicy) -> Iterator[int]:
    with serving(policy) as port:
        yield port


def send(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, headers)
    reply = connection.getresponse()
    return reply.status, reply.read()


def chat(port: int, *turns: str, **more: Any) -> dict[str, Any]:
    """Body of a reply; the turns are those of the user and the assistant."""
    status, body = send(port, "POST", "/v1/chat/completions", asked(*turns, **more))
    assert status == 200, body
    return json.loads(body)


def asked(*turns: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"model": "tiny", "messages": messages, "max_tokens": LIMIT, **more}


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in body["choices"]]


def events(port: int, *turns: str, **more: Any) -> list[dict[str, Any]]:
    """Chunks of a streamed reply."""
    status, body = send(port, "POST", "/v1/chat/completions", asked(*turns, stream=True, **more))
    lines = body.decode().split("\n\n")
    assert (status, lines[-2:]) == (200, ["data: [DONE]", ""])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def greedy(policy: CausalLMPolicy, *turns: str) -> Any:
    """Output of `act`, which training and evaluation use."""
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=turn) for i, turn in enumerate(turns)]
    return policy.act(observation(join_messages(messages)), noise=None)


def observation(text: str) -> Observation:
    empty = np.zeros((1, 0, 0, 0, 3), np.uint8)
    return Observation(images=empty, state=np.zeros((1, 0), np.float32), instructions=(text,))


@pytest.mark.parametrize("turns", [("12=",), ("abc",), ("1+2=", "3", "4+5="), ("a" * 60,)])
def test_greedy_chat_reply_matches_the_evaluation(policy: CausalLMPolicy, port: int, turns: tuple[str, ...]):
    out = greedy(policy, *turns)
    body = chat(port, *turns, temperature=0, logprobs=True)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": out.replies[0], "refusal": None}
    assert choice["finish_reason"] == ("length" if out.cut_off[0] else "stop")
    tokens, prompt = int((out.tokens >= 0).sum()), int(out.cost[0]) - int((out.tokens >= 0).sum())
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": tokens + prompt}
    assert body["usage"] == usage
    given = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(given, out.logprob[0][: len(given)], atol=1e-4)


def test_streamed_chunks_join_to_the_whole_reply(port: int):
    sampled = {"temperature": 1.3, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 3}
    whole = chat(port, "12=", **sampled)
    chunks = events(port, "12=", **sampled, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [whole["usage"]]
    for index, choice in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine][-1] == choice["finish_reason"]
        entries = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        for entry in entries:
            best = [pair["logprob"] for pair in entry["top_logprobs"]]
            assert best == sorted(best, reverse=True)
            assert len(best) == 3
            assert entry["logprob"] <= best[0]


def test_log_probs_match_a_plain_forward_pass(policy: CausalLMPolicy, port: int):
    entries = chat(port, "12=", seed=1, temperature=2, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]
    ids = list(policy.read(observation("12="))[0])
    net: Any = policy.module
    for entry in entries["content"]:
        (token,) = policy.tokenizer.convert_tokens_to_ids([entry["token"]])
        told = net.lm(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert entry["logprob"] == pytest.approx(float(told[token]), abs=1e-4)
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(float(told.max()), abs=1e-4)
        ids.append(token)


def test_seed_determines_the_sample_and_choices_differ(port: int):
    first = texts(chat(port, "12=", seed=1, n=3))
    assert first == texts(chat(port, "12=", seed=1, n=3))
    assert len(set(first)) > 1
    assert first != texts(chat(port, "12=", seed=4, n=3))
    assert texts(chat(port, "12=", seed=1, top_k=1)) == texts(chat(port, "12=", temperature=0))
    assert texts(chat(port, "12=", seed=1, top_p=1e-6)) == texts(chat(port, "12=", temperature=0))


def test_stop_string_ends_the_reply_and_is_excluded(port: int):
    (whole,) = texts(chat(port, "12=", seed=1, min_tokens=8))
    assert texts(chat(port, "12=", seed=1, min_tokens=8, stop=whole[2:4])) == [whole], "too early"
    stop = whole[8:10]
    expected = whole[: whole.index(stop)]
    for stops in (stop, ["@@", stop]):
        body = chat(port, "12=", seed=1, min_tokens=8, stop=stops)
        assert texts(body) == [expected]
        assert body["choices"][0]["finish_reason"] == "stop"
        streamed = events(port, "12=", seed=1, min_tokens=8, stop=stops)
        parts = [c["choices"][0]["delta"].get("content", "") for c in streamed]
        assert "".join(parts) == expected, "no part of the stop string is sent before the rest arrives"


def test_models_endpoint_lists_the_served_model(port: int):
    card = {"id": "tiny", "object": "model", "created": 7, "owned_by": "embodyrl"}
    status, body = send(port, "GET", "/v1/models")
    assert (status, json.loads(body)) == (200, {"object": "list", "data": [card]})
    assert json.loads(send(port, "GET", "/v1/models/tiny")[1]) == card
    assert send(port, "GET", "/v1/models/other")[0] == 404
    assert send(port, "GET", "/health")[0] == 200


MESSAGE = {"role": "user", "content": "1"}
WRONG = {
    "unknown field": ({"tone": "kind"}, 400, "tone"),
    "missing messages": ({"messages": None}, 400, "messages"),
    "no messages": ({"messages": []}, 400, "messages"),
    "unknown role": ({"messages": [{"role": "robot", "content": "1"}]}, 400, "messages"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
    "too long": ({"messages": [{"role": "user", "content": "1" * 600}]}, 400, "messages"),
    "context": ({"max_tokens": 512}, 400, "max_tokens"),
    "two limits": ({"max_completion_tokens": 3}, 400, "max_tokens"),
    "temperature": ({"temperature": 2.1}, 400, "temperature"),
    "temperature as text": ({"temperature": "1"}, 400, "temperature"),
    "top_p": ({"top_p": 0}, 400, "top_p"),
    "many choices": ({"n": 9}, 400, "n"),
    "many stops": ({"stop": ["1", "2", "3", "4", "5"]}, 400, "stop"),
    "empty stop": ({"stop": ""}, 400, "stop"),
    "top_logprobs alone": ({"top_logprobs": 2}, 400, "top_logprobs"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "a"}}]}, 400, "tools"),
    "json schema": ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    "logit bias": ({"logit_bias": {"5": 10}}, 400, "logit_bias"),
    "other model": ({"model": "gpt"}, 404, "model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_chat_parameters_get_an_error_object(port: int, name: str):
    change, code, param = WRONG[name]
    status, body = send(port, "POST", "/v1/chat/completions", {**asked("1"), **change})
    error = json.loads(body)["error"]
    assert (status, error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert error["message"]
    assert ("not supported" in error["message"]) == (name in ("unknown field", "tools", "logit bias"))


def test_malformed_http_requests_get_an_error_object(port: int):
    path, body = "/v1/chat/completions", json.dumps(asked("1")).encode()
    deep = b"[" * 100_000
    found = [send(port, "POST", path, data)[0] for data in (b"{", b"[]", b"", deep, body.replace(b"12", b"NaN"))]
    assert found == [400] * 5
    assert send(port, "POST", "/v1/embeddings", body)[0] == 404
    assert send(port, "GET", path)[0] == 404
    assert send(port, "POST", path, body, Origin="http://127.0.0.1")[0] == 403
    status, data = send(port, "DELETE", "/v1/models/tiny")
    assert (status, json.loads(data)["error"]["param"]) == (501, None)
    for size in (str(2**40), "9" * 5000):
        assert send(port, "POST", path, b"", **{"Content-Length": size})[0] == 413
    assert texts(chat(port, "12=", temperature=0)), "the server still answers"


def test_every_request_body_gets_a_response(port: int, capfd):
    valid = asked("12=", "3", "4=", temperature=0.5, top_p=0.9, seed=3, n=2, stop=["1"], logprobs=True, top_logprobs=2)
    for body in bodies(valid | {"max_tokens": 2}, 500, seed=0):
        status, data = send(port, "POST", "/v1/chat/completions", body)
        assert status in (200, 400, 404), (body[:300], status, data[:300])
        assert status == 200 or json.loads(data)["error"]["message"], body[:300]
    assert texts(chat(port, "12=", temperature=0))
    assert "Traceback" not in capfd.readouterr().err


def test_chat_template_rejects_a_role_with_status_400(port: int, policy: CausalLMPolicy, tmp_path: Path):
    policy.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    cfg = model_of(model_type="causal_lm", path=str(tmp_path), precision=Precision.fp32, num_action_chunks=LIMIT)
    templated = POLICIES.get("causal_lm").build(cfg, PolicyRequest(env=ANY_TEXT, device="cpu", seed=0, trainable=False))
    assert isinstance(templated, CausalLMPolicy)
    with serving(templated) as other:
        assert texts(chat(other, "12", seed=2)) == texts(chat(port, "12=", seed=2)) != [""]
        for role in ("system", "developer"):
            turns = [{"role": role, "content": "1"}, MESSAGE]
            status, body = send(other, "POST", "/v1/chat/completions", {**asked("1"), "messages": turns})
            assert (status, "no system role" in json.loads(body)["error"]["message"]) == (400, True)


def test_disconnected_client_frees_its_slot(policy: CausalLMPolicy):
    with serving(policy, max_clients=1) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        endless = asked("12=", stream=True, n=8, min_tokens=400, max_tokens=400)
        connection.request("POST", "/v1/chat/completions", json.dumps(endless))
        reply = connection.getresponse()
        assert reply.read(6) == b"data: "
        status, body = send(port, "POST", "/v1/chat/completions", asked("1"))
        assert (status, json.loads(body)["error"]["type"]) == (503, "server_error")
        reply.close()
        connection.close()
        assert wait_until(lambda: send(port, "POST", "/v1/chat/completions", asked("1"))[0] == 200, 30)


def test_two_clients_receive_tokens_alternately(port: int):
    streams = []
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(asked("1", stream=True, n=4)))
        streams.append(connection)
    bodies = [connection.getresponse().read().decode() for connection in streams]
    assert all(body.endswith("data: [DONE]\n\n") for body in bodies)


def test_openai_client_gets_replies(port: int):
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list()] == ["tiny"]
    said = {"model": "tiny", "messages": [{"role": "user", "content": "12="}], "max_tokens": LIMIT, "seed": 3}
    whole = client.chat.completions.create(**said, logprobs=True, top_logprobs=1)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**said, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    again = [*said["messages"], whole.choices[0].message, {"role": "user", "content": "1"}]
    assert client.chat.completions.create(**{**said, "messages": again}).choices
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(**{**said, "model": "gpt"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**said, temperature=3)


@pytest.mark.integration
def test_serve_command_serves_a_checkpoint_until_a_signal(policy: CausalLMPolicy, tmp_path: Path):
    policy.save(tmp_path / "model")
    words = ("env=text/copy", "model=causal_lm", f"model.path={tmp_path / 'model'}", "model.precision=fp32")
    shown = run_cli("serve", *words, "--dry-run", cwd=tmp_path)
    assert "OpenAI chat completions" in shown.stdout
    assert (
        "serve.protocol can only be set for robot policies"
        in run_cli("serve", *words, "serve.protocol=openpi", "--dry-run", cwd=tmp_path).stderr
    )
    server = start_cli("serve", *words, "serve.port=0", "--json", cwd=tmp_path)
    try:
        server.wait_for(tmp_path / "stdout.txt", lines=1)
        said = json.loads(server.out.read_text())
        assert said["protocol"] == "openai"
        port = int(said["url"].removesuffix("/v1").rpartition(":")[2])
        body = {**asked("12=", temperature=0), "model": "model"}
        status, data = send(port, "POST", "/v1/chat/completions", body)
        assert status == 200
        assert texts(json.loads(data)) == list(greedy(policy, "12=").replies)
        server.signal_group(signal.SIGINT)
        assert server.wait(20) == 128 + signal.SIGINT
        assert "stopped by SIGINT" in server.printed
        assert "Traceback" not in server.printed
    finally:
        server.stop()
