"""Every option of the original configs: build, save, load and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden_lerobot import fresh, noise_for, observe, policy_of, toy_env

from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.lerobot.diffusion.network import ImageEncoder
from embodyrl.policies.lerobot.diffusion.schedule import Schedule, compute_betas
from embodyrl.policies.lerobot.resnet import FrozenBatchNorm, build_resnet_parts
from embodyrl.policies.lerobot.resnet_sizes import DEPTHS, compute_map_size, count_last_channels
from embodyrl.policies.vla.sampling import START, TIMES, sample_normals, sample_uniforms

STATE, CAMERA = toy_env(5), toy_env(3, ("front",), (24, 40))
ACT = (
    {"pre_norm": True, "feedforward_activation": "gelu", "n_decoder_layers": 2},
    {"use_vae": False},
    {"normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILE10"}},
    {"vision_backbone": "resnet50", "replace_final_stride_with_dilation": True},
)
DIFFUSION = (
    {"beta_schedule": "linear", "prediction_type": "sample", "clip_sample": False, "noise_scheduler_type": "DDPM"},
    {"beta_schedule": "sigmoid", "clip_sample_range": 2.0, "use_film_scale_modulation": False},
    {"beta_schedule": "scaled_linear", "num_inference_steps": None, "num_train_timesteps": 6, "kernel_size": 3},
    {"use_group_norm": False, "use_separate_rgb_encoder_per_camera": True, "crop_shape": [20, 30]},
    {"resize_shape": [40, 40], "crop_ratio": 0.8, "vision_backbone": "resnet34"},
    {"n_groups": 4, "down_dims": [8, 16, 16], "do_mask_loss_for_padding": True},
)


@pytest.mark.integration
@pytest.mark.parametrize("number", range(len(ACT) + len(DIFFUSION)))
def test_each_lerobot_option_trains_and_round_trips(number, tmp_path):
    kind = "act" if number < len(ACT) else "diffusion"
    changes = (*ACT, *DIFFUSION)[number]
    seen = any(key in str(changes) for key in ("backbone", "VISUAL", "rgb", "resize"))
    env = CAMERA if seen else STATE
    policy, obs = policy_of(fresh(kind, tmp_path / "start", **changes), env=env), observe(env, 2)
    assert policy.costs.num_parameters == sum(p.numel() for p in policy.module.network.parameters())
    noise, out = noise_for(policy, 2), tmp_path / "out"
    one = policy.act(obs, noise=noise)
    with torch.no_grad():
        assert np.abs(policy.score(obs, one.tokens).logprob.numpy() - one.logprob).max() < 1e-4
    out.mkdir()
    policy.save(out)
    assert np.array_equal(policy_of(out, env=env, seed=7).act(obs, noise=noise).actions, one.actions)
    policy.module.train()
    actions = np.random.default_rng(0).normal(size=(2, policy.spec.imitated, 2)).astype(np.float32)
    padding = np.zeros(actions.shape[:2], np.bool_)
    policy.imitate_padded(obs, actions, padding).loss.sum().backward()
    lacking = {name.partition(".")[0] for name, p in policy.module.network.named_parameters() if p.grad is None}
    assert not lacking


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_only_masked_losses_exclude_padding(kind, tmp_path):
    """Diffusion with `do_mask_loss_for_padding`; the mean is over all numbers."""
    for masked in (True, False):
        changes = {"do_mask_loss_for_padding": masked} if kind == "diffusion" else {"use_vae": False}
        policy, obs = policy_of(fresh(kind, tmp_path / f"{masked}", **changes), env=STATE), observe(STATE, 2)
        shape = (2, policy.spec.imitated, 2)
        actions, padding = np.ones(shape, np.float32), np.ones(shape[:2], np.bool_)
        with torch.no_grad():
            loss = policy.imitate_padded(obs, actions, padding).loss
            assert bool((loss == 0).all()) == (masked or kind == "act")
            padding[:, : shape[1] // 2] = False
            assert (policy.imitate_padded(obs, actions, padding).loss > 0).all()


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 11_176_512), ("resnet34", 21_284_672), ("resnet50", 23_508_032), ("resnet101", 42_500_160)],
)
def test_resnets_have_the_published_sizes(name, count):
    """Sizes in torchvision's documentation without the last layer."""
    with torch.device("meta"):
        found = torch.nn.Sequential(build_resnet_parts(name, torch.nn.BatchNorm2d))
    assert sum(p.numel() for p in found.parameters()) == count
    assert set(DEPTHS) >= {name}


