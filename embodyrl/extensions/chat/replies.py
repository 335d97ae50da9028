"""Replies of a language model in OpenAI's chat completions format."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from embodyrl.extensions.chat.requests import ApiError, ChatRequest
from embodyrl.policies.causal_lm.stream import Piece, PromptError, context_length, read_prompt, stream

if TYPE_CHECKING:
    from embodyrl.policies.causal_lm.policy import CausalLMPolicy

_LEAST_LOGPROB = -9999.0
"""Log-probability in replies for a token with probability 0, as in OpenAI's API; JSON cannot represent -inf."""
_UNKNOWN_ROOM = 4096
"""Default of max_tokens for a model whose config has no context length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Language model, and its name in requests."""

    policy: CausalLMPolicy
    name: str
    created: int
    """Unix time at which the server started, in seconds."""

    @property
    def card(self) -> dict[str, Any]:
        """Entry of this model in the reply to GET /v1/models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "embodyrl"}


@dataclass
class Completion:
    """Generation of the `n` replies (choices) of one request, and their encoding as JSON bodies."""

    served: Served
    request: ChatRequest
    prompt: list[int]
    limit: int
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    tokens: int = 0
    """Number of generated tokens, over all choices."""

    @classmethod
    def begin(cls, served: Served, request: ChatRequest) -> Completion:
        """Tokenize the prompt of a request, and check that prompt and reply fit into the context.

        Raises:
            ApiError: the request names another model, the chat template rejects the prompt, or prompt and reply exceed
                the context length.
        """
        if request.model != served.name:
            text = f"The model '{request.model}' does not exist; this server has '{served.name}'."
            raise ApiError(404, text, param="model", code="model_not_found")
        try:
            prompt = read_prompt(served.policy, request.conversation)
        except PromptError as error:
            code = "context_length_exceeded" if "context" in str(error) else None
            raise ApiError(400, f"{error}.", param="messages", code=code) from error
        context = context_length(served.policy)
        room = _UNKNOWN_ROOM if context is None else context - len(prompt)
        limit = request.limit or room
        if context is not None and limit > room:
            raise ApiError(
                400,
                f"max_tokens={limit} plus {len(prompt)} tokens of the messages exceed the context of {context} tokens. "
                "Lower max_tokens, or shorten the messages.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return cls(served, request, prompt, limit)

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Generate the requested number of replies one after another; yield (index of the reply, piece of text)."""
        seed = secrets.randbits(62) if self.request.seed is None else self.request.seed
        for index in range(self.request.n or 1):
            yield from (
                (index, piece)
                for piece in stream(
                    self.served.policy,
                    self.prompt,
                    self.request.sampling,
                    limit=self.limit,
                    seed=None if self.request.greedy else (seed + index) % 2**63,
                    top=self.request.top_logprobs or 0,
                )
            )

    def whole(self, pieces: Sequence[tuple[int, Piece]]) -> dict[str, Any]:
        """Return the JSON body of a reply that is not streamed."""
        choices = []
        for index in range(self.request.n or 1):
            mine = [piece for i, piece in pieces if i == index]
            message = {"role": "assistant", "content": "".join(p.text for p in mine), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(mine),
                    "finish_reason": mine[-1].finish,
                }
            )
        self.tokens = len(pieces)
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage}

    def chunks(self, pieces: Iterator[tuple[int, Piece]]) -> Iterator[dict[str, Any]]:
        """Yield the JSON body of each chunk of a streamed reply."""
        started = -1
        for index, piece in pieces:
            self.tokens += 1
            if index != started:
                started = index
                yield self._chunk(index, {"role": "assistant", "content": ""})
            if piece.text or self.request.logprobs:
                yield self._chunk(index, {"content": piece.text}, logprobs=self._logprobs([piece]))
            if piece.finish:
                yield self._chunk(index, {}, finish=piece.finish)
        if self._counts:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of prompt, completion and total tokens, as in OpenAI's field `usage`."""
        total = len(self.prompt) + self.tokens
        return {"prompt_tokens": len(self.prompt), "completion_tokens": self.tokens, "total_tokens": total}

    @property
    def _counts(self) -> bool:
        return self.request.stream_options is not None and self.request.stream_options.include_usage

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    def _chunk(
        self, index: int, delta: dict[str, str], *, logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._counts else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {
            "content": [
                self._entry(p.token, p.logprob) | {"top_logprobs": [self._entry(*pair) for pair in p.top]}
                for p in pieces
                if not p.is_end
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.served.policy.tokenizer.decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(text.encode())}
