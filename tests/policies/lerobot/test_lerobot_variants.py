"""Outputs of policies with other options are those of LeRobot 0.4.4 (tests/lerobot_variants.py)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from golden_lerobot import assert_within_rounding, doubled, env_of_config, fresh, policy_of
from lerobot_variants import (
    ACTION_DIM,
    BATCH,
    CASES,
    FILE,
    FIXED,
    chunk_of,
    normals,
    observed,
    statistics,
    weight,
)
from safetensors.torch import load_file

from embodyrl.policies.lerobot.config import read_config
from embodyrl.policies.protocol import POLICIES
from embodyrl.types import Observation

OUTPUTS = load_file(FILE)


def built(case, folder):
    """Build the policy of a case with the weights and statistics of the rule."""
    kind, shapes, keys = CASES[case]
    inputs = {name: {"type": t, "shape": shape} for name, (t, shape) in shapes.items()}
    action = {"action": {"type": "ACTION", "shape": [ACTION_DIM]}}
    fresh(kind, folder)
    raw = {"type": kind, "embodyrl_init": "random", "input_features": inputs, "output_features": action} | keys
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_config(folder, kind, POLICIES.get(kind).config)
    policy = policy_of(folder, env=env_of_config(config), num_action_chunks=config.n_action_steps)
    for name, tensor in policy.module.network.state_dict().items():
        if name.rpartition(".")[2] not in FIXED:
            tensor.copy_(torch.from_numpy(weight(policy.prefix + name, tuple(tensor.shape))))
    rows = {name: statistics(name, feature["shape"]) for name, feature in (inputs | action).items()}
    policy._normalizer.set_statistics(
        {name: {key: torch.from_numpy(row) for key, row in parts.items()} for name, parts in rows.items()}, folder
    )
    return policy


def observation(config):
    def of(name):
        return observed(name, list(config.input_features[name].shape), config.n_obs_steps)

    sizes = (("observation.state", config.state_dim), (config.environment_name, config.environment_dim))
    states = [of(name) for name, size in sizes if size]
    state = np.concatenate(states, 2) if states else np.zeros((BATCH, 0, 0), np.float32)
    pictures = np.zeros((BATCH, 0, 1, 1, 3), np.uint8)
    if config.cameras:
        views = np.stack([of(name) for name in config.cameras], 2)
        pictures = np.moveaxis(views.reshape(BATCH, -1, *views.shape[3:]), 2, 4)
    return Observation(images=pictures, state=state.reshape(BATCH, -1), instructions=("go",) * BATCH)


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_actions_match_lerobot(case, tmp_path):
    policy = built(case, tmp_path / "policy")
    single = results(case, policy, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        double = results(case, doubled(policy), torch.float64)
    names = ("chunk", "loss", "gradient")
    assert_within_rounding(single, double, [(name, OUTPUTS[f"{case}/{name}"]) for name in names])


def results(case, policy, dtype):
    """Return the executed chunk, the loss, and the norm of the gradient."""
    kind, _, keys = CASES[case]
    network, config, obs = policy.module.network, policy._config, observation(policy._config)
    actions, padding, level = (torch.from_numpy(part) for part in chunk_of(kind, keys))
    noise = torch.from_numpy(normals("noise", tuple(actions.shape))).to(dtype)
    target = policy._from_actions(actions.numpy())
    if kind == "act":
        latent = torch.from_numpy(normals("noise", (BATCH, 8)))[:, : config.latent_dim].to(dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn_like", lambda _: latent)
            loss = policy.loss(obs, target, padding).mean()
    else:
        errors = policy.compute_errors(network.condition(policy._build_inputs(obs)), target, noise, level)
        loss = (errors * ~(padding & config.do_mask_loss_for_padding)[..., None]).mean()
    loss.backward()
    norm = sum(w.grad.double().square().sum() for w in network.parameters() if w.grad is not None).sqrt()
    read = policy._encode(obs)
    with torch.no_grad():
        rows = policy._compute_greedy_actions(obs, read) if kind == "act" else denoised(policy, read.model, noise)
    return [torch.from_numpy(policy._to_actions(rows)), loss.detach(), norm]


def denoised(policy, condition, x):
    """Return the executed actions; step i adds the noise `step i`."""
    for index, number in enumerate(policy._schedule.timesteps.tolist()):
        level = torch.full((len(x),), number)
        step = policy._schedule.step(x, policy.module.network.unet(x, level, condition), level)
        x = step.mean + step.std * torch.from_numpy(normals(f"step {index}", tuple(x.shape)))
    return policy._select_executed(x)
