"""Chat page of `embodyrl play`: the initial and the trained model of a run side by side, with rewards."""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.commands.run_folder import first_weights
from embodyrl.envs.text.protocol import Answer as Reply
from embodyrl.extensions.cockpit.command import PlayPage
from embodyrl.extensions.conversation import MARK, Message
from embodyrl.extensions.pages.loopback import Answer
from embodyrl.extensions.text.plan import ANY_TEXT, checked_rows
from embodyrl.extensions.text.rewards.judge import RewardJudge, build_judge
from embodyrl.files import available_cores
from embodyrl.plan.config import load_saved_config
from embodyrl.plan.saved import read_saved
from embodyrl.plan.schema import Config
from embodyrl.plan.weights import resolve_weights
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm import CausalLMFactory
from embodyrl.policies.protocol import PolicyRequest

if TYPE_CHECKING:
    from embodyrl.extensions.text.dataset import TextRows
    from embodyrl.policies.causal_lm.policy import CausalLMPolicy
    from embodyrl.policies.causal_lm.stream import Piece

SIDES = ("start", "trained")
_SLICE_S = 0.15
"""Maximum time to generate tokens for one request of the page, in seconds."""
_OPEN = 8
"""Maximum number of requests with replies in progress; a further request cancels the oldest."""
_ROLES = ("system", "user", "assistant", "tool")
_MOST_TOKENS, _MOST_TURNS, _MOST_TEMPERATURE = 4096, 200, 2.0


def chat_page(run: Path, trust: Sequence[str]) -> PlayPage | None:
    """Return the chat page of a run with its initial and trained model; None if the policy is not a language model.

    Raises:
        EmbodyError: weights, rows or rewards cannot be loaded.
    """
    named = [str(setting.value) for setting in read_saved(run / "config.yaml") if setting.key == "model.model_type"]
    # A policy class of the user is not imported without trust.
    if not named or ":" in named[-1] or not isinstance(POLICIES.get(named[-1]), CausalLMFactory):
        return None
    cfg = load_saved_config(run, trust)
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(available_cores())
    models = {"start": _policy(cfg, first_weights(cfg, ANY_TEXT)), "trained": _policy(cfg, resolve_weights(str(run)))}
    rows = judge = None
    if cfg.reads_rows:
        rows = checked_rows(cfg, cfg.data, json_answers=True)
        judge = build_judge(cfg.reward, cfg.model.num_action_chunks)
    chat = Chat(run.name, models, rows, judge, limit=cfg.model.num_action_chunks if cfg.reads_rows else 256)
    return PlayPage(gets={"/": page}, posts=chat.posts, close=chat.close)


def _policy(cfg: Config, weights: Path | None) -> CausalLMPolicy:
    from embodyrl.policies.causal_lm.policy import CausalLMPolicy
    from embodyrl.policies.tensors import best_device

    request = PolicyRequest(env=ANY_TEXT, device=best_device(), seed=cfg.seed, trainable=False)
    policy = POLICIES.get(cfg.model.model_type).build(cfg.model, request)
    assert isinstance(policy, CausalLMPolicy), "built by its factory"
    if weights is not None:
        policy.load_weights(weights)
    return policy


def page() -> Answer:
    """Return the content type and the HTML of the chat page."""
    return "text/html; charset=utf-8", files("embodyrl.extensions.chat").joinpath("play.html").read_bytes()


@dataclass
class _Side:
    """Reply in progress of one of the two models."""

    pieces: Iterator[Piece]
    asked: str
    """Last message that is not a system message; an input of the reward function."""
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    reward: Mapping[str, Any] | None = None


