"""Tensor functions of policies: sampling from uniform noise, and copies to a GPU.

On GPUs, sampling is deterministic if torch's deterministic algorithms are enabled.
"""

import os
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.devices import visible_gpus
from embodyrl.errors import ConfigError


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed the global random generators. If `deterministic`, nondeterministic torch operations raise an error."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_peak_memory() -> int:
    """Return the peak memory of this process in bytes: GPU memory reserved by torch, or resident memory on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def get_best_device() -> str:
    """Return the first visible GPU (in a worker its assigned GPU), or the CPU.

    Raises:
        ConfigError: there are GPUs that torch cannot use.
    """
    if torch.cuda.is_available():
        return "cuda:0"
    if gpus := visible_gpus():
        raise ConfigError(
            f"GPU {', '.join(gpus)} is visible (CUDA_VISIBLE_DEVICES), but torch {torch.__version__} cannot use it: "
            f"{get_cuda_problem()}. Install a build of torch for the GPU's driver (`embodyrl doctor`), or set "
            "CUDA_VISIBLE_DEVICES= to run on the CPU."
        )
    return "cpu"


def get_cuda_problem() -> str:
    """Return torch's reason for not using CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # an assertion in CPU builds of torch
        return str(error).split("\n")[0].rstrip(".")
    return "it finds no device"


def compute_cdf(probability: Tensor) -> Tensor:
    """Return cumulative sums of probabilities along the last dimension.

    In deterministic mode on a GPU, the sums are those of `compute_integer_sums`, because torch's sum of floats is not
    deterministic there and raises an error.
    """
    exact = probability.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()
    return compute_integer_sums(probability) if exact else probability.cumsum(-1)


def compute_integer_sums(probability: Tensor) -> Tensor:
    """Return cumulative sums, computed with integers (units of 2^-53) to be independent of the summation order."""
    return ((probability.double() * 2**53).long().cumsum(-1).double() / 2**53).to(probability.dtype)


def sample_inverse_cdf(scaled: Tensor, noise: Tensor) -> Tensor:
    """Sample one category per entry: the first category whose cumulative probability exceeds `noise`.

    Args:
        scaled: [..., n] logits divided by the temperature.
        noise: [...] uniform in [0, 1).

    Returns:
        [...] int64 category ids. Cumulative sums are float64, because float32 would lose rare categories.
    """
    cdf = compute_cdf(_normalize_categories(torch.softmax, scaled.double())).contiguous()
    category = torch.searchsorted(cdf, noise.double()[..., None].contiguous(), right=True)[..., 0]
    return category.clamp_(max=scaled.shape[-1] - 1)


def compute_categorical_scores(scaled: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the entropy of categories, both [...], in nats.

    Args:
        scaled: [..., n] logits divided by the temperature.
        choice: [...] int64 category ids.
    """
    log_probs = _normalize_categories(torch.log_softmax, scaled)
    return log_probs.gather(-1, choice[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def _normalize_categories(normalize: Callable[[Tensor, int], Tensor], scaled: Tensor) -> Tensor:
    """Return `normalize(scaled, -1)` for logits [..., n], faster than torch for many entries with few categories.

    On a CPU, torch normalizes the last dimension entry by entry, but other dimensions with vector instructions.
    """
    count = scaled.shape[-1]
    is_small = count <= 8 and scaled.numel() >= 1024 * count and scaled.device.type == "cpu"
    # The gradient of `unbind` is contiguous, so gradients of earlier layers are rounded as without `unbind`.
    return normalize(torch.stack(scaled.unbind(-1)), 0).movedim(0, -1) if is_small else normalize(scaled, -1)


def standard_normal(noise: Tensor) -> Tensor:
    """Return float32 samples of the standard normal distribution, computed with the inverse CDF.

    Args:
        noise: [...] uniform in [0, 1), clamped to 1e-6..1 - 1e-6, because the results for 0 and 1 are infinite.
    """
    return torch.special.ndtri(noise.double().clamp(1e-6, 1 - 1e-6)).float()


def to_device(data: Any, device: torch.device | str) -> Tensor:
    """Copy an array, a tensor or a list to a device; on the CPU the memory may be shared.

    A plain copy to a GPU waits for all earlier work on the GPU. A copy from pinned memory is queued, so that the host
    can prepare the next batch; torch keeps the memory until it is copied.
    """
    read_only = isinstance(data, np.ndarray) and not data.flags.writeable  # torch cannot share it
    host = torch.tensor(data) if read_only else torch.as_tensor(data)
    kind = torch.device(device).type
    if kind == host.device.type == "cpu":
        return host
    if kind != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
