"""LIBERO-PRO in the real simulator: every task loads, has its instruction and is solvable."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
from settings import env_of

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.libero import install
from embodyrl.envs.libero.factory import AXES, FACTORY
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import InitParams
from embodyrl.errors import EnvError
from embodyrl.types import EpisodeStart, ObservationOut

pytestmark = pytest.mark.sim

SIZE = 64
FAMILIES = ("spatial", "object", "goal", "10")
EXPERT_FAMILIES = ("spatial", "object")


def harness(family, *, lean=True):
    """Create the environment of a suite with its axes."""
    from embodyrl.envs.libero.sims import LiberoSims

    cameras = InitParams(camera_names=["agentview"], camera_heights=SIZE, camera_widths=SIZE)
    cfg = env_of("libero", task_suite_name=f"libero_{family}", init_params=cameras)
    spec = FACTORY.spec(cfg, EnvContext(suites=AXES))
    install.prepare_process()
    return ChunkedEnv(LiberoSims(spec, max_models=1, lean=lean, fast=lean), 1, use_rel_reward=True, reward_coef=1.0)


def start(env, task, index, steps=280):
    reset_id = env.spec.get_reset_ids(task)[index]
    env.reset([0], [EpisodeStart(reset_id=reset_id, seed=1000 + index, max_episode_steps=steps)])


def look(env):
    out = ObservationOut(images=np.zeros((1, SIZE, SIZE, 3), np.uint8), state=np.zeros(8, np.float32))
    env.observe([0], out.images[None], out.state[None])
    return out.images[0]


def check_task(env, task):
    """Check one state of a task: instruction of its description, a step, an observation, not solved."""
    start(env, task, task * 7 % 50)
    simulator = env._sims.pool.use(0)
    suite = env.spec.get_suite(task)
    if suite.endswith(("_lan", "_task")):
        assert env.instruction(0) == simulator.instruction, (suite, task)
    else:
        file_name = install.get_suite_tasks(suite)[task % 10].language
        assert env.instruction(0) == file_name, (suite, task)
    result = env.step_chunk([0], np.zeros((1, 4, 7), np.float32))
    assert not result.success.any(), (suite, task)
    assert result.valid.all()
    assert look(env).std() > 10.0, (suite, task)


def test_suite_and_perturbed_suite_run_in_one_environment():
    """Task 3 of each suite: equal numbers mean equal positions in the task table."""
    env = harness("object")
    try:
        for task in (3, 23):
            check_task(env, task)
        base, swap = (env.spec.get_suite(task) for task in (3, 23))
        assert (base, swap) == ("libero_object", "libero_object_swap")
        with pytest.raises(EnvError, match=r"'pick the bbq sauce.*initial state has shape \(3,\)"):
            env._sims.pool.use(0).reset(np.zeros(3), 0)
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "full"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_perturbed_task_loads(family, axis, lean):
    """All 160 tasks, ten at a time."""
    env = harness(family, lean=lean)
    try:
        checked = [task for task in range(len(env.spec.tasks)) if env.spec.get_suite(task).endswith(f"{family}_{axis}")]
        assert len(checked) == 10
        for task in checked:
            check_task(env, task)
            sys.stdout.write(f"{env.spec.get_suite(task)} {task % 10} {'lean' if lean else 'full'} ok\n")
    finally:
        env.close()


@functools.cache
def solved(family):
    """Return the tasks that the expert solves from one held-out state each, by suite."""
    env, found = harness(family), {}
    try:
        for task in range(len(env.spec.tasks)):
            start(env, task, 20 + task % 10)
            while not (result := env.expert_chunk([0], 8, noise=0.0)[1]).done[0]:
                pass
            found.setdefault(env.spec.get_suite(task), []).append(bool(result.success.any()))
            sys.stdout.write(f"{env.spec.get_suite(task)} {task % 10} {result.success.any()}\n")
    finally:
        env.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_solve_the_perturbed_suites(family):
    """At least nine of ten tasks of each suite are solved within 280 steps, 100 episodes in all."""
    for suite, successes in solved(family).items():
        assert len(successes) == 10
        assert sum(successes) >= 9, suite
