"""Checkpoint folders at the published sizes with random bfloat16 weights, for `full_size.py`."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from embodyrl.config.paths import assets_dir
from embodyrl.files import available_cores
from embodyrl.policies.flow.layouts import EMBEDDING, OPENPI, SMOLVLA_LEROBOT, Layout
from embodyrl.policies.flow.specs import Pi0Spec, SmolVlaSpec, read_spec
from embodyrl.policies.flow.vla.network import Pi0, SmolVla
from embodyrl.policies.openvla_oft.config import OftOptions, read_config
from embodyrl.policies.openvla_oft.model import OpenVlaOft
from embodyrl.policies.openvla_oft.settings import OftSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "gpu_check"))
from embodyrl_gpu_check.synthetic import LARGE


@dataclass(frozen=True)
class Choice:
    """Model of this benchmark."""

    preset: str
    tiny: str
    """The shipped folder with small sizes and a tokenizer."""
    chunk: int
    """Executed actions of a chunk."""
    parts: tuple[str, ...]
    sizes: dict[str, Any]
    """Published sizes, in the format of the published config.json."""


EVALUATION = ("write", "plan", "eval")
MODELS = {
    "openvla_oft": Choice(
        "openvla_oft", "openvla_oft_tiny", 8, ("write", "plan", "train", "resume", "export", "eval"), LARGE
    ),
    "smolvla": Choice("smolvla_libero", "smolvla_tiny", 10, EVALUATION, {
        "type": "smolvla", "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "chunk_size": 50,
        "n_action_steps": 10, "max_action_dim": 32, "max_state_dim": 32,
    }),
    "pi05": Choice("pi05_libero", "pi05_tiny", 5, EVALUATION, {
        "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "action_horizon": 10, "action_dim": 32,
    }),
}  # fmt: skip
SHARDS = 4
BLOCK = 2**24 + 3
"""Number of random values that all weights repeat; odd, so that no two rows of a matrix are equal."""


def write_side_files(folder: Path, model: str, size: str) -> Callable[[str], str]:
    """Write all files except the weights; return the function from our weight names to public weight names."""
    source = assets_dir() / MODELS[model].tiny
    for path in source.iterdir():
        if path.suffix == ".json" and (size == "tiny" or path.name != "tiny_vit_specs.json"):
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    del config["embodyrl_init"]
    if size == "full":
        config = (config if model == "openvla_oft" else {}) | MODELS[model].sizes
    elif model != "openvla_oft":
        config["embodyrl_flow"]["horizon"] = 50
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if model == "openvla_oft":
        return str
    write_statistics(folder, model)
    layout = SMOLVLA_LEROBOT if model == "smolvla" else OPENPI
    return lambda name: _public_name(layout, name)


def _public_name(layout: Layout, name: str) -> str:
    return layout.tied if name == EMBEDDING and layout.tied else layout.to_external(name)


def write_statistics(folder: Path, model: str) -> None:
    """Write the data set's statistics: lerobot's file for SmolVLA, openpi's for pi0.5."""
    rows = {"mean": 0.0, "std": 0.5, "q01": -1.0, "q99": 1.0}
    sizes = {"state": 8, "actions": 7}
    if model == "pi05":
        numbers = {part: {name: [value] * size for name, value in rows.items()} for part, size in sizes.items()}
        (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": numbers}))
        return
    names = {"state": "observation.state", "actions": "action"}
    tensors = {f"{names[p]}.{n}": torch.full((size,), v) for p, size in sizes.items() for n, v in rows.items()}
    save_file(tensors, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")


def shapes_of(folder: Path, model: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by our names; no memory is allocated."""
    with torch.device("meta"):
        module: nn.Module
        if model == "openvla_oft":
            cfg = OftSettings(model_type="openvla_oft", path=str(folder))
            module = OpenVlaOft(read_config(folder), OftOptions(cfg=cfg))
        else:
            spec = read_spec(folder, adaptive=model == "pi05")
            assert isinstance(spec, Pi0Spec | SmolVlaSpec)
            module = Pi0(spec) if isinstance(spec, Pi0Spec) else SmolVla(spec)
    return {name: tuple(weight.shape) for name, weight in module.state_dict().items()}


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Stream random bfloat16 weights into shards of about equal size; return their size in bytes.

    Matrices have a standard deviation of 0.02, biases are 0, and scales of norms are 1.
    """
    sizes = {name: 2 * int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
    total, begun = sum(sizes.values()), 0
    shards: list[list[str]] = [[] for _ in range(SHARDS)]
    for name, size in sizes.items():
        shards[min(SHARDS * begun // total, SHARDS - 1)].append(name)
        begun += size
    shards = [names for names in shards if names]
    block = (0.02 * torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))).bfloat16().view(torch.int16).numpy()
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    with ThreadPoolExecutor(min(SHARDS, available_cores())) as pool:
        tasks = [
            pool.submit(write_shard, folder / file, {name: shapes[name] for name in names}, block)
            for file, names in zip(files, shards, strict=True)
        ]
        for task in tasks:
            task.result()
    index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    return total


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], block: np.ndarray) -> None:
    """Write one safetensors file, a piece of the block at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            count = int(np.prod(shape, dtype=np.int64))
            if len(shape) < 2:
                value = 0.0 if name.endswith("bias") else 1.0
                file.write(torch.full((count,), value).bfloat16().view(torch.int16).numpy())
                continue
            start = zlib.crc32(name.encode()) % BLOCK
            while count:
                piece = block[start : start + count]
                file.write(np.ascontiguousarray(piece))
                count, start = count - len(piece), 0