@dataclass
class Chat:
    """Request handlers of the chat page, which shows random rows of the data and streams replies of both models."""

    name: str
    models: Mapping[str, CausalLMPolicy]
    rows: TextRows | None
    judge: RewardJudge | None
    limit: int
    """Default maximum number of tokens of a reply."""
    _open: OrderedDict[str, tuple[dict[str, _Side], str | None]] = field(default_factory=OrderedDict)
    """Reply in progress of each model, and reference answer, by the id that `ask` returned."""

    @property
    def posts(self) -> dict[str, Any]:
        """Handlers of POST requests by URL path."""
        return {"/hello": self.hello, "/row": self.row, "/ask": self.ask, "/next": self.next}

    def hello(self, body: dict[str, Any]) -> Answer:
        """Return the name of the run and the initial settings of the page."""
        held = self.rows is not None and not self.rows.pictures
        return _json({"run": self.name, "sides": SIDES, "rows": held, "rewards": bool(self.judge), "limit": self.limit})

    def row(self, body: dict[str, Any]) -> Answer:
        """Return the messages and the reference answer of a random row, which is held out from training if possible."""
        if self.rows is None or self.rows.pictures:
            raise ValueError("this run has no text-only data set and therefore no rows to show; type a prompt instead")
        total, held = len(self.rows), self.rows.held_out
        row = self.rows[random.randrange(total - held if held else 0, total)]
        messages = [{"role": m.role, "content": m.content} for m in row.messages]
        return _json({"messages": messages, "reference": row.reference})

    def ask(self, body: dict[str, Any]) -> Answer:
        """Start the reply of each model to the conversation in the request; return an id for `next`."""
        from embodyrl.config.shared import SamplingSettings
        from embodyrl.policies.causal_lm.stream import context_length, read_prompt, stream

        temperature, limit = body.get("temperature", 0), body.get("limit", self.limit)
        if not isinstance(temperature, int | float) or not 0 <= temperature <= _MOST_TEMPERATURE:
            raise ValueError(f"'temperature' must be a number from 0 to {_MOST_TEMPERATURE:g}")
        if type(limit) is not int or not 1 <= limit <= _MOST_TOKENS:
            raise ValueError(f"'limit' must be an integer from 1 to {_MOST_TOKENS}")
        reference = body.get("reference")
        if reference is not None and not isinstance(reference, str):
            raise ValueError("'reference' must be a string or null")
        seed, sides = secrets.randbits(62) if temperature else None, {}
        for side, policy in self.models.items():
            messages = _messages(body, side)
            prompt = read_prompt(policy, messages)
            room = (context_length(policy) or sys.maxsize) - len(prompt)
            sampling = SamplingSettings(temperature=float(temperature) or 1.0)
            pieces = stream(policy, prompt, sampling, limit=min(limit, room), seed=seed)
            sides[side] = _Side(pieces, next((m.content for m in messages[::-1] if m.role != "system"), ""))
        name = secrets.token_hex(8)
        self._open[name] = sides, reference
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return _json({"name": name})

    def next(self, body: dict[str, Any]) -> Answer:
        """Generate tokens with both models in turn for a short time; return the replies so far."""
        name = body.get("name")
        if not isinstance(name, str) or name not in self._open:
            raise ValueError("the reply is complete or was cancelled; send the message again")
        sides, reference = self._open[name]
        until = time.monotonic() + _SLICE_S
        while (going := [side for side in sides.values() if side.finish is None]) and time.monotonic() < until:
            for side in going:
                piece = next(side.pieces)
                side.text, side.tokens, side.finish = side.text + piece.text, side.tokens + 1, piece.finish
                if side.finish is not None and self.judge is not None and reference is not None:
                    side.reward = self._reward(side, reference)
        if not going:
            del self._open[name]
        keys = ("text", "tokens", "finish", "reward")
        return _json({name: {key: getattr(side, key) for key in keys} for name, side in sides.items()})

    def _reward(self, side: _Side, reference: str) -> dict[str, Any]:
        assert self.judge is not None
        answer = Reply(prompt=side.asked, response=side.text, reference=reference, tokens=side.tokens)
        (judged,) = self.judge([answer])
        parts = dict(zip(self.judge.components, judged.components, strict=True))
        return {"total": judged.reward, "success": judged.success, "problem": judged.problem, "parts": parts}

    def close(self) -> None:
        """Stop the processes of the reward functions."""
        if self.judge is not None:
            self.judge.close()


def _messages(body: dict[str, Any], side: str) -> list[Message]:
    """Return the conversation with the model `side` from a request.

    Raises:
        ValueError: the request is malformed.
    """
    given = body.get(side)
    if not isinstance(given, list) or not 1 <= len(given) <= _MOST_TURNS:
        raise ValueError(f"'{side}' must be a list of 1 to {_MOST_TURNS} messages")
    found = []
    for turn in given:
        content = turn.get("content") if isinstance(turn, dict) else None
        if not isinstance(content, str) or turn.get("role") not in _ROLES:
            raise ValueError(
                f"each message of '{side}' must have a 'role' ({', '.join(_ROLES)}) and a 'content' string"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in content):
            raise ValueError(f"a message of '{side}' is not valid Unicode: it contains an unpaired surrogate")
        found.append(Message(role=turn["role"], content=content.replace(MARK, "")))
    return found


def _json(value: Any) -> Answer:
    return "application/json", json.dumps(value).encode()
