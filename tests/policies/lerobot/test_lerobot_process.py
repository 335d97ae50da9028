"""`model=lerobot` reads any LeRobot policy's config, and runs the policy in a process of its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from settings import model_of

from embodyrl.envs.history import with_history
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, MissingDependencyError
from embodyrl.policies.lerobot.process import FACTORY, find_camera_indices
from embodyrl.policies.lerobot.process.checkpoint import read_checkpoint
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, Observation

LEROBOT = os.environ.get("EMBODYRL_TEST_LEROBOT")
"""Python of an environment with LeRobot, which needs another version of torch."""
real_lerobot = pytest.mark.skipif(not LEROBOT, reason="EMBODYRL_TEST_LEROBOT names no Python with LeRobot")


def table(*cameras: str, state_dim: int = 4) -> EnvSpec:
    return EnvSpec(
        name="table",
        action=ActionSpec(dim=7),
        tasks=("touch the red block",),
        states_per_task=(4,),
        cameras=CameraSpec(names=cameras, size=(32, 32)),
        state_dim=state_dim,
    )


def write_config(folder: Path, *cameras: str, **keys: object) -> Path:
    folder.mkdir(exist_ok=True)
    images = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 32, 32]} for name in cameras}
    state = {"observation.state": {"type": "STATE", "shape": [4]}}
    action = {"action": {"type": "ACTION", "shape": [7]}}
    config = {"type": "act", "n_action_steps": 4, "input_features": images | state, "output_features": action} | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(folder: Path, **keys: object):
    return model_of("lerobot", path=str(folder), num_action_chunks=keys.pop("num_action_chunks", 4), **keys)


def test_spec_is_read_from_config_json(tmp_path):
    spec = FACTORY.spec(settings(write_config(tmp_path, "front")), table("front", "wrist"), 0)
    assert (spec.name, spec.num_action_chunks, spec.action_dim) == ("act", 4, 7)
    assert (spec.inputs.num_images, spec.inputs.state) == (2, True)
    assert "without probabilities" in spec.untrainable


@pytest.mark.parametrize(
    ("cameras", "keys", "env", "fix"),
    [
        (("front", "wrist", "side"), {}, table("front", "wrist"), "env.init_params.camera_names"),
        (("front",), {"cameras": ["top"]}, table("front"), "Known: front"),
        (("image", "wrist"), {}, table("wrist", "front"), "only observation.images.wrist is a camera of env 'table'"),
        (("front",), {"num_action_chunks": 5}, table("front"), "model.num_action_chunks=4"),
        (("front",), {}, table("front", state_dim=5), "env 'table' has 5"),
    ],
)
def test_mismatched_cameras_chunks_and_state_sizes_are_rejected(tmp_path, cameras, keys, env, fix):
    with pytest.raises(ConfigError, match=fix):
        FACTORY.spec(settings(write_config(tmp_path, *cameras), **keys), env, 0)


def test_several_observed_steps_need_a_history(tmp_path):
    cfg = settings(write_config(tmp_path, "front", n_obs_steps=2))
    with pytest.raises(ConfigError, match=r"env.history=2"):
        FACTORY.spec(cfg, table("front", "wrist"), 0)
    env = with_history(table("front", "wrist"), 2)
    assert FACTORY.spec(cfg, env, 0).inputs.num_images == 4


def test_cameras_are_found_by_name_or_by_order(tmp_path):
    saved = read_checkpoint(write_config(tmp_path, "wrist", "front"))
    env = table("front", "wrist")
    assert find_camera_indices(settings(tmp_path), saved, env) == (1, 0)
    assert find_camera_indices(settings(tmp_path, cameras=["front", "wrist"]), saved, env) == (0, 1)
    write_config(tmp_path, "image", "front")
    assert FACTORY.spec(settings(tmp_path, cameras=["wrist", "front"]), env, 0).inputs.num_images == 2
    saved = read_checkpoint(write_config(tmp_path, "top", "hand"))
    assert find_camera_indices(settings(tmp_path), saved, env) == (0, 1)


_NO_SHAPE = '{"type": "act", "output_features": {"action": {"type": "ACTION", "shape": []}}}'


@pytest.mark.parametrize("content", ["[]", "{", '{"type": "act"}', _NO_SHAPE])
def test_malformed_lerobot_config_is_rejected(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    (problem,) = FACTORY.validate(settings(tmp_path))
    assert str(tmp_path / "config.json") in problem


@pytest.mark.parametrize("name", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_processor_that_imports_code_is_rejected(tmp_path, name):
    write_config(tmp_path, "front")
    steps = [{"registry_name": "to_batch_processor", "config": {}}]
    (tmp_path / name).write_text(json.dumps({"name": "p", "steps": steps}))
    assert FACTORY.validate(settings(tmp_path)) == []
    steps += [{"class": "subprocess.Popen", "config": {"args": ["true"]}}]
    (tmp_path / name).write_text(json.dumps({"name": "p", "steps": steps}))
    (problem,) = FACTORY.validate(settings(tmp_path))
    assert f"{name} imports and calls subprocess.Popen" in problem
    with pytest.raises(CheckpointError, match="imports and calls"):
        FACTORY.spec(settings(tmp_path), table("front"), 0)
    (tmp_path / name).write_text("[]")
    assert f"{name} is missing or malformed" in FACTORY.validate(settings(tmp_path))[0]


@pytest.mark.integration
@pytest.mark.parametrize("python", [sys.executable, "/no/such/python"])
def test_error_names_the_python_without_lerobot(tmp_path, python):
    if python == sys.executable:
        probe = subprocess.run([python, "-c", "import lerobot"], capture_output=True)
        if probe.returncode == 0:
            pytest.skip("this environment has LeRobot")
    cfg = settings(write_config(tmp_path, "front"), python=python)
    with pytest.raises(MissingDependencyError, match=python):
        FACTORY.build(cfg, PolicyRequest(env=table("front"), device="cpu", seed=0, trainable=False))


SMALL_LEROBOT = {
    "configs/policies.py": """
