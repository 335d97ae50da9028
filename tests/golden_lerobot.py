"""Golden tensors of LeRobot 0.4.4 (tests/golden/lerobot/README.md): folders, weights and recorded values."""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from settings import model_of

from embodyrl.policies.lerobot.config import STATE, read_config
from embodyrl.policies.protocol import POLICIES, PolicyRequest
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, Observation

GOLDEN = Path(__file__).parent / "golden" / "lerobot"
ACT, DIFFUSION = ("act/image", "act/state", "act/novae"), ("diffusion/image", "diffusion/state", "diffusion/separate")
MARGIN, ULPS = 32, 8 * torch.finfo(torch.float32).eps
"""Tolerated multiples of our own difference to float64, and of the unit in the last place of the maximum."""
LARGEST = 0.01
"""Upper bound of each limit, so that a change of 2 % fails."""


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
    """Return the maximum error relative to the maximum expected number."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12))


def doubled(policy: Any) -> Any:
    """Return a copy of a policy in float64; patch `torch.Tensor.float` while it runs."""
    policy = copy.deepcopy(policy)
    policy._network = policy.module.double().network
    for layer in policy.module.modules():
        if isinstance(layer, torch.nn.Linear):  # inputs that are built in float32: latents of zeros, noise levels
            layer.register_forward_pre_hook(lambda _, inputs: tuple(one.double() for one in inputs))
    return policy


def assert_within_rounding(
    single: list[torch.Tensor], double: list[torch.Tensor], recorded: list[tuple[str, torch.Tensor]]
) -> None:
    """Compare float32 results with recorded ones by name; limits follow from our float32 and float64 results."""
    widest = 0.0
    for ours, exact, (name, expected) in zip(single, double, recorded, strict=True):
        assert exact.dtype == torch.float64, name
        # A single number may be right by chance: its limit follows from the numbers before it.
        widest = max(gap := relative(ours, exact), widest)
        limit = MARGIN * (gap if ours.numel() > 1 else widest) + ULPS
        assert relative(ours, expected) <= limit < LARGEST, name


def env_of_config(config: Any, **changes: Any) -> EnvSpec:
    """Return an environment with the inputs of a config."""
    steps = config.n_obs_steps
    names = tuple(f"{name.rpartition('.')[2]}{t}" for t in range(steps) for name in config.cameras)
    spec = EnvSpec(
        name="toy",
        action=ActionSpec(dim=config.action_dim),
        tasks=("go",),
        states_per_task=(4,),
        cameras=CameraSpec(names=names, size=config.image_size),
        state_dim=steps * (config.state_dim + config.environment_dim),
    )
    return replace(spec, **changes)


def policy_of(folder: Path, *, value_dim: int = 0, env: EnvSpec | None = None, seed: int = 0, **keys: Any) -> Any:
    """Build the policy of a folder for a matching environment, with the checkpoint's number of executed actions."""
    kind = json.loads((folder / "config.json").read_text())["type"]
    factory = POLICIES.get(kind)
    config = read_config(folder, kind, factory.config)
    keys = {"num_action_chunks": config.n_action_steps} | keys
    cfg = model_of(kind, path=str(folder), **keys)
    assert factory.validate(cfg) == []
    request = PolicyRequest(env=env or env_of_config(config), value_dim=value_dim, device="cpu", seed=seed)
    policy = factory.build(cfg, request)
    policy.costs = factory.costs(cfg, request.env, value_dim)
    return policy


def observation(config: Any, data: dict[str, torch.Tensor], prefix: str, at: list[int] | None = None) -> Observation:
    """Create an observation from recorded inputs; history steps are concatenated."""

    def rows(name: str) -> np.ndarray:
        if at is not None:
            return np.stack([data[f"episode.{t}.{name}"].numpy() for t in at], 1)
        found = data[f"{prefix}{name}"].numpy()
        has_steps = found.ndim == (5 if name in config.cameras else 3)
        return found if has_steps else found[:, None]

    names = [n for n, size in ((STATE, config.state_dim), (config.environment_name, config.environment_dim)) if size]
    state = np.concatenate([rows(name) for name in names], 2)
    count = len(state)
    images = np.zeros((count, 0, 1, 1, 3), np.uint8)
    if config.cameras:
        views = np.stack([rows(name) for name in config.cameras], 2)
        images = np.moveaxis(views.reshape(count, -1, *views.shape[3:]), 2, 4)
    return Observation(images=images, state=state.reshape(count, -1), instructions=("go",) * count)


def fresh(kind: str, target: Path, **changes: Any) -> Path:
    """Write a folder with random initial weights of small size."""
    small = {
        "act": {"dim_model": 16, "n_heads": 2, "dim_feedforward": 24, "n_encoder_layers": 1, "latent_dim": 3}
        | {"n_vae_encoder_layers": 1, "chunk_size": 6, "n_action_steps": 4},
        "diffusion": {"n_obs_steps": 1, "horizon": 8, "n_action_steps": 4, "down_dims": [8, 16]}
        | {"diffusion_step_embed_dim": 8, "noise_scheduler_type": "DDIM", "num_inference_steps": 4}
        | {"spatial_softmax_num_keypoints": 4},
    }
    target.mkdir(parents=True)
    keys = {"type": kind, "embodyrl_init": "random"} | small[kind] | changes
    (target / "config.json").write_text(json.dumps(keys))
    return target


def toy_env(state: int = 5, cameras: tuple[str, ...] = (), size: tuple[int, int] = (32, 40)) -> EnvSpec:
    shown = CameraSpec(names=cameras, size=size) if cameras else CameraSpec()
    return EnvSpec(
        name="toy", action=ActionSpec(dim=2), tasks=("go",), states_per_task=(4,), state_dim=state, cameras=shown
    )


def observe(env: EnvSpec, count: int, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    return Observation(
        images=rng.integers(0, 256, (count, len(env.cameras.names), *env.cameras.size, 3), np.uint8),
        state=rng.normal(size=(count, env.state_dim)).astype(np.float32),
        instructions=("go",) * count,
    )


def noise_for(policy: Any, count: int, seed: int = 1) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, 2**24, (count, policy.spec.tokens_per_chunk))
    return (drawn / 2**24).astype(np.float32)
