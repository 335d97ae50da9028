"""Rollouts by a server with OpenAI's completions protocol as vLLM extends it: token ids in and out."""

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.config.shared import SamplingSettings
from embodyrl.errors import EmbodyError
from embodyrl.types import FloatArray, IntArray

ANSWER_S = 300.0
"""Longest wait for one reply, or for an adapter to be loaded."""
CONNECTIONS = 64
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of a log-probability that rounding explains."""
_ADAPTERS = (
    "Start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank of model.lora.r or more."
)


class ServerEngine:
    """Asks `<url>/completions`; only low-rank adapters can follow the actor (`<url>/load_lora_adapter`)."""

    tempered = False
    """Its log-probabilities are those before the temperature."""

    def __init__(
        self, url: str, model: str | None, save_adapter: Callable[[Path], None] | None, *, dtype: str, sampling: Any
    ) -> None:
        """Ask what the server serves.

        Args:
            url: with its /v1.
            model: which of the server's models; None: its first.
            save_adapter: writes the adapters into a folder that the server reads too; None: there are none.
            dtype: of the actor, for the tolerance.
            sampling: how replies are drawn.

        Raises:
            EmbodyError: nobody answers there, or it does not serve that model.
        """
        self._url, self._save = url.rstrip("/"), save_adapter
        self._dtype, self._sampling = dtype, sampling
        served = [str(entry["id"]) for entry in self._ask("models")["data"]]
        if model is not None and model not in served:
            raise EmbodyError(f"rollout.url={url} serves {', '.join(served)}, not rollout.served_model={model}.")
        self._base = self._model = model or served[0]
        self._synced: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="embodyrl-adapters-") if save_adapter else None

    def sync(
        self, module: object, version: int, probe: Sequence[int], logprob: Callable[[Sequence[int], int], float]
    ) -> None:
        """Hand over the adapters if their version is new; then the server must agree with the module about `probe`.

        Raises:
            EmbodyError: it does not: other weights, or another tokenizer.
        """
        if version == self._synced:
            return
        if self._save is not None and self._folder is not None:
            old, self._model = self._model, f"embodyrl-{version}"
            target = Path(self._folder.name) / self._model
            self._save(target)
            self._ask("load_lora_adapter", {"lora_name": self._model, "lora_path": str(target)})
            if old != self._base:
                self._ask("unload_lora_adapter", {"lora_name": old})
        answer = self._ask("completions", self._question(probe, 1, temperature=0.0))
        tokens, logprobs = _reply(answer)
        gap = abs(logprobs[0] - logprob(probe, tokens[0]))
        if not gap <= _TOLERANCE[self._dtype]:
            raise EmbodyError(
                f"The model '{self._model}' at {self._url} is not the actor's: a log-probability differs by {gap:.3g}. "
                "Serve the folder of model.path (or of ckpt) in the same precision, or use rollout.backend=hf."
            )
        self._synced = version

    def generate(
        self, prompts: Sequence[list[int]], noise: FloatArray | None, temperature: float, limit: int
    ) -> tuple[IntArray, FloatArray]:
        """Tokens (-1 after the end) and log-probabilities before the temperature [B, limit]."""
        s: SamplingSettings = self._sampling
        more = {
            "top_k": s.top_k if s.top_k > 0 else 0,
            "top_p": s.top_p,
            "repetition_penalty": s.repetition_penalty,
            "frequency_penalty": s.frequency_penalty,
            "presence_penalty": s.presence_penalty,
            "min_tokens": s.min_new_tokens,
            "stop": s.stop or None,
            "stop_token_ids": s.stop_token_ids or None,
            "include_stop_str_in_output": True,
        }
        questions = []
        for i, prompt in enumerate(prompts):
            seed = {} if noise is None else {"seed": int(float(noise[i, 0]) * 2**31)}
            scale = 0.0 if noise is None else temperature
            questions.append(self._question(prompt, limit, temperature=scale) | more | seed)
        with ThreadPoolExecutor(min(CONNECTIONS, len(questions))) as pool:
            answers = list(pool.map(lambda question: self._ask("completions", question), questions))
        tokens = np.full((len(prompts), limit), -1, np.int64)
        logprobs = np.zeros((len(prompts), limit), np.float32)
        for row, answer in enumerate(answers):
            said, probable = _reply(answer)
            tokens[row, : len(said)], logprobs[row, : len(said)] = said[:limit], probable[:limit]
        return tokens, logprobs

    def _question(self, prompt: Sequence[int], limit: int, *, temperature: float) -> dict[str, Any]:
        asked = {"model": self._model, "prompt": list(prompt), "max_tokens": limit, "temperature": temperature}
        return {**asked, "logprobs": 0, "return_token_ids": True}

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                text = reply.read().decode()
        except (OSError, urllib.error.URLError) as error:
            said = error.read().decode(errors="replace")[:300] if isinstance(error, urllib.error.HTTPError) else ""
            hint = f" {_ADAPTERS}" if "lora" in path else ""
            raise EmbodyError(
                f"The server at rollout.url={self._url} did not answer {path}: {error} {said}. Is it running, and does "
                f"its address end in /v1?{hint}"
            ) from error
        try:
            return json.loads(text)
        except ValueError:
            return text  # loading an adapter is answered in words


def _reply(answer: Any) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities of the only choice."""
    choice = answer["choices"][0]
    tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if tokens is None or logprobs is None or len(tokens) != len(logprobs):
        raise EmbodyError(
            "The server does not say which tokens it wrote and how probable they were (`token_ids` for "
            "return_token_ids, `logprobs`): it takes vLLM 0.10.2 or newer, or a server that does the same. Use "
            "rollout.backend=hf."
        )
    return [int(token) for token in tokens], [float(value) for value in logprobs]