import json, types
class PreTrainedConfig:
    @staticmethod
    def from_pretrained(path):
        return types.SimpleNamespace(**json.load(open(path + "/config.json")))
""",
    "policies/factory.py": """
import torch
from collections import deque
class Policy:
    @classmethod
    def from_pretrained(cls, path, config):
        self = cls()
        self.config = config
        return self
    def eval(self):
        return self
    def reset(self):
        self.seen, self.queue = [], deque()
    def select_action(self, batch):
        assert batch["task"] == ["touch the red block"] * len(batch["observation.state"])
        image = batch["observation.images.front"]
        assert image.shape[1:] == (3, 32, 32) and image.max() <= 1
        self.seen.append(batch["observation.state"].sum(1) + image.mean((1, 2, 3)))
        if not self.queue:
            older = self.seen[max(0, len(self.seen) - self.config.n_obs_steps)]
            self.queue.extend([older + 10 * self.seen[-1] + i for i in range(self.config.n_action_steps)])
        return self.queue.popleft()[:, None].expand(-1, 7)
def get_policy_class(kind):
    return {"small": Policy}[kind]
def scaled(batch):
    return batch | {"observation.state": batch["observation.state"] / 2}
def make_pre_post_processors(config, path, preprocessor_overrides):
    return scaled, lambda action: 2 * action
""",
    "utils/import_utils.py": "def register_third_party_plugins(): pass",
    "utils/random_utils.py": "from torch import manual_seed as set_seed",
}
"""The functions of LeRobot that the process calls, with a policy that reads its newest and oldest observed step."""


@pytest.mark.integration
@pytest.mark.parametrize("steps", [1, 2])
def test_policy_in_a_process_reads_each_observed_step(tmp_path, steps):
    for name, source in SMALL_LEROBOT.items():
        path = tmp_path / "lerobot" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = write_config(tmp_path / "policy", "front", type="small", n_obs_steps=steps)
    env = table("front", "wrist") if steps == 1 else with_history(table("front", "wrist"), steps)
    request = PolicyRequest(env=env, device="cpu", seed=0, trainable=False)
    policy = FACTORY.build(settings(folder, python=str(python)), request)
    images = np.random.default_rng(0).integers(0, 256, (3, 2 * steps, 32, 32, 3), np.uint8)
    state = np.random.default_rng(1).normal(size=(3, 4 * steps)).astype(np.float32)
    out = policy.act(Observation(images=images, state=state, instructions=env.tasks * 3), noise=None)
    front = images[:, ::2].astype(np.float64).mean((2, 3, 4)) / 255
    seen = state.reshape(3, steps, 4).sum(2) / 2 + front
    chunk = 2 * (seen[:, 0] + 10 * seen[:, -1])[:, None] + 2 * np.arange(4)
    np.testing.assert_allclose(out.actions, np.repeat(chunk[..., None], 7, 2), rtol=1e-5)
    assert out.tokens.shape == (3, 4 * 7)
    with pytest.raises(EmbodyError, match="LeRobot failed: AssertionError"):
        policy.act(Observation(images=images, state=state, instructions=("other",) * 3), noise=None)
    with pytest.raises(ConfigError, match="cannot be trained"):
        FACTORY.build(settings(folder, python=str(python)), replace(request, trainable=True))


def test_folder_with_an_actor_of_an_earlier_version_is_rejected(tmp_path):
    write_config(tmp_path, "front")
    (tmp_path / "steering.json").write_text("{}")
    (problem,) = FACTORY.validate(settings(tmp_path))
    assert "without the actor" in problem


MAKE = """
import sys
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