@pytest.mark.parametrize("dilated", [False, True])
def test_feature_maps_have_the_predicted_size(dilated):
    parts = torch.nn.Sequential(build_resnet_parts("resnet50", FrozenBatchNorm, dilated=dilated)).eval()
    with torch.no_grad():
        found = parts(torch.zeros(1, 3, 50, 70)).shape
    assert found == (1, count_last_channels("resnet50"), *compute_map_size((50, 70), dilated=dilated))


def test_crops_are_random_in_training_and_centered_in_evaluation():
    base = {"n_action_steps": 4, "input_features": {}, "crop_shape": (4, 6), "crop_is_random": True}
    encoder = ImageEncoder.__new__(ImageEncoder)
    torch.nn.Module.__init__(encoder)
    config = DiffusionConfig.model_validate(base)
    encoder._crop, encoder._random = config.crop_size, config.crop_is_random
    images = torch.arange(9 * 11).float().view(1, 1, 9, 11).expand(2, 3, -1, -1)
    encoder.eval()
    center = encoder._crop_images(images, 4, 6)
    assert center[0, 0, 0, 0] == images[0, 0, 2, 2], "half of 5 rows is rounded to the even number, as torchvision does"
    encoder.train()
    torch.manual_seed(0)
    drawn = {float(encoder._crop_images(images, 4, 6)[0, 0, 0, 0]) for _ in range(200)}
    assert len(drawn) == 6 * 6


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "sigmoid", "squaredcos_cap_v2"])
def test_noise_schedules_are_increasing(kind):
    config = DiffusionConfig(n_action_steps=4, beta_schedule=kind)
    found = compute_betas(config)
    assert found.shape == (100,)
    assert (found.diff() >= -1e-7).all()
    if kind != "squaredcos_cap_v2":
        assert found[[0, -1]].tolist() == pytest.approx([1e-4, 0.02], rel=0.6)
    assert Schedule(config, 10, "DDIM").timesteps.tolist() == list(range(90, -1, -10))


def with_history(tmp_path, **keys):
    """Return a diffusion policy that reads two steps, so that its chunks begin with the action of a past step."""
    policy = policy_of(fresh("diffusion", tmp_path / "policy", n_obs_steps=2), env=toy_env(10), **keys)
    return policy, observe(toy_env(10), 3)


def test_chain_of_a_policy_with_history_contains_the_executed_actions(tmp_path):
    policy, obs = with_history(tmp_path, stochastic_steps="all")
    out = policy.act(obs, noise=noise_for(policy, 3))
    floats = policy._chain.record.layout.unpack(out.tokens)[1]
    last = torch.from_numpy(floats[:, -out.actions[0].size :].copy()).reshape(out.actions.shape)
    np.testing.assert_allclose(policy._to_actions(last), out.actions, atol=1e-6)


@torch.no_grad()
def test_actions_of_past_steps_are_not_imitated(tmp_path):
    policy, obs = with_history(tmp_path)
    given = np.random.default_rng(0).normal(size=(3, 7, 2)).astype(np.float32)
    target = policy._from_actions(np.concatenate([given[:, :1], given], 1))
    rows = np.arange(3)
    level = torch.from_numpy(
        (sample_uniforms(rows, TIMES, 1)[:, 0] * policy._config.num_train_timesteps).astype(np.int64)
    )
    noise = sample_normals(rows, START, policy._size, torch.device("cpu"))
    errors = policy.compute_errors(policy._encode(obs).model, target, noise, level)
    assert (errors[:, 0] > 0).all()
    errors[:, 0] = 0
    torch.testing.assert_close(policy.imitate(obs, given).loss, errors.flatten(1).mean(1))
