"""Checkpoint folders of tiny pi0, pi0.5 and SmolVLA models in the published layout."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from embodyrl.policies.flow.layouts import OPENPI, SMOLVLA_LEROBOT, Layout
from embodyrl.policies.flow.specs import SIZES_KEY, LayersSpec, Pi0Spec, SmolVlaSpec, VisionSpec
from embodyrl.policies.flow.vla.build import save_weights
from embodyrl.policies.flow.vla.network import Pi0, SmolVla

VISION = VisionSpec(image_size=28, patch_size=14, width=16, depth=1, heads=2, mlp=32)
LAYERS = LayersSpec(width=32, depth=2, mlp=48, heads=4, kv_heads=1, head_dim=8)
PI0 = Pi0Spec(
    vision=VISION, language=LAYERS, expert=replace(LAYERS, width=24), vocab=80, horizon=6, action_dim=12, state_dim=12
)
LLAMA = replace(LAYERS, gemma=False, kv_heads=2)
SPECS = {
    "pi0": PI0,
    "pi05": replace(PI0, adaptive=True),
    "smolvla": SmolVlaSpec(
        vision=VISION,
        language=LLAMA,
        expert=replace(LLAMA, width=24),
        vocab=80,
        horizon=6,
        action_dim=12,
        state_dim=12,
        shuffle=2,
    ),
}
FORMS = tuple(SPECS)
"""Names of the model families."""


def own_config(spec: Pi0Spec | SmolVlaSpec) -> dict[str, Any]:
    """Return the config that `read_spec` reads for a model of any size."""
    kind = "pi0" if isinstance(spec, Pi0Spec) else "smolvla"
    return {SIZES_KEY: {"kind": kind, **asdict(spec)}}


def build_model(form):
    """Build the model with seeded weights, without zeros that would hide a path."""
    model = SmolVla(SPECS[form]) if form == "smolvla" else Pi0(SPECS[form])
    model.initialize(3)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if not parameter.detach().any() or "norm" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def write_checkpoint(
    folder: Path,
    form: str,
    *,
    state_dim: int,
    action_dim: int,
    layout: Layout | None = None,
    lerobot_statistics: bool = False,
    random: bool = False,
) -> Path:
    """Write weights under public names, with sizes, tokenizer and statistics."""
    folder.mkdir(parents=True, exist_ok=True)
    config = own_config(SPECS[form]) | ({"embodyrl_init": "random"} if random else {})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    if not random:
        layout = layout or (SMOLVLA_LEROBOT if form == "smolvla" else OPENPI)
        save_weights(build_model(form).state_dict(), folder, layout)
    numbers = {
        part: {
            "mean": [0.1] * size,
            "std": [0.5] * size,
            "q01": [-0.9] * size,
            "q99": [1.1] * size,
        }
        for part, size in (("state", state_dim), ("actions", action_dim))
    }
    if lerobot_statistics:
        names = {"state": "observation.state", "actions": "action"}
        tensors = {f"{names[p]}.{n}": torch.tensor(row) for p, rows in numbers.items() for n, row in rows.items()}
        save_file(tensors, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    else:
        below = folder / "assets" / "lab" / "robot"
        below.mkdir(parents=True)
        (below / "norm_stats.json").write_text(json.dumps({"norm_stats": numbers}))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character."""
    characters = "abcdefghijklmnopqrstuvwxyzTSA0123456789-,:;. \n_"
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", "<bos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
