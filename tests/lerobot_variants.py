"""Small ACT and Diffusion policies with many options, whose outputs in LeRobot 0.4.4 are recorded.

Weights, statistics and inputs follow from names by a rule, so only outputs are stored. With the Python of an
environment with LeRobot, this script writes the file: `python tests/lerobot_variants.py`.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "golden" / "lerobot" / "variants.safetensors"
BATCH = 2
ACT = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 24, "n_encoder_layers": 2, "n_vae_encoder_layers": 2} | {
    "latent_dim": 3, "chunk_size": 6, "n_action_steps": 4, "dropout": 0.0, "pretrained_backbone_weights": None
}  # fmt: skip
DIFFUSION = {"n_obs_steps": 2, "horizon": 8, "n_action_steps": 4, "down_dims": [8, 16], "n_groups": 4} | {
    "diffusion_step_embed_dim": 8, "spatial_softmax_num_keypoints": 4, "num_train_timesteps": 20
}  # fmt: skip
Shapes = dict[str, tuple[str, list[int]]]


def images(*names: str, size: tuple[int, int] = (32, 40)) -> Shapes:
    return {f"observation.{name}": ("VISUAL", [3, *size]) for name in names}


def state(size: int) -> Shapes:
    return {"observation.state": ("STATE", [size])}


def environment(size: int) -> Shapes:
    return {"observation.environment_state": ("ENV", [size])}


def modes(**kinds: str) -> dict[str, Any]:
    return {"normalization_mapping": kinds}


BOTH, SEEN = state(3) | environment(2), images("images.top") | state(5)
DDIM = {"noise_scheduler_type": "DDIM"}
DILATED = {"vision_backbone": "resnet50", "replace_final_stride_with_dilation": True}
RESIZED = {"resize_shape": [40, 44], "crop_ratio": 0.83, "crop_is_random": False}
CROPPED = {"crop_shape": [32, 40], "crop_ratio": 0.5, "crop_is_random": False}
APART = {"use_group_norm": False, "use_separate_rgb_encoder_per_camera": True}
ACT_CASES: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "state first": (state(5) | images("images.top", "images.a"), {}),
    "image key": (images("image") | state(2), {}),
    "image only": (images("images.top"), {}),
    "image and environment": (images("images.top") | environment(3), {}),
    "environment only": (environment(4), {}),
    "no vae": (environment(4) | state(2), {"use_vae": False}),
    "pre-norm": (BOTH, {"pre_norm": True, "n_decoder_layers": 3}),
    "gelu": (BOTH, {"feedforward_activation": "gelu", "n_decoder_layers": 2}),
    "dilated": (images("images.top", size=(40, 56)) | state(5), DILATED),
    "odd sizes": (images("images.x", size=(37, 61)) | state(1), {"chunk_size": 7, "dim_model": 20, "n_heads": 5}),
    "identity": (BOTH, modes(STATE="IDENTITY", ACTION="IDENTITY")),
    "min and max": (BOTH, modes(STATE="MIN_MAX", ACTION="MIN_MAX", ENV="MIN_MAX")),
    "quantiles": (SEEN, modes(VISUAL="MIN_MAX", STATE="QUANTILES", ACTION="QUANTILE10")),
    "no modes": (BOTH, modes()),
    "latent": (BOTH, {"latent_dim": 1, "n_vae_encoder_layers": 1, "kl_weight": 0.5}),
    "single action": (BOTH, {"chunk_size": 1, "n_action_steps": 1}),
    "width 6": (BOTH, {"dim_model": 6, "n_heads": 3}),
    "two states": (BOTH | {"observation.velocity": ("STATE", [4])}, {}),
}
DIFFUSION_CASES: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "one step": (SEEN, {"n_obs_steps": 1}),
    "three steps": (images("images.a", "images.b") | BOTH, {"n_obs_steps": 3, "n_action_steps": 6}),
    "crop": (images("images.top", size=(41, 53)) | state(5), {"crop_shape": [32, 40], "crop_is_random": False}),
    "crop ratio": (images("images.top", size=(48, 60)) | state(5), CROPPED),
    "resize and crop": (images("images.top", size=(48, 60)) | state(5), RESIZED),
    "enlarge": (images("images.top", size=(24, 20)) | state(5), {"resize_shape": [40, 40]}),
    "encoder per camera": (images("images.a", "images.b") | state(5), APART),
    "resnet34": (SEEN, {"vision_backbone": "resnet34"}),
    "sample": (BOTH, {"prediction_type": "sample"}),
    "sample ddim": (BOTH, DDIM | {"prediction_type": "sample", "num_inference_steps": 7}),
    "unclipped": (BOTH, {"clip_sample": False}),
    "unclipped sample": (BOTH, DDIM | {"clip_sample": False, "prediction_type": "sample"}),
    "clip range": (BOTH, DDIM | {"clip_sample_range": 0.4, "num_inference_steps": 5}),
    "linear": (BOTH, {"beta_schedule": "linear", "beta_start": 0.001, "beta_end": 0.05, "num_inference_steps": 7}),
    "scaled": (BOTH, DDIM | {"beta_schedule": "scaled_linear", "num_train_timesteps": 37, "num_inference_steps": 10}),
    "sigmoid": (BOTH, {"beta_schedule": "sigmoid"}),
    "shift only": (BOTH, {"use_film_scale_modulation": False}),
    "one level": (BOTH, {"down_dims": [16]}),
    "three levels": (BOTH, {"down_dims": [8, 16, 24], "n_groups": 8, "kernel_size": 3}),
    "one group": (BOTH, {"n_groups": 1, "down_dims": [8, 12]}),
    "kernel 7": (BOTH, {"kernel_size": 7}),
    "masked": (BOTH, {"do_mask_loss_for_padding": True}),
    "mean and std": (BOTH, modes(STATE="MEAN_STD", ACTION="MEAN_STD")),
    "quantiles": (BOTH, modes(STATE="QUANTILE10", ACTION="QUANTILES", ENV="MIN_MAX")),
    "whole chunk": (BOTH, {"n_action_steps": 7}),
    "longer than the chunk": (BOTH, {"n_action_steps": 8}),
    "horizon 20": (BOTH, {"horizon": 20, "n_action_steps": 8}),
    "one denoising step": (BOTH, {"num_inference_steps": 1}),
}
CASES = {f"act {name}": ("act", inputs, ACT | keys) for name, (inputs, keys) in ACT_CASES.items()} | {
    f"diffusion {name}": ("diffusion", inputs, DIFFUSION | keys) for name, (inputs, keys) in DIFFUSION_CASES.items()
}
ACTION_DIM = 3
FIXED = ("vae_encoder_pos_enc", "pos_grid", "num_batches_tracked")
"""Buffers that are computed."""


def normals(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight of a name in LeRobot's files."""
    n = normals(name, shape)
    if name.endswith("running_var"):
        return 1 + 0.2 * np.abs(n)
    if len(shape) >= 2:
        return n / np.float32(np.sqrt(np.prod(shape[1:])))
    return 1 + 0.1 * n if name.endswith("weight") else 0.1 * n