out, kind, sizes = sys.argv[1], sys.argv[2], eval(sys.argv[3])
inputs = {"observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 32, 32))}
inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (4,))
outputs = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
cfg = make_policy_config(
    kind, device="cpu", push_to_hub=False, input_features=inputs, output_features=outputs, n_action_steps=4,
    pretrained_backbone_weights=None, **sizes)
torch.manual_seed(0)
get_policy_class(kind)(cfg).save_pretrained(out)
ends = {"mean": 0.5, "std": 0.25, "min": -1.0, "max": 1.0}
stats = {name: {key: torch.full((f.shape[0], 1, 1) if len(f.shape) == 3 else f.shape, value)
                for key, value in ends.items()} for name, f in {**inputs, **outputs}.items()}
for processor in make_pre_post_processors(cfg, dataset_stats=stats):
    processor.save_pretrained(out)
"""
ACT = "dict(dim_model=32, n_heads=2, dim_feedforward=32, n_encoder_layers=1, latent_dim=8, chunk_size=8)"
DIFFUSION = "dict(down_dims=(16, 32), n_groups=4, horizon=8, n_obs_steps=2, crop_shape=None, num_train_timesteps=4)"


def made_by_lerobot(folder: Path, kind: str, sizes: str) -> Path:
    """Save an untrained policy with LeRobot, with the inputs of `table`."""
    assert LEROBOT
    subprocess.run([LEROBOT, "-c", MAKE, str(folder), kind, sizes], check=True, timeout=300)
    return folder


@real_lerobot
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_act_in_a_lerobot_process_matches_the_built_in_act(tmp_path):
    from embodyrl.policies import POLICIES

    folder = made_by_lerobot(tmp_path / "act", "act", ACT)
    env, rng = table("front"), np.random.default_rng(0)
    request = PolicyRequest(env=env, device="cpu", seed=0, trainable=False)
    obs = Observation(
        images=rng.integers(0, 256, (3, 1, 32, 32, 3), np.uint8),
        state=rng.normal(size=(3, 4)).astype(np.float32),
        instructions=env.tasks * 3,
    )
    theirs = FACTORY.build(settings(folder, python=LEROBOT), request).act(obs, noise=None).actions
    ours = POLICIES.get("act").build(model_of("act", path=str(folder), num_action_chunks=4, precision="fp32"), request)
    assert theirs.shape == (3, 4, 7)
    assert np.abs(theirs - ours.act(obs, noise=None).actions).max() < 1e-5


@real_lerobot
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_diffusion_reads_two_observed_steps(tmp_path):
    folder = made_by_lerobot(tmp_path / "diffusion", "diffusion", DIFFUSION)
    env = with_history(table("front"), 2)
    policy = FACTORY.build(
        settings(folder, python=LEROBOT), PolicyRequest(env=env, device="cpu", seed=0, trainable=False)
    )
    obs = Observation(
        images=np.zeros((2, 2, 32, 32, 3), np.uint8),
        state=np.zeros((2, 8), np.float32),
        instructions=env.tasks * 2,
    )
    assert np.isfinite(policy.act(obs, noise=None).actions).all()
