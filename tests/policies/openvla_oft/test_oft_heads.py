"""Proprioception, continuous heads and FiLM against the original implementations."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from test_oft_golden import close
from test_oft_golden import two_images as golden_inputs

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.openvla_oft import heads
from embodyrl.policies.openvla_oft import model as oft_model
from embodyrl.types import Observation

CAMERAS = ("agentview", "robot0_eye_in_hand")


@pytest.fixture
def full(checkpoint, golden_dir):
    """Create a checkpoint folder with a proprioception projector, as in the official training."""
    shutil.copy(golden_dir / "heads" / "proprio_projector--100_checkpoint.pt", checkpoint)
    return checkpoint


@pytest.fixture
def official(full, golden_dir, two_images, make_policy):
    """Build a policy of the official recipe; `folders` of the golden data are added to the checkpoint."""

    def make(*folders, **config):
        for folder in folders:
            shutil.copytree(golden_dir / folder, full, dirs_exist_ok=True)
        return make_policy(full, env=two_images, num_images_in_input=2, use_proprio=True, **config)

    return make


@pytest.fixture
def two_images(env_spec):
    return dataclasses.replace(env_spec, cameras=dataclasses.replace(env_spec.cameras, names=CAMERAS), state_dim=8)


def test_missing_or_duplicate_component_is_an_error(full, make_policy, env_spec):
    env = dataclasses.replace(env_spec, state_dim=8)
    path = full / "proprio_projector--100_checkpoint.pt"
    shutil.copy(path, full / "proprio_projector--200_checkpoint.pt")
    with pytest.raises(CheckpointError, match="2 files of 'proprio_projector'"):
        make_policy(full, env=env, use_proprio=True)
    (full / "proprio_projector--200_checkpoint.pt").unlink()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="proprio_projector--100"):
        make_policy(full, env=env, use_proprio=True)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.use_proprio"):
        make_policy(full, env=env, use_proprio=True)


def test_pt_file_with_code_is_refused(full, make_policy, env_spec, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"module.fc1.weight": Evil()}, full / "proprio_projector--100_checkpoint.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        make_policy(full, env=dataclasses.replace(env_spec, state_dim=8), use_proprio=True)
    assert not (tmp_path / "ran").exists()


def test_statistics_of_another_robot_are_refused(full, make_policy, env_spec):
    with pytest.raises(ConfigError, match="have 8 dimensions, but env 'libero' gives 4"):
        make_policy(full, env=dataclasses.replace(env_spec, state_dim=4), use_proprio=True)


def observe_twice():
    return Observation(
        images=np.random.default_rng(0).integers(0, 256, (2, 2, 64, 64, 3), dtype=np.uint8),
        state=np.zeros((2, 8), np.float32),
        instructions=("put the", "pick up the black bowl"),
    )


def test_ddim_timesteps_follow_the_schedule(official, golden):
    module = official("diffusion", action_head="diffusion", trainable=False).module
    batch, x = golden_inputs(golden), golden("official_diffusion_2img_proprio")["noise"]
    with torch.no_grad():
        prefix, alphas = module.prefix(batch), heads.cumulative_alphas()
        want = oft_model.denoise(module, batch, x, 2, prefix)
        for step in heads.ddim_steps(2):
            level = torch.full((len(x),), step)
            x, _ = heads.ddim_step(x, oft_model.predict_noise(module, batch, prefix, x, level), level, 2, alphas, 0.0)
    assert torch.equal(want, x)


def test_ddim_recovers_clean_actions_from_exact_noise():
    alphas, steps = heads.cumulative_alphas().double(), heads.ddim_steps(10)
    clean, noise = torch.linspace(-1, 1, 9).double(), torch.linspace(2, -2, 9).double()
    levels = [alphas[step] for step in steps] + [torch.ones(())]
    x = levels[0].sqrt() * clean + (1 - levels[0]).sqrt() * noise
    for step, after in zip(steps, levels[1:], strict=True):
        x = heads.ddim_step(x, noise, torch.tensor([step]), 10, alphas, 0.0)[0].flatten()
        close(x, after.sqrt() * clean + (1 - after).sqrt() * noise, 1e-12)
    close(x, clean, 1e-12)


def test_ddim_clips_the_clean_estimate_and_keeps_the_predicted_noise():
    alphas = torch.tensor([0.81, 0.64, 0.25] * 10)
    count = heads.TRAIN_STEPS
    # From level 0.64 to level 0.81: (2 - 0.6) / 0.8 = 1.75 becomes 1.
    x, noise = torch.tensor([2.0, 0.2]), torch.tensor([1.0, -1.0])
    got, std = heads.ddim_step(x, noise, torch.tensor([1]), count, alphas, 0.0)
    assert std == 0
    close(got.flatten(), torch.tensor([0.9 + 0.19**0.5, 0.9 - 0.19**0.5]), 1e-6)


@pytest.mark.parametrize(
    ("folders", "config"),
    [
        (("heads",), {"action_head": "l1"}),
        (("diffusion",), {"action_head": "diffusion", "num_diffusion_steps_inference": 5}),
        (("heads", "film"), {"action_head": "l1", "use_film": True}),
    ],
)
def test_continuous_policies_act_and_save(official, make_policy, two_images, tmp_path, folders, config):
    policy, obs = official(*folders, trainable=False, **config), observe_twice()
    assert sum(p.numel() for p in policy.module.parameters()) == policy.costs.num_parameters
    out = policy.act(obs, noise=None)
    assert out.actions.shape == (2, 8, 7)
    assert not np.array_equal(out.actions[0], out.actions[1])
    noise = np.full((2, policy.spec.tokens_per_chunk), 0.0, np.float32)  # the end of the interval stays finite
    assert np.isfinite(policy.act(obs, noise=noise).actions).all()
    policy.save(tmp_path / "saved")
    again = make_policy(
        tmp_path / "saved", env=two_images, num_images_in_input=2, use_proprio=True, trainable=False, **config
    )
    np.testing.assert_array_equal(again.act(obs, noise=None).actions, out.actions)
