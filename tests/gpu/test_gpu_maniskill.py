"""ManiSkill's GPU backend: one batched simulation for all environments of a worker."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from embodyrl.commands.train import train
from embodyrl.envs.maniskill.factory import FACTORY
from embodyrl.envs.protocol import EnvContext
from embodyrl.plan.config import load_config
from embodyrl.types import EpisodeStart, ObservationOut

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("mani_skill") is None, reason="ManiSkill is not installed"),
]

WORDS = ["env=maniskill", "env.id=PushCube-v1", "env.sim_backend=gpu", "rollout.pipeline_stage_num=1"]


def look(env, env_index):
    spec = env.spec
    out = ObservationOut(
        images=np.zeros((len(spec.cameras.names), *spec.cameras.size, 3), np.uint8),
        state=np.zeros(spec.state_dim, np.float32),
    )
    env.observe([env_index], out.images[None], out.state[None])
    return out.images, out.state


def test_reset_id_determines_the_episode_in_every_parallel_env():
    env = FACTORY.make(load_config("train", WORDS).env, EnvContext(num_envs=4))
    starts = [EpisodeStart(reset_id=i, seed=0, max_episode_steps=50) for i in (5, 6, 7, 5)]
    env.reset([0, 1, 2, 3], starts)
    images, state = look(env, 0)
    assert images.std() > 20
    np.testing.assert_allclose(look(env, 3)[1], state, atol=1e-3)
    assert np.abs(look(env, 1)[1] - state).max() > 1e-3
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 8, 7)).astype(np.float32)
    result = env.step_chunk([0, 1, 2, 3], actions)
    assert result.valid.all()
    assert np.isfinite(result.reward).all()
    moved = look(env, 2)[1]
    env.reset([1], [starts[0]])
    np.testing.assert_allclose(look(env, 1)[1], state, atol=1e-3)
    np.testing.assert_allclose(look(env, 2)[1], moved, atol=1e-3)
    env.close()


def test_training_runs_with_gpu_batched_simulation(tmp_path):
    words = ["env.obs_mode=state", "model=mlp", "algorithm=ppo", "env.train.total_num_envs=64", "runner.max_steps=2"]
    places = [f"runner.output_dir={tmp_path}", "runner.logger.backends=[jsonl]", "launcher.env_workers=1"]
    run = train(load_config("train", [*WORDS, *words, *places])).run
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["env/steps"] for row in rows] == [3200, 3200]
