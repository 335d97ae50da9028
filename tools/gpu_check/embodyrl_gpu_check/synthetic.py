"""Synthetic checkpoints with random weights, and random observations, for benchmarks of speed and memory."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np

from embodyrl.config.paths import assets_dir
from embodyrl.policies.flow.specs import PI05, SIZES_KEY, SMOLVLA
from embodyrl.policies.openvla_oft.config import RANDOM_ON_DEVICE
from embodyrl.policies.vla.folder import RANDOM_INIT_KEY
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, Observation

TASK = "put both the alphabet soup and the tomato sauce in the basket"
LARGE = {
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "vocab_size": 32064},
}
"""Layer sizes in config.json of the published 7B model."""
ENV = EnvSpec(
    name="synthetic",
    action=ActionSpec(dim=7),
    tasks=(TASK,),
    states_per_task=(1,),
    cameras=CameraSpec(names=("agentview",), size=(256, 256)),
    benchmark=BenchmarkSpec(unnorm_key="libero_10"),
)


def write_checkpoint(folder: Path, size: str, layers: int | None) -> None:
    """Write a checkpoint folder without weights, which are initialized randomly.

    Args:
        folder: an existing folder.
        size: `tiny` (size of the included checkpoint) or `7b`.
        layers: number of layers of the language model; None: all.
    """
    source = assets_dir() / "openvla_oft_tiny"
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    if size == "7b":  # a CPU thread generates a billion weights in 10 s, a GPU in milliseconds
        config |= LARGE | {RANDOM_INIT_KEY: RANDOM_ON_DEVICE}
    if layers:
        config["text_config"] = config["text_config"] | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))


def write_file_headers(folder: Path, model: str) -> None:
    """Write a checkpoint folder with the published sizes and an empty weight file, from which memory can be planned.

    Args:
        folder: an existing folder.
        model: openvla_oft, smolvla or pi05.
    """
    if model == "openvla_oft":
        write_checkpoint(folder, "7b", None)
        config = json.loads((folder / "config.json").read_text())
        del config[RANDOM_INIT_KEY]  # adapters are rejected on random weights
    else:
        shutil.copy(assets_dir() / f"{model}_tiny" / "tokenizer.json", folder)
        kind, spec = ("smolvla", SMOLVLA) if model == "smolvla" else ("pi0", PI05)
        config = {SIZES_KEY: {"kind": kind, **asdict(spec)}, RANDOM_INIT_KEY: "random"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def observe(batch: int) -> Observation:
    """Return observations of `ENV` with random images; every call returns the same observations."""
    images = np.random.default_rng(0).integers(0, 256, (batch, 1, 256, 256, 3), dtype=np.uint8)
    return Observation(images=images, state=np.zeros((batch, 0), np.float32), instructions=(TASK,) * batch)
