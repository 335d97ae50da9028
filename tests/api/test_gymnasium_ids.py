"""Gymnasium ids of the simulators, also used with `env=gym`."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import embodyrl.gymnasium  # noqa: F401  (registers the ids)
from embodyrl import make_env
from embodyrl.config import compose
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError
from embodyrl.gymnasium import TASK_IDS
from embodyrl.plan.config import load_config

RED = "embodyrl/Tabletop-0-v0"


@pytest.mark.integration
def test_gymnasium_id_with_module_needs_no_import() -> None:
    program = (
        "import sys, gymnasium\n"
        "env = gymnasium.make('embodyrl.gymnasium:embodyrl/Tabletop-1-v0')\n"
        "print(env.reset(seed=0)[0]['instruction'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "touch the green block False\n", done.stderr


def test_every_simulator_registers_gymnasium_ids() -> None:
    assert {
        *("embodyrl/LIBERO-object-0-v0", "embodyrl/LIBERO-90-89-v0", "embodyrl/LIBERO-PRO-goal-swap-9-v0"),
        *("embodyrl/LIBERO-Plus-10-camera-0-v0", "embodyrl/MetaWorld-reach-v3", "embodyrl/ManiSkill-PushCube-v1"),
        *("embodyrl/Tabletop-20-v0", "embodyrl/Tabletop-v0", "embodyrl/Libero10-v0", "embodyrl/Metaworld-v0"),
    } <= {*gymnasium.registry}
    options = {overrides[0] for overrides in TASK_IDS.values()}
    assert options <= {*compose.options("env")}


@pytest.mark.parametrize(
    "name", ["LIBERO-90-89-v0", "LIBERO-PRO-goal-swap-9-v0", "LIBERO-Plus-10-camera-0-v0", "MetaWorld-reach-v3"]
)
def test_overrides_of_gymnasium_ids_are_valid(name: str) -> None:
    option, *words = gymnasium.registry[f"embodyrl/{name}"].kwargs["overrides"]
    cfg = load_config("eval", [f"env={option}", "model=random", *words]).env
    assert ENVS.get(cfg.env_type).validate(cfg) == []


def test_gymnasium_ids_cover_all_tabletop_tasks() -> None:
    cfg = load_config("eval", ["env=tabletop", "model=random"]).env
    tasks = ENVS.get(cfg.env_type).spec(cfg, EnvContext()).tasks
    assert len(tasks) == sum(name.startswith("Tabletop-") for name in TASK_IDS)
    env = gymnasium.make("embodyrl/Tabletop-20-v0")
    assert {env.reset(seed=seed)[0]["instruction"] for seed in range(3)} == {tasks[20]}


def test_single_task_passes_the_gymnasium_env_checker() -> None:
    check_env(gymnasium.make(RED).unwrapped, skip_render_check=True)
    with pytest.raises(ConfigError, match="this id has one task"):
        gymnasium.make(RED, task=3)
    small = gymnasium.make(RED, words=["env.init_params.camera_heights=64", "env.init_params.camera_widths=64"])
    assert small.observation_space["images"].shape == (2, 64, 64, 3)
    small.reset(seed=0)
    assert small.render().shape[2] == 3


@pytest.mark.integration
@pytest.mark.parametrize("more", [{}, {"vectorization_mode": "async", "vector_kwargs": {"shared_memory": False}}])
def test_vector_environments_start_the_same_episodes(more: dict) -> None:
    vector = gymnasium.make_vec(RED, num_envs=2, **more)
    seen, _ = vector.reset(seed=[3, 4])
    one = gymnasium.make(RED).reset(seed=4)[0]
    np.testing.assert_array_equal(seen["images"][1], one["images"])
    assert seen["instruction"] == ("touch the red block",) * 2
    assert vector.step(vector.action_space.sample())[0]["instruction"] == ("touch the red block",) * 2
    vector.close()


def test_gymnasium_id_runs_with_env_gym() -> None:
    """`env=gym` reads the frames and the state that `make_env` returns."""
    cfg = load_config("eval", ["env=gym", f"env.id=embodyrl.gymnasium:{RED}", "model=random"]).env
    factory = ENVS.get("gym")
    spec = factory.spec(cfg, EnvContext())
    ours = make_env("tabletop", "env.eval.task_ids=[0]")
    assert (spec.tasks, spec.state_dim) == (("touch the red block",), ours.layout.state_dim)
    assert (len(spec.cameras.names), spec.cameras.size) == (2, (112, 112))
