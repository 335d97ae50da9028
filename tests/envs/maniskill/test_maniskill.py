"""The real ManiSkill: reproducibility, lean rendering, experts and errors."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from panda import PANDA
from settings import env_of

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.maniskill import factory as described
from embodyrl.envs.maniskill.factory import FACTORY
from embodyrl.envs.maniskill.install import find_vulkan_problem
from embodyrl.envs.maniskill.settings import ObsMode, SimBackend
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import InitParams, RenderProfile
from embodyrl.errors import ConfigError, MissingDependencyError, UnknownNameError
from embodyrl.types import EpisodeStart, SimulatorSpec

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True, scope="module")
def simulator():
    if importlib.util.find_spec("sapien") is None:
        pytest.skip("ManiSkill is not installed")
    if problem := find_vulkan_problem("cpu"):
        pytest.skip(f"ManiSkill cannot run here: {problem}")


def config(env_id="PushCube-v1", **changes):
    cameras = InitParams(camera_heights=64, camera_widths=64, camera_names=["base_camera", "hand_camera"])
    keys = {"id": env_id, "control_mode": "pd_ee_delta_pose", "init_params": cameras, **changes}
    return env_of(env_type="maniskill", **keys)


def make(cfg, env_indices=1):
    return FACTORY.make(cfg, EnvContext(num_envs=env_indices))


@pytest.fixture(scope="module")
def cube():
    """Return two environments of the task that most tests use."""
    env = make(config(), 2)
    yield env
    env.close()


def start(reset_id, *, ignore=False):
    return EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=50, ignore_terminations=ignore)


def look(env, env_index=0):
    spec = env.spec
    images = np.zeros((len(spec.cameras.names), *spec.cameras.size, 3), np.uint8)
    state = np.zeros(spec.state_dim, np.float32)
    env.observe([env_index], images[None], state[None])
    return images, state


def play(env, reset_id, env_index=0, steps=12):
    """Return states and images of an episode of random actions."""
    env.reset([env_index], [start(reset_id, ignore=True)])
    actions = np.random.default_rng(reset_id).uniform(-1, 1, (steps // 4, 1, 4, 7)).astype(np.float32)
    seen = [look(env, env_index)]
    for chunk in actions:
        env.step_chunk([env_index], chunk)
        seen.append(look(env, env_index))
    physics = env._sims._envs[env_index].get_state().numpy()
    return np.stack([s[0] for s in seen]), np.stack([s[1] for s in seen]), physics


def play_expert(env, reset_id):
    env.reset([0], [start(reset_id, ignore=True)])
    actions, result = env.expert_chunk([0], 24, noise=0.0)
    return actions, result.reward, env._sims._envs[0].get_state().numpy()


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


DIGEST = """
import hashlib, sys
sys.path[:0] = {folders!r}
from test_maniskill import config, make, play
env = make(config())
print("digest", hashlib.sha256(b"".join(part.tobytes() for part in play(env, 5))).hexdigest())
env.close()
"""


def test_episode_is_bit_identical_in_every_parallel_env(cube):
    first = play(cube, 5)
    pushes = [play_expert(cube, 0) for _ in range(2)]
    assert same(*pushes), "contacts of the former episode leave no trace"
    assert same(first, play(cube, 5)), "after an episode that pushed the cube to its goal"
    play(cube, 6, env_index=1)
    assert same(first, play(cube, 5, env_index=1)), "in the other environment"
    assert not same(first, play(cube, 7))
    assert first[0].std() > 20, "images show something"


@pytest.mark.slow
def test_episode_is_bit_identical_in_other_processes(cube):
    first = play(cube, 5)
    code = DIGEST.format(folders=[os.path.dirname(__file__), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    mine = hashlib.sha256(b"".join(part.tobytes() for part in first)).hexdigest()
    assert f"digest {mine}" in done.stdout


def test_reset_id_determines_the_initial_state():
    from embodyrl.envs.maniskill.sims import BatchSims

    cfg = config(obs_mode=ObsMode.state)
    single = make(cfg)
    batch = ChunkedEnv(BatchSims(single.spec, cfg, 1), 1, use_rel_reward=True, reward_coef=1.0)
    for env in (single, batch):
        states = []
        for reset_id in (5, 7, 5):
            env.reset([0], [start(reset_id)])
            states.append(look(env)[1])
        env.close()
        assert np.abs(states[0] - states[1]).max() > 1e-2, "the cube lies elsewhere"
        np.testing.assert_allclose(states[0], states[2], atol=1e-5)


def test_batch_of_one_matches_a_single_simulator(cube):
    """The code of GPU batches, with a batch of one, which the CPU can simulate."""
    from embodyrl.envs.maniskill.sims import BatchSims

    batch = ChunkedEnv(BatchSims(cube.spec, config(), 1), 1, use_rel_reward=True, reward_coef=1.0)
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 8, 7)).astype(np.float32)
    seen = []
    for env in (cube, batch):
        env.reset([0], [start(5, ignore=True)])
        first, result = look(env), env.step_chunk([0], actions)
        seen.append([*first, result.reward, result.success, result.terminated, *look(env), env.render(0)])
    batch.close()
    assert seen[0][2].any()
    for ours, theirs in zip(*seen, strict=True):
        np.testing.assert_allclose(ours.astype(float), theirs.astype(float), atol=1e-5)


class _Rows:
    """The attributes of a scene that `BaseEnv.reset` uses, without a simulator, with four rows."""

    actors, articulations, sensors = {}, {}, {}
    _reset_mask = None


def sampled_rows():
    """Create a batch whose episodes are sampled in all ways of ManiSkill's tasks; `reset` is ManiSkill's own."""
    import torch
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.envs.utils import randomization

    class Drawn(BaseEnv):
        def __init__(self):
            self.num_envs, self.device, self._enhanced_determinism = 4, torch.device("cpu"), False
            self.reconfiguration_freq = self._reconfig_counter = 0
            self.scene, self.agent, self.resets = _Rows(), None, 0
            self._elapsed_steps, self.drawn = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 8)
            self._set_main_rng([1, 2, 3, 4])
            self._set_episode_rng([1, 2, 3, 4], torch.arange(4))

        gpu_sim_enabled = property(lambda self: False)

        def _initialize_episode(self, env_idx, options):
            assert self.scene._reset_mask.nonzero()[:, 0].tolist() == env_idx.tolist()
            b = len(env_idx)
            sampler = randomization.UniformPlacementSampler([[-0.1, -0.2], [0.1, 0.2]], batch_size=b)
            columns = [sampler.sample(0.1, 100), sampler.sample(0.1, 100), torch.rand((b, 2))]
            columns.append(torch.tensor(self._episode_rng.normal(0, 0.02, (b, 2))))
            self.drawn[env_idx] = torch.cat(columns, dim=1).float()

        def _clear_sim_state(self):
            self.resets += 1

        get_obs = staticmethod(lambda info: None)

        def get_info(self):
            """Return the info; row 2 starts with its goal reached."""
            return {"success": torch.arange(4) == 2}

        reward_mode = "dense"

        def step(self, actions):
            """Return the action as reward, terminate above 1 and succeed above 2; the state contains the action."""
            self.drawn[:, 0] = told = torch.as_tensor(actions)[:, 0].clone()
            row = torch.arange(4)
            return None, told, told > 1, torch.zeros(4), {"success": told > 2, "row": row, "pair": row.repeat(2, 1).T}

        def _get_obs_state_dict(self, info):
            return {"drawn": self.drawn}

        def render_rgb_array(self):
            return torch.arange(4)[:, None, None, None].expand(4, 2, 2, 3).to(torch.uint8)

    return Drawn()


def test_batched_resets_match_single_resets():
    from embodyrl.envs.maniskill.simulator import restart_rows

    cfg, together, alone = config(obs_mode=ObsMode.state), sampled_rows(), sampled_rows()
    restart_rows(cfg, together, {0: 7, 2: 11, 3: 7}, ())
    assert together.resets == 1
    assert together.drawn[1].tolist() == [0.0] * 8, "runs on"
    np.testing.assert_array_equal(together.drawn[0], together.drawn[3])
    for reset_id, row in ((7, 0), (11, 2)):
        restart_rows(cfg, alone, {1: reset_id}, ())
        np.testing.assert_array_equal(together.drawn[row], alone.drawn[1])
    assert together.scene._reset_mask.all()


def test_batched_simulation_matches_single_simulations(monkeypatch):
    """Actions, outcomes, states, videos and infos of four environments; a waiting environment is restarted."""
    from embodyrl.envs.maniskill import sims

    rows = sampled_rows()
    monkeypatch.setattr(sims, "build", lambda *_: rows)
    cfg = config(obs_mode=ObsMode.state)
    spec = replace(described._build_spec(cfg, replace(PANDA, state_dim=8)), simulator=SimulatorSpec(lockstep=True))
    env = ChunkedEnv(sims.BatchSims(spec, cfg, 4), 4, use_rel_reward=False, reward_coef=1.0)
    env.reset([2, 0, 3, 1], [start(reset_id) for reset_id in (7, 11, 5, 3)])
    assert env.solved_at_reset([0, 1, 2, 3]) == [2]
    begun = rows.drawn.clone()
    for env_index in range(4):
        np.testing.assert_array_equal(look(env, env_index)[1], begun[env_index])
    actions = np.zeros((3, 2, 7), np.float32)
    actions[:, :, 0] = [[0.5, 0.25], [2.5, 9.0], [-1.0, 1.5]]
    result = env.step_chunk([3, 0, 2], actions)
    assert result.reward.tolist() == [[0.5, 0.25], [2.5, 0.0], [-1.0, 1.5]]
    assert result.terminated.tolist() == [[False, False], [True, False], [False, True]]
    assert result.success.tolist() == [[False, False], [True, False], [False, False]]
    assert [look(env, env_index)[1][0] for env_index in (3, 0, 2)] == [0.25, 2.5, 1.5], (
        "row 0 goes on with its last action"
    )
    np.testing.assert_array_equal(look(env, 1)[1], begun[1])
    assert [env.render(env_index).max() for env_index in range(4)] == [0, 1, 2, 3]
    env.step_chunk([1, 3], actions[:2])
    assert [env._sims.info(env_index) for env_index in (3, 1)] == [
        {"success": True, "row": 3, "pair": [3, 3]},
        {"success": False, "row": 1, "pair": [1, 1]},
    ]


@pytest.mark.parametrize(
    ("env_id", "placement"), [("PutEggplantInBasketScene-v1", {"episode_id": 7}), ("PushCube-v1", {})]
)
def test_bridge_tasks_use_numbered_placements(env_id, placement):
    """Tasks on Bridge data; no package contains their files."""
    from embodyrl.envs.maniskill.simulator import restart

    asked = []
    task = SimpleNamespace(reset=lambda **told: (asked.append(told), (None, {}))[1], scene=SimpleNamespace(sensors={}))
    restart(config(env_id), task, 7, ())
    assert asked == [{"seed": [7], "options": {"reconfigure": True, **placement}}]


def test_observations_and_rewards_match_maniskill():
    """Images, angles and hand pose of one task, and all observations of another while its expert solves it."""
    import gymnasium

    theirs_of = {"render_backend": "cpu", "sim_backend": "physx_cpu", "control_mode": "pd_ee_delta_pose"}
    cameras = ["hand_camera", "base_camera"]
    sizes = InitParams(camera_heights=64, camera_widths=96, camera_names=cameras)
    env = make(config(init_params=sizes, use_rel_reward=False))
    sensors = {"height": 64, "width": 96, "shader_pack": "minimal"}
    theirs = gymnasium.make("PushCube-v1", obs_mode="rgb", sensor_configs=sensors, **theirs_of)
    seen = theirs.reset(seed=5, options={"reconfigure": True})[0]
    env.reset([0], [start(5)])
    for action in (None, *np.random.default_rng(0).uniform(-1, 1, (2, 7)).astype(np.float32)):
        if action is not None:
            seen, reward, *_ = theirs.step(action)
            assert env.step_chunk([0], action[None, None]).reward[0, 0] == np.float32(reward)
        images, state = look(env)
        for image, camera in zip(images, cameras, strict=True):
            np.testing.assert_array_equal(image, seen["sensor_data"][camera]["rgb"][0], err_msg=camera)
        np.testing.assert_array_equal(state, [*seen["agent"]["qpos"][0], *seen["extra"]["tcp_pose"][0]])
    env.close()
    theirs.close()

    env = make(config("PickCube-v1", obs_mode=ObsMode.state, use_rel_reward=False, reward_mode="sparse"))
    theirs = gymnasium.make("PickCube-v1", obs_mode="state", reward_mode="sparse", **theirs_of)
    theirs.reset(seed=5, options={"reconfigure": True})
    env.reset([0], [start(5)])
    actions, result = env.expert_chunk([0], 50, noise=0.0)
    assert result.success.any()
    held = []
    for k in range(result.valid.sum()):
        seen, reward, terminated, _, info = theirs.step(actions[0, k])
        assert (result.reward[0, k], result.terminated[0, k]) == (np.float32(reward), bool(terminated))
        held.append(bool(info["is_grasped"]))
    np.testing.assert_array_equal(look(env)[1], seen[0])
    assert held[-1]
    assert not held[0]
    env.close()
    theirs.close()


@pytest.mark.parametrize(("env_id", "drawn"), [("PickCube-v1", False), ("PegInsertionSide-v1", True)])
def test_tasks_with_randomly_chosen_objects_are_detected(env_id, drawn):
    from embodyrl.envs.maniskill.simulator import build, samples_scene

    env = build(config(env_id, control_mode=None), ObsMode.state)
    assert samples_scene(env) is drawn
    env.close()


def test_lean_profile_changes_images_but_not_states(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full, lean = (make(config("PickCube-v1", render_profile=RenderProfile(p))) for p in ("full", "lean"))
    pictures, states, physics = play(full, 3)
    lean_pictures, lean_states, lean_physics = play(lean, 3)
    np.testing.assert_array_equal(states, lean_states)
    np.testing.assert_array_equal(physics, lean_physics)
    error = np.mean((pictures.astype(float) - lean_pictures) ** 2)
    assert 0 < error < 255**2 / 10**2.2, "another image, but of the same scene (over 22 dB)"
    full.close()
    lean.close()


@pytest.mark.parametrize("env_id", ["PickCube-v1", "PushCube-v1", "PullCube-v1", "StackCube-v1"])
def test_experts_reach_their_goals(env_id):
    kwargs = {"robot_uids": "panda"} if env_id == "StackCube-v1" else {}
    env = make(config(env_id, obs_mode=ObsMode.state, kwargs=kwargs))
    succeeded = 0
    for seed in range(100, 108):
        env.reset([0], [start(seed)])
        succeeded += bool(env.expert_chunk([0], 50, noise=0.0)[1].success.any())
    env.close()
    assert succeeded >= 7


def test_tasks_without_reward_use_success_as_reward():
    """The default reward mode "none" gives 0 for every step of a success."""
    cfg = config("PlugCharger-v1", obs_mode=ObsMode.state)
    sims = FACTORY.simulators(cfg, EnvContext(num_envs=1))
    try:
        sims.reset_env(0, 0, 0)
        task = sims._envs[0]
        assert task.reward_mode == "none"
        outside = sims.step_env(0, np.zeros(7, np.float32))
        task.charger.set_pose(task.goal_pose)
        inside = sims.step_env(0, np.zeros(7, np.float32))
        assert not sims.solved, "the episode began with the charger outside"
    finally:
        sims.close()
    assert [(step.success, step.reward) for step in (outside, inside)] == [(False, 0.0), (True, 1.0)]


def test_fov_override_keeps_the_image_size(cube):
    def picture(env):
        env.reset([0], [start(3)])
        return look(env)[0]

    changed = make(config(kwargs={"sensor_configs": {"base_camera": {"fov": 0.4}}}))
    own, narrow = picture(cube), picture(changed)
    changed.close()
    assert not np.array_equal(own[0], narrow[0])
    np.testing.assert_array_equal(own[1], narrow[1])


def test_maniskill_task_errors_are_reported():
    """Errors in this process, which has loaded the simulator; `spec` uses a separate process."""
    with pytest.raises(UnknownNameError, match="Did you mean 'PushCube-v1'"):
        make(config("PushCub-v1"))
    with pytest.raises(ConfigError, match="pd_ee_pos not in supported modes"):
        make(config(control_mode="pd_ee_pos"))


def test_missing_files_are_reported_before_workers_start(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"assets bridge_v2_real2sim are missing from"):
        FACTORY.spec(config("PutCarrotOnPlateInScene-v1"), EnvContext())
    assert list(tmp_path.rglob("*")) == [], "no half-made folder"


@pytest.mark.slow
def test_missing_robots_and_devices_are_reported_before_workers_start(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="robot files are missing"):
        FACTORY.spec(config("UnitreeH1Stand-v1", control_mode=None), EnvContext())
    with pytest.raises(ConfigError, match="cannot be built with sim_backend=gpu"):
        FACTORY.spec(config(sim_backend=SimBackend.gpu, reward_coef=3.0), EnvContext())
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    with pytest.raises(MissingDependencyError, match=r"needs a Vulkan driver.*mesa-vulkan-drivers"):
        FACTORY.spec(config(reward_coef=2.0), EnvContext())
