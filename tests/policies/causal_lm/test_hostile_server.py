"""A completions server that violates its protocol ends the command with an error that names the server."""

from __future__ import annotations

import json

import pytest
from hostile_server import HOSTILE, Parts, hostile_server, json_reply

from embodyrl.errors import EmbodyError
from embodyrl.policies.causal_lm import server


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE)
def test_unusable_list_of_models_is_rejected(monkeypatch, parts: Parts):
    monkeypatch.setattr(server, "_MAX_BYTES", 1 << 22)
    with hostile_server(parts) as url, pytest.raises(EmbodyError, match=f"server at rollout.url={url}/v1"):
        server.ServerEngine(f"{url}/v1", None, None, dtype="float32", sampling=None)


def test_server_without_models_is_rejected():
    with (
        hostile_server(lambda: json_reply(b'{"data": []}')) as url,
        pytest.raises(EmbodyError, match=f"rollout.url={url}/v1 serves no model"),
    ):
        server.ServerEngine(f"{url}/v1", None, None, dtype="float32", sampling=None)


@pytest.mark.parametrize("logprobs", [None, {}, {"top_logprobs": None}, {"top_logprobs": [["a"]]}])
def test_reply_without_top_tokens_is_rejected(logprobs):
    """A reply without tokens may have no log-probabilities either."""
    with pytest.raises(EmbodyError, match=r"does not return the 2 most probable tokens.*Set rollout\.logprobs=0"):
        server._parse_top_tokens({"token_ids": [], "logprobs": logprobs}, 2)


CHOICES = {
    "no choice": {"choices": []},
    "text instead of ids": {"choices": [{"token_ids": "abc", "logprobs": {"token_logprobs": [0.0, 0.0, 0.0]}}]},
    "names instead of ids": {"choices": [{"token_ids": ["a"], "logprobs": {"token_logprobs": [0.0]}}]},
    "negative id": {"choices": [{"token_ids": [-1], "logprobs": {"token_logprobs": [0.0]}}]},
    "huge id": {"choices": [{"token_ids": [1 << 40], "logprobs": {"token_logprobs": [0.0]}}]},
    "other lengths": {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [0.0]}}]},
    "no log-probabilities": {"choices": [{"token_ids": [1], "logprobs": [0.0]}]},
    "not a number": {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": ["high"]}}]},
    "no tokens": {"choices": [{"token_ids": [], "logprobs": {"token_logprobs": []}}]},
}


@pytest.mark.parametrize("answer", CHOICES.values(), ids=CHOICES)
def test_unusable_completion_is_rejected(answer):
    body = json.dumps({"data": [{"id": "tiny"}], **answer}).encode()
    with hostile_server(lambda: json_reply(body)) as url:
        engine = server.ServerEngine(f"{url}/v1", None, None, dtype="float32", sampling=None)
        with pytest.raises(EmbodyError, match=r"[Tt]he (server|model)"):
            engine.sync(None, 0, [1, 2], lambda probe, token: -1e9)


def test_slow_reply_has_a_deadline(monkeypatch):
    """A server that sends one byte at a time would otherwise extend the timeout with every byte."""
    monkeypatch.setattr(server, "REPLY_TIMEOUT_S", 0.5)
    parts = lambda: iter(lambda: b" ", None)  # noqa: E731
    head = [b"HTTP/1.1 200 OK\r\n\r\n"]
    with (
        hostile_server(lambda: (part for source in (head, parts()) for part in source)) as url,
        pytest.raises(EmbodyError, match=r"not complete after 0\.5 s"),
    ):
        server.ServerEngine(f"{url}/v1", None, None, dtype="float32", sampling=None)
