"""Requests and errors of OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embodyrl.config.shared import SamplingSettings
from embodyrl.extensions.conversation import MARK, Message

MOST_CHOICES, MOST_TOP, MOST_STOPS = 8, 20, 4
"""Maximum `n`, maximum `top_logprobs`, and maximum number of `stop` strings of a request."""
_ROLES = {"developer": "system"}
"""Role in chat templates for each OpenAI role that chat templates do not support."""


class ApiError(Exception):
    """Error that the server returns as an HTTP status and an OpenAI error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the reply: OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _TextPart(_Part):
    type: Literal["text"]
    text: str


_Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""Type of a list that must be empty. Clients send empty lists when they copy replies into requests."""


class _Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: _Nothing = None
    annotations: _Nothing = None

    @property
    def text(self) -> str:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return "".join(parts).replace(MARK, "")


class _StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _TextFormat(_Part):
    type: Literal["text"]


_Stop = Annotated[str, Field(min_length=1, max_length=200)]


class ChatRequest(_Part):
    """Body of a chat completion request. Fields after `n` are extensions of vLLM, or have no effect."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, max_length=1000)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10**6)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    response_format: _TextFormat | None = None
    tools: _Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    @classmethod
    def read(cls, body: bytes) -> ChatRequest:
        """Parse and validate the JSON body of a request.

        Raises:
            ApiError: the body is not JSON, a field is unknown or has a wrong value, or two fields conflict.
        """
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"The request body is not valid JSON: {error}.") from error
        if not isinstance(given, dict):
            raise ApiError(400, "The request body must be a JSON object.")
        try:
            request = cls.model_validate(given)
        except ValidationError as error:
            raise _problem(error) from error
        request._check()
        return request

    def _check(self) -> None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(400, "Set max_tokens or max_completion_tokens, not both.", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' needs 'stream': true.", param="stream_options")
        if (self.min_tokens or 0) > (self.limit or 2**63):
            raise ApiError(400, "'min_tokens' must not exceed 'max_tokens'.", param="min_tokens")
        try:
            json.dumps(self.model_dump(), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, "The request is not valid Unicode: a string contains an unpaired surrogate.") from error

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of a reply; None: the server's default."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def conversation(self) -> list[Message]:
        """Messages of the request, with the role names of chat templates."""
        return [Message(role=_ROLES.get(m.role, m.role), content=m.text) for m in self.messages]

    @property
    def greedy(self) -> bool:
        """True if the temperature is 0, which means greedy decoding."""
        return self.temperature == 0

    @property
    def sampling(self) -> SamplingSettings:
        """Sampling parameters of the request, with OpenAI's defaults."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingSettings(
            temperature=self.temperature or 1.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            min_new_tokens=self.min_tokens or 0,
            stop=stops,
        )


def _problem(error: ValidationError) -> ApiError:
    """Return the first problem of a request as an error reply."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith(("list[", "constrained-", "str"))]
    name = ".".join(path)
    if first["type"] == "extra_forbidden" or (first["type"] == "too_long" and name.endswith(("tools", "tool_calls"))):
        message = f"The parameter '{name}' is not supported."
    elif first["type"] == "missing":
        message = f"The parameter '{name}' is missing."
    else:
        message = f"Wrong value of '{name}': {first['msg']}."
    return ApiError(400, message, param=path[0] if path else None)
