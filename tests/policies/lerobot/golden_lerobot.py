"""Golden tensors of LeRobot 0.4.4 (tests/golden/lerobot/README.md): folders, weights and recorded numbers."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[2] / "golden" / "lerobot"
ACT, DIFFUSION = ("act/image", "act/state", "act/novae"), ("diffusion/image", "diffusion/state", "diffusion/separate")
ONE_PASS, MANY, GRADIENT = 2e-5, 1e-4, 1e-4


def recorded(case: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / case / "tensors.safetensors")


def meta(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "meta.json").read_text())


def by_rule(key: str, shape: list[int], seed: int) -> torch.Tensor:
    n = np.random.RandomState((zlib.crc32(key.encode()) + seed) % 2**32).standard_normal(shape)
    if key.endswith("running_var"):
        n = 1 + 0.2 * np.abs(n)
    elif len(shape) == 4:
        n = n * np.sqrt(1 / np.prod(shape[1:]))
    elif key.endswith("weight"):
        n = 1 + 0.1 * n
    else:
        n = 0.1 * n
    return torch.from_numpy(np.asarray(n, np.float32))


def folder_of(case: str, target: Path) -> Path:
    """Write the complete policy folder of a case."""
    shutil.copytree(GOLDEN / case / "policy", target)
    partial = target / "model_without_backbone.safetensors"
    if partial.exists():
        keys = json.loads((target / "backbone_keys.json").read_text())
        seed = meta(case)["seed"]
        weights = {key: by_rule(key, row["shape"], seed) for key, row in keys.items()}
        for key, row in keys.items():
            assert abs(float(weights[key].double().sum()) - row["sum"]) < 1e-3 * max(1, abs(row["sum"])), key
        save_file(load_file(partial) | weights, target / "model.safetensors")
        partial.unlink()
        (target / "backbone_keys.json").unlink()
    return target


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error relative to the largest expected number."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12))
