"""GPU check of vLLM: versions, generation, sleep mode and weight updates with a 0.5B model."""

import json
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from packaging.requirements import Requirement

from embodyrl.config.paths import assets_dir
from embodyrl.devices import Gpus
from embodyrl.errors import MissingDependencyError
from embodyrl_gpu_check.result import GpuParts, GpuResult

_GIB = 2**30
_TOLERANCE = 0.1
"""Maximum difference between log-probabilities of engine and module; above the rounding error of bfloat16."""
_SIZES = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Layer sizes of a Qwen2 model with 0.5B parameters."""
_PROMPTS = ("What is 3 plus 4?", "Name a color.")
_REPLY_TOKENS = 32


def check_vllm() -> GpuResult:
    """Import vLLM, compare versions, and test a policy that generates replies with vLLM.

    Raises:
        MissingDependencyError: vLLM cannot be imported.
    """
    parts, lines = GpuParts(), list[str]()
    with parts.part("versions"):
        lines.append(_compare_versions(parts))
    try:
        import vllm  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"vLLM is installed but cannot be imported: {error}. Reinstall embodyrl[vllm]."
        ) from error
    with tempfile.TemporaryDirectory() as name, parts.part("engine"):
        write_model(Path(name), _SIZES)
        lines.append(run_engine(parts, Path(name), "cuda:0"))
    return parts.result("; ".join(lines))


def _compare_versions(parts: GpuParts) -> str:
    """Compare the installed versions with the requirements of the extra `vllm`; return the result as text."""
    version = metadata.version("vllm")
    parts.record("vllm", version)
    parts.record("transformers", metadata.version("transformers"))
    try:
        required = [Requirement(text) for text in metadata.requires("embodyrl") or []]
    except metadata.PackageNotFoundError:
        return f"vLLM {version} (embodyrl is not installed, so its requirement is unknown)"
    requirements = [requirement for requirement in required if requirement.name == "vllm"]
    if requirements and not all(
        requirement.specifier.contains(version, prereleases=True) for requirement in requirements
    ):
        parts.warnings.append(f"vLLM {version} instead of {requirements[0].specifier}")
    return f"vLLM {version}"


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a Qwen2 model with random weights, and a tokenizer from the assets of embodyrl."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    source = assets_dir() / "causal_lm_tiny"
    for path in source.iterdir():
        if path.name.startswith("tokenizer") or path.name in ("special_tokens_map.json", "chat_template.jinja"):
            shutil.copy(path, folder)
    token_ids = json.loads((source / "config.json").read_text())
    special_tokens = {
        key: token_ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in token_ids
    }
    torch.manual_seed(0)
    config: Any = Qwen2Config(**sizes, **special_tokens)
    config.architectures = ["Qwen2ForCausalLM"]
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def run_engine(parts: GpuParts, folder: Path, device: str, *, backend: str = "vllm") -> str:
    """Test an engine: generate, sleep, change the weights, generate again; record memory and durations."""
    import torch

    from embodyrl.config.shared import Precision
    from embodyrl.policies.causal_lm import CAUSAL_LM
    from embodyrl.policies.causal_lm.settings import CausalLMSettings
    from embodyrl.policies.protocol import PolicyRequest, mark_weights_changed
    from embodyrl.text.specs import ANY_TEXT
    from embodyrl.types import Observation

    free = {"before": Gpus().free}
    cfg = CausalLMSettings(
        model_type="causal_lm", path=str(folder), precision=Precision.bf16, num_action_chunks=_REPLY_TOKENS
    )
    engine = {"enable_sleep_mode": True} if backend == "vllm" else {}
    request = PolicyRequest(
        env=ANY_TEXT, device=device, seed=0, backend=backend, engine=engine, engine_memory_fraction=0.3
    )
    policy: Any = CAUSAL_LM.build(cfg, request)
    obs = Observation(
        images=np.zeros((len(_PROMPTS), 0, 0, 0, 3), np.uint8), state=np.zeros((len(_PROMPTS), 0), np.float32),
        instructions=_PROMPTS,
    )  # fmt: skip
    noise = np.random.default_rng(0).random((len(_PROMPTS), _REPLY_TOKENS), dtype=np.float32)
    free["with the module"], seconds = Gpus().free, dict[str, float]()

    def act(name: str) -> float:
        started = time.perf_counter()
        out = policy.act(obs, noise=noise)
        seconds[name] = round(time.perf_counter() - started, 2)
        with torch.no_grad():
            scored = policy.score(obs, out.tokens).logprob.float().cpu().numpy()
        return float(np.abs(np.where(out.tokens >= 0, scored - out.logprob, 0.0)).max())

    differences = [act("first replies, with the start of the engine"), act("replies")]
    free["awake"] = Gpus().free
    policy.free_engine_memory()
    free["asleep"] = Gpus().free
    with torch.no_grad():
        for weight in policy.module.parameters():
            weight.mul_(1.01)
    mark_weights_changed(policy.module)
    differences.append(act("replies after new weights"))
    parts.record("seconds", seconds)
    parts.record("free GiB", {name: round(value / _GIB, 2) for name, value in free.items()})
    parts.record("gaps of log-probabilities", differences)
    if not max(differences) <= _TOLERANCE:
        parts.failures.append(f"log-probabilities of engine and module differ by {max(differences):.3g}")
    freed = (free["asleep"] - free["awake"]) / _GIB
    return f"sleep frees {freed:.1f} GiB, {seconds}, gap {max(differences):.2g}"
