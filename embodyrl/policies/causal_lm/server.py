"""Text generation with a server that has OpenAI's completions API and vLLM's extensions for token ids."""

import http.client
import json
import math
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from embodyrl.errors import EmbodyError, format_reason
from embodyrl.files import read_stream
from embodyrl.policies.causal_lm.prompts import PromptReader
from embodyrl.policies.causal_lm.sampling import LOGPROB_TOLERANCE, allocate_outputs, derive_reply_seeds, to_vllm_params
from embodyrl.types import FloatArray, IntArray, Observation, PolicyScores

REPLY_TIMEOUT_S = 300.0
"""Timeout in seconds for one reply, or for loading an adapter."""
_MAX_BYTES = 1 << 28
"""Maximum size of one reply in bytes."""
CONNECTIONS = 64
"""Maximum number of concurrent requests."""
_ADAPTER_HINT = (
    "Start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank of model.lora.r or more."
)


T = TypeVar("T")


class _Server:
    """Client of a server's completions API (`<url>/completions`) for one model."""

    key = "rollout.url"
    """Config key of the server's address, for error messages."""

    def __init__(self, url: str, model: str | None) -> None:
        """Choose a model from the models that the server lists.

        Args:
            url: address including /v1.
            model: one of the server's models; None: its first model.

        Raises:
            EmbodyError: there is no server, or it does not serve the model.
        """
        self._url = url.rstrip("/")
        served = self._parse("models", lambda reply: [str(entry["id"]) for entry in reply["data"]])
        if not served:
            raise EmbodyError(f"The server at {self.key}={url} serves no model. Start it with a model.")
        if model is not None and model not in served:
            raise EmbodyError(
                f"{self.key}={url} serves {', '.join(served)}, but not the model {model}. Correct the model name."
            )
        self._base = self._model = model or served[0]

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._parse("completions", lambda reply: dict(reply["choices"][0]), request)

    def _complete_all(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(min(CONNECTIONS, len(requests))) as pool:
            return list(pool.map(self._complete, requests))

    def _parse(self, path: str, extract: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """Send a request, and return `extract` applied to the JSON of the reply."""
        text = self._send(path, body)
        try:
            return extract(json.loads(text))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise EmbodyError(
                f"The server at {self.key}={self._url} sent an unusable reply to {path} ({format_reason(error)}): "
                f"{text[:200]!r}. Check that its address ends in /v1."
            ) from error

    def _send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as reply:
                return read_stream(reply, _MAX_BYTES, REPLY_TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            detail = error.read(300).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            hint = f" {_ADAPTER_HINT}" if "lora" in path else ""
            raise EmbodyError(
                f"The server at {self.key}={self._url} did not answer {path}: {error} {detail}. Check that the "
                f"server is running and that its address ends in /v1.{hint}"
            ) from error


class ServerEngine(_Server):
    """Text generation on a server, on which only low-rank adapters can be updated (`<url>/load_lora_adapter`)."""

    includes_temperature = False
    """False because the returned log-probabilities exclude the temperature."""

    def __init__(
        self, url: str, model: str | None, save_adapter: Callable[[Path], None] | None, *, dtype: str, sampling: Any
    ) -> None:
        """Connect to the server (see `_Server`).

        Args:
            url: address including /v1.
            model: one of the server's models; None: its first model.
            save_adapter: writes the adapters into a folder that the server can read; None: no adapters.
            dtype: dtype of the actor, which sets the tolerance for log-probabilities.
            sampling: sampling parameters.
        """
        super().__init__(url, model)
        self._save, self._dtype, self._sampling = save_adapter, dtype, sampling
        self._synced_version: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="embodyrl-adapters-") if save_adapter else None

    def sync(
        self, module: object, version: int, probe: Sequence[int], logprob: Callable[[Sequence[int], int], float]
    ) -> None:
        """Upload changed adapters, and check that the server has the weights of the module.

        The check compares the log-probability of one token after the prompt `probe` with the result of `logprob`.

        Raises:
            EmbodyError: the log-probabilities differ: other weights, or another tokenizer.
        """
        if version == self._synced_version:
            return
        if self._save is not None and self._folder is not None:
            # The name is unique, because adapters of another run may still be on the server.
            old, self._model = self._model, f"{Path(self._folder.name).name}-{version}"
            target = Path(self._folder.name) / self._model
            self._save(target)
            self._send("load_lora_adapter", {"lora_name": self._model, "lora_path": str(target)})
            if old != self._base:
                self._send("unload_lora_adapter", {"lora_name": old})
                shutil.rmtree(Path(self._folder.name) / old)
        tokens, logprobs = _parse_reply(self._complete(self._build_request(probe, 1, temperature=0.0)))
        difference = abs(logprobs[0] - logprob(probe, tokens[0])) if tokens else math.inf
        if not difference <= LOGPROB_TOLERANCE[self._dtype]:
            raise EmbodyError(
                f"The model '{self._model}' at {self._url} differs from the actor: a log-probability differs by "
                f"{difference:.3g}. Serve the folder of model.path (or of ckpt) in the same precision, or use "
                "rollout.backend=hf."
            )
        self._synced_version = version

    def sleep(self) -> None:
        """Do nothing, because the server does not use the memory of this process."""

    def generate(
        self, prompts: Sequence[list[int]], noise: FloatArray | None, temperature: float, limit: int, top: int
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """Return tokens (-1 after the end), log-probabilities at temperature 1 [B, limit], and the top tokens.

        Top tokens have the layout of `allocate_top_tokens`.
        """
        options = to_vllm_params(self._sampling, top) | {"return_tokens_as_token_ids": top > 0}
        seeds = [{}] * len(prompts) if noise is None else [{"seed": seed} for seed in derive_reply_seeds(noise)]
        scale = 0.0 if noise is None else temperature
        requests = [
            self._build_request(prompt, limit, temperature=scale) | options | seed
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        completions = self._complete_all(requests)
        tokens, logprobs, top_tokens = allocate_outputs(len(prompts), limit, top)
        for row, completion in enumerate(completions):
            reply_tokens, reply_logprobs = _parse_reply(completion)
            tokens[row, : len(reply_tokens)] = reply_tokens[:limit]
            logprobs[row, : len(reply_tokens)] = reply_logprobs[:limit]
            for t, pairs in enumerate(_parse_top_tokens(completion, top)[:limit] if top else ()):
                pairs = [(reply_tokens[t], reply_logprobs[t]), *pairs]
                top_tokens[row, t, : len(pairs)] = pairs
        return tokens, logprobs, top_tokens

    def _build_request(self, prompt: Sequence[int], limit: int, *, temperature: float) -> dict[str, Any]:
        request = {"model": self._model, "prompt": list(prompt), "max_tokens": limit, "temperature": temperature}
        return {**request, "logprobs": 0, "return_token_ids": True}


class ServedReference(_Server):
    """Reference policy on a server, which returns log-probabilities of given tokens by echoing prompt and reply.

    Implements the part of `Policy` that a reference needs.
    """

    key = "algorithm.reference_url"

    def __init__(self, url: str, model: str | None, reader: PromptReader, max_token_id: int) -> None:
        """Connect to the server; `reader` converts conversations to token ids, and `max_token_id` is the largest id.

        Raises:
            EmbodyError: there is no server, or it rejects the ids.
        """
        super().__init__(url, model)
        self._reader, self.module = reader, torch.nn.Identity()
        # The server rejects ids outside its vocabulary; a vocabulary in another order cannot be detected.
        self._complete(self._build_echo_request([max_token_id]))

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities [B, K] of replies at temperature 1; entropies are 0, and there are no values.

        Log-probabilities after the end of a reply are 0.
        """
        prompts, replies = self._reader(obs), [row[row >= 0].tolist() for row in tokens]
        completions = self._complete_all(
            [self._build_echo_request([*p, *r]) for p, r in zip(prompts, replies, strict=True)]
        )
        logprob_rows = np.zeros(tokens.shape, np.float32)
        for row, (prompt, reply, completion) in enumerate(zip(prompts, replies, completions, strict=True)):
            reply_logprobs = _get_logprob_list(completion, "token_logprobs")[len(prompt) : len(prompt) + len(reply)]
            if len(reply_logprobs) < len(reply) or not all(isinstance(value, float | int) for value in reply_logprobs):
                raise EmbodyError(
                    f"The server at {self.key}={self._url} returns no log-probabilities of prompt tokens "
                    "(`echo` with `logprobs`). Use a server such as vLLM, or algorithm.reference_path."
                )
            logprob_rows[row, : len(reply)] = reply_logprobs
        logprob = torch.from_numpy(logprob_rows)
        return PolicyScores(logprob=logprob, entropy=torch.zeros_like(logprob), value=logprob[:, :0])

    def _build_echo_request(self, ids: Sequence[int]) -> dict[str, Any]:
        # Not all servers accept max_tokens=0.
        request = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        return {**request, "echo": True, "logprobs": 0}


def _get_logprob_list(choice: dict[str, Any], name: str) -> list[Any]:
    """Return the list `name` in the log-probabilities of a completion; empty if the list is missing."""
    logprobs = choice.get("logprobs")
    values = logprobs.get(name) if isinstance(logprobs, dict) else None
    return values if isinstance(values, list) else []


def _parse_reply(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return token ids and log-probabilities of a completion."""
    tokens, logprobs = choice.get("token_ids"), _get_logprob_list(choice, "token_logprobs")
    if (
        not (isinstance(tokens, list) and len(tokens) == len(logprobs))
        or not all(isinstance(token, int) and 0 <= token < 2**31 for token in tokens)
        or not all(isinstance(value, float | int) for value in logprobs)
    ):
        raise EmbodyError(
            "The server did not return a token id (`token_ids`, requested with return_token_ids) and a log-probability "
            "(`logprobs`) for each token. Use vLLM 0.10.2 or newer, an equivalent server, or rollout.backend=hf."
        )
    return tokens, [float(value) for value in logprobs]


def _parse_top_tokens(choice: dict[str, Any], top: int) -> list[list[tuple[int, float]]]:
    """Return (id, log-probability) of the most probable tokens at each position of a completion."""
    try:
        steps = choice["logprobs"]["top_logprobs"]
        rows = [[(int(name.removeprefix("token_id:")), float(p)) for name, p in step.items()] for step in steps]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EmbodyError(
            f"The server does not return the {top} most probable tokens by their ids ({error}), as vLLM does with "
            f"`return_tokens_as_token_ids`. Set rollout.logprobs=0, or use rollout.backend=hf."
        ) from error
    return [sorted(step, key=lambda pair: -pair[1])[:top] for step in rows]
