"""History of environments: stacked observations and temporal ensembling of action chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from settings import env_of

from embodyrl.envs import ENVS
from embodyrl.envs.history import HistorySims, TemporalEnsemble, with_chunks, with_history
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError, UnknownNameError
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.environment import env_spec
from embodyrl.plan.saved import save_config
from embodyrl.types import ActionKind, ActionSpec, EpisodeStart, GoalSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot" / "act" / "state" / "tensors.safetensors"
SIZE = {"camera_heights": 16, "camera_widths": 16, "camera_names": ["front"]}


def make(env_indices=1, **keys):
    cfg = env_of("tabletop", init_params=SIZE, **keys)
    return ENVS.get("tabletop").make(cfg, EnvContext(num_envs=env_indices))


def plain():
    return ENVS.get("tabletop").make(env_of("tabletop", init_params=SIZE), EnvContext(num_envs=1))


def look(env):
    images = np.zeros((1, len(env.spec.cameras.names), 16, 16, 3), np.uint8)
    state = np.zeros((1, env.spec.state_dim), np.float32)
    env.observe([0], images, state)
    return images[0], state[0]


START = EpisodeStart(reset_id=3, seed=1, max_episode_steps=9)


def test_temporal_ensembling_matches_lerobot():
    data = load_file(GOLDEN)
    for row in range(data["ensemble.chunks"].shape[1]):
        ensemble = TemporalEnsemble(float(data["ensemble.coeff"]), data["ensemble.chunks"].shape[2])
        for chunk, expected in zip(data["ensemble.chunks"][:, row], data["ensemble.out"][:, row], strict=True):
            assert ensemble.add_chunk(chunk) == pytest.approx(expected, abs=1e-6)


def test_ensembling_weights_depend_on_the_chunk_age():
    for coeff, expected in ((0.5, 1.866167), (0.01, 2.323339), (0.0, 2.333333)):
        ensemble = TemporalEnsemble(coeff, 3)
        for chunk in ([0, 0, 1], [0, 2, 0]):
            ensemble.add_chunk(np.array(chunk, np.float32)[:, None])
        assert ensemble.add_chunk(np.array([[4.0], [0], [0]], np.float32))[0] == pytest.approx(expected, abs=1e-5)


def test_ensembling_rejects_a_delay():
    def problems(steps):
        cfg = env_of("tabletop", init_params=SIZE, ensemble_chunk=4, control={"latency_steps": steps})
        return list(cfg.problems())

    assert problems(0) == problems([0, 0]) == []
    assert "temporal ensembling supports no delay" in problems([0, 2])[0]


def test_history_observations_are_ordered_oldest_first():
    env, alone = make(history=3), plain()
    assert env.spec.cameras.names == ("front_2", "front_1", "front")
    assert env.spec.state_dim == 3 * alone.spec.state_dim
    for one in (env, alone):
        one.reset([0], [START])
    seen = [look(alone)] * 3
    rng = np.random.default_rng(0)
    for _ in range(3):
        images, state = look(env)
        assert np.array_equal(images, np.concatenate([image for image, _ in seen]))
        assert np.array_equal(state, np.concatenate([numbers for _, numbers in seen]))
        # A chunk of two actions: its first step is a step of the history too.
        actions = rng.uniform(-1, 1, (1, 2, 7)).astype(np.float32)
        env.step_chunk([0], actions)
        for k in range(2):
            alone.step_chunk([0], actions[:, k : k + 1])
            seen = [*seen[1:], look(alone)]
    env.reset([0], [START])
    alone.reset([0], [START])
    assert np.array_equal(look(env)[1], np.tile(look(alone)[1], 3))


def test_ensembled_actions_are_reset_with_each_episode():
    env, alone = make(ensemble_chunk=4), plain()
    assert env.spec.action.dim == 28
    assert env.spec.expert.tasks == ()
    rng = np.random.default_rng(0)
    for _ in range(2):
        ensemble = TemporalEnsemble(0.01, 4)
        for one in (env, alone):
            one.reset([0], [START])
        for _ in range(5):
            chunk = rng.uniform(-1, 1, (4, 7)).astype(np.float32)
            env.step_chunk([0], chunk.reshape(1, 1, 28))
            alone.step_chunk([0], ensemble.add_chunk(chunk)[None, None])
            assert np.array_equal(look(env)[1], look(alone)[1])


def test_former_names_of_environments_with_history_load(tmp_path):
    words = ["env=tabletop", "env.env_type=tabletop_history", "env.history=2", "model=random"]
    save_config(load_config("eval", words), tmp_path / "config.yaml")
    cfg = load_saved_config(tmp_path, [])
    assert env_spec(cfg) == with_history(env_spec(load_config("eval", ["env=tabletop", "model=random"])), 2)
    with pytest.raises(UnknownNameError, match="Unknown env 'text_history'"):
        ENVS.get("text_history")


def test_goals_in_a_history_are_not_relabeled():
    spec = replace(plain().spec, state_dim=6, goal=GoalSpec(achieved=(0, 2), desired=(3, 5)))
    assert with_history(spec, 3).goal is None


def test_flattened_chunk_spec_has_no_binary_gripper():
    """The environment itself snaps the gripper of the executed action."""
    spec = plain().spec
    assert spec.action.gripper.binary
    assert not with_chunks(spec, 4).action.gripper.binary


def test_ensembling_of_discrete_actions_is_rejected():
    spec = replace(plain().spec, action=ActionSpec(dim=1, kind=ActionKind.discrete, sizes=(2,)))
    with pytest.raises(ConfigError, match=r"env\.ensemble_chunk=4 averages real-valued actions"):
        with_chunks(spec, 4)


def test_new_episode_starts_a_new_average():
    env, alone = make(ensemble_chunk=4, ensemble_coeff=0.0), plain()
    chunks = np.random.default_rng(0).uniform(-1, 1, (2, 1, 1, 28)).astype(np.float32)
    env.reset([0], [START])
    env.step_chunk([0], chunks[0])
    for one in (env, alone):
        one.reset([0], [START])
    env.step_chunk([0], chunks[1])
    alone.step_chunk([0], chunks[1].reshape(1, 4, 7)[:, :1])
    assert np.allclose(look(env)[1], look(alone)[1], atol=1e-5)


def test_saved_average_can_be_loaded_twice():
    cfg = env_of("tabletop", init_params=SIZE, ensemble_chunk=4, ensemble_coeff=0.0)
    sims = HistorySims(ENVS.get("tabletop").simulators(cfg, EnvContext(num_envs=1)), cfg)
    env_index, chunks = np.array([0]), np.random.default_rng(0).uniform(-1, 1, (4, 1, 28)).astype(np.float32)
    sims.reset(env_index, np.array([3]), np.array([1]))
    sims.step(env_index, chunks[0])
    saved, ends = sims.save(0), []
    for _ in range(2):
        sims.load(0, saved)
        for chunk in chunks[1:]:
            sims.step(env_index, chunk)
        state = np.zeros((1, sims.spec.state_dim), np.float32)
        sims.observe(env_index, np.zeros((1, 1, 16, 16, 3), np.uint8), state, env_index)
        ends.append(state)
    sims.close()
    assert np.array_equal(*ends)
