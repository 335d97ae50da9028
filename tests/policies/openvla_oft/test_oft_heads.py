"""Proprioception and continuous heads against the original implementations."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from embodyrl.errors import CheckpointError, ConfigError
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


def test_pt_file_with_code_is_rejected(full, make_policy, env_spec, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"module.fc1.weight": Evil()}, full / "proprio_projector--100_checkpoint.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        make_policy(full, env=dataclasses.replace(env_spec, state_dim=8), use_proprio=True)
    assert not (tmp_path / "ran").exists()


def test_statistics_of_another_robot_are_rejected(full, make_policy, env_spec):
    with pytest.raises(ConfigError, match="have 8 dimensions, but env 'libero' has 4"):
        make_policy(full, env=dataclasses.replace(env_spec, state_dim=4), use_proprio=True)


def observe_twice():
    return Observation(
        images=np.random.default_rng(0).integers(0, 256, (2, 2, 64, 64, 3), dtype=np.uint8),
        state=np.zeros((2, 8), np.float32),
        instructions=("put the", "pick up the black bowl"),
    )


@pytest.mark.parametrize(
    ("folders", "config"),
    [
        (("heads",), {"action_head": "l1"}),
        (("diffusion",), {"action_head": "diffusion", "num_diffusion_steps_inference": 5}),
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