def statistics(name: str, shape: list[int]) -> dict[str, np.ndarray]:
    """Return the statistics of a feature."""
    sizes = (shape[0], *(1 for _ in shape[1:]))
    mean, std = 0.4 + 0.1 * normals(f"{name} mean", sizes), 0.3 + 0.1 * np.abs(normals(f"{name} std", sizes))
    ends = {"min": -2, "q01": -1.9, "q10": -1, "q90": 1.1, "q99": 1.8, "max": 2}
    rows = {"mean": mean, "std": std, **{key: mean + np.float32(factor) * std for key, factor in ends.items()}}
    return {key: row.astype(np.float32) for key, row in rows.items()}


def observed(name: str, shape: list[int], steps: int) -> np.ndarray:
    """Return inputs [B, T, ...]: bytes of images, or numbers."""
    sizes = (BATCH, steps, *shape)
    if len(shape) == 3:
        return np.random.RandomState(zlib.crc32(name.encode())).randint(0, 256, sizes).astype(np.uint8)
    return normals(name, sizes)


def chunk_of(kind: str, keys: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return actions [B, H, A], padding [B, H] and training steps [B]."""
    length = keys["chunk_size" if kind == "act" else "horizon"]
    padding = np.zeros((BATCH, length), np.bool_)
    padding[0, length - length // 3 :] = True
    return normals("actions", (BATCH, length, ACTION_DIM)), padding, np.asarray([3, 17])


def main() -> None:
    """Run each case in LeRobot and write the outputs."""
    from safetensors.torch import save_file

    found: dict[str, Any] = {}
    for case in CASES:
        found |= {f"{case}/{name}": tensor.detach().float().contiguous() for name, tensor in _run(case).items()}
    save_file(found, FILE)


def _run(case: str) -> dict[str, Any]:
    import torch
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature  # pyright: ignore
    from lerobot.policies.factory import (  # pyright: ignore
        get_policy_class,
        make_policy_config,
        make_pre_post_processors,
    )

    kind, shapes, keys = CASES[case]
    keys = json.loads(json.dumps(keys))
    if "normalization_mapping" in keys:
        keys["normalization_mapping"] = {k: NormalizationMode(v) for k, v in keys["normalization_mapping"].items()}
    inputs = {name: PolicyFeature(FeatureType[t], tuple(shape)) for name, (t, shape) in shapes.items()}
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}
    config = make_policy_config(
        kind, device="cpu", push_to_hub=False, input_features=inputs, output_features=outputs, **keys
    )
    policy = get_policy_class(kind)(config)
    for name, tensor in policy.state_dict().items():
        if name.rpartition(".")[2] not in FIXED:
            tensor.copy_(torch.from_numpy(weight(name, tuple(tensor.shape))))
    rows = {name: statistics(name, list(f.shape)) for name, f in (inputs | outputs).items()}
    known = {name: {key: torch.from_numpy(row) for key, row in parts.items()} for name, parts in rows.items()}
    before, after = make_pre_post_processors(config, dataset_stats=known)
    actions, padding, level = chunk_of(kind, keys)
    raw = {name: observed(name, shape, config.n_obs_steps) for name, (_, shape) in shapes.items()}
    batch = {
        name: torch.from_numpy(row).float() / 255 if row.dtype == np.uint8 else torch.from_numpy(row)
        for name, row in raw.items()
    }
    if kind == "act":
        batch = {name: row[:, 0] for name, row in batch.items()}
    batch = before(batch | {"action": torch.from_numpy(actions)})
    batch |= {"action_is_pad": torch.from_numpy(padding)}
    batch.setdefault("observation.state", torch.zeros(BATCH, 1))  # ACT reads the device of the state
    eps, latent = (torch.from_numpy(normals("noise", shape)) for shape in (actions.shape, (BATCH, 8)))
    drawn = {"randn": eps, "randn_like": latent[:, : keys.get("latent_dim")], "randint": torch.from_numpy(level)}
    kept = {name: getattr(torch, name) for name in drawn}
    policy.train(kind == "act")
    for name, tensor in drawn.items():
        setattr(torch, name, lambda *_, tensor=tensor, **__: tensor)
    loss, _ = policy.forward(dict(batch))
    for name, function in kept.items():
        setattr(torch, name, function)
    loss.backward()
    norm = sum(w.grad.double().square().sum() for w in policy.parameters() if w.grad is not None).sqrt()
    policy.eval()
    if kind == "act":
        chunk = policy.predict_action_chunk(batch)[:, : config.n_action_steps]
    else:
        chunk = _denoise(torch, policy, batch, eps)
    return {"loss": loss, "gradient": norm, "chunk": after(chunk)}


def _denoise(torch: Any, policy: Any, batch: dict[str, Any], start: Any) -> Any:
    """Return the executed actions; step i of DDPM has the noise `step i`."""
    import diffusers.schedulers.scheduling_ddpm as ddpm  # pyright: ignore

    model, config, steps = policy.diffusion, policy.config, iter(range(10**6))
    if config.image_features:
        batch = batch | {"observation.images": torch.stack([batch[key] for key in config.image_features], dim=-4)}
    ddpm.randn_tensor = lambda shape, **_: torch.from_numpy(normals(f"step {next(steps)}", tuple(shape)))
    with torch.no_grad():
        condition = model._prepare_global_conditioning(batch)
        whole = model.conditional_sample(BATCH, global_cond=condition, noise=start)
    first = config.n_obs_steps - 1
    return whole[:, first : first + config.n_action_steps]


if __name__ == "__main__":
    main()
