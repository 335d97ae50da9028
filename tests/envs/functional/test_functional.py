"""Functional environments in JAX: one batch for all environments."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from settings import env_of

from embodyrl.envs.functional.factory import FACTORY
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError, MissingDependencyError
from embodyrl.types import ActionKind, EpisodeStart

WITHOUT = importlib.util.find_spec("jax") is None
needs_jax = pytest.mark.skipif(WITHOUT, reason="jax is not installed")
needs_gymnax = pytest.mark.skipif(importlib.util.find_spec("gymnax") is None, reason="gymnax is not installed")
NO_IMAGES = np.zeros((8, 0, 0, 0, 3), np.uint8)


def cfg_of(env_id: str, **keys: Any) -> Any:
    return env_of("functional", id=env_id, use_rel_reward=False, **keys)


def counter(limit: int = 5) -> Any:
    """Return an environment that adds its action to a random start; at `limit` it is solved."""
    import jax
    from jax import numpy as jnp

    @jax.tree_util.register_dataclass
    @dataclass
    class State:
        obs: Any
        reward: Any
        done: Any
        metrics: Any

    class Counter:
        action_size, episode_length = 1, 20

        def reset(self, key: Any) -> State:
            start = jax.random.uniform(key, (2,))
            return State(start, jnp.float32(0), jnp.float32(0), {"solved": jnp.float32(0)})

        def step(self, state: State, action: Any) -> State:
            obs = state.obs + action
            over = obs[0] >= limit
            return State(obs, action[0] * 2, over.astype(jnp.float32), {"solved": over.astype(jnp.float32)})

    return Counter()


def start(reset_id: int) -> EpisodeStart:
    return EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=20)


@pytest.mark.skipif(not WITHOUT, reason="jax is installed")
def test_missing_jax_error_names_the_install_command():
    with pytest.raises(MissingDependencyError, match="pip install jax"):
        FACTORY.spec(cfg_of("gymnax:CartPole-v1"), EnvContext())


def test_functional_env_id_without_a_library_is_rejected():
    for env_id in ("CartPole-v1", ":x", "gymnax:"):
        assert "gymnax:NAME" in FACTORY.validate(cfg_of(env_id))[0]


@needs_jax
def test_missing_package_of_a_library_is_reported(tmp_path, monkeypatch):
    (tmp_path / "needy_home.py").write_text("import needed_package\n\n\ndef make():\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"needed_package.*Fix: pip install needed_package\."):
        FACTORY.spec(cfg_of("needy_home:make"), EnvContext())


@needs_jax
def test_user_defined_functional_environment_steps_in_one_batch():
    env = FACTORY.make(cfg_of(f"{__name__}:counter", kwargs={"limit": 2}, success_key="solved"), EnvContext(num_envs=3))
    assert (env.spec.state_dim, env.spec.action.dim, env.spec.max_episode_steps) == (2, 1, 20)
    assert (env.spec.reward.reports_success, env.spec.reward.success) == (True, "info['solved']")
    unknown = FACTORY.spec(cfg_of(f"{__name__}:counter", success_key="sloved"), EnvContext()).reward
    assert (unknown.reports_success, unknown.success) == (False, "unknown; keys of info: solved")
    env.reset([0, 1, 2], [start(4), start(5), start(4)])
    state = np.zeros((3, 2), np.float32)
    env.observe([0, 1, 2], NO_IMAGES[:3], state)
    np.testing.assert_array_equal(state[0], state[2])
    assert (state[0] != state[1]).all()
    result = env.step_chunk([0, 2], np.array([[[0.5]], [[3.0]]], np.float32))  # clipped to 1
    np.testing.assert_array_equal(result.reward, [[1.0], [2.0]])
    before = state.copy()
    env.observe([0, 2], NO_IMAGES[:2], state, np.array([0, 2]))
    np.testing.assert_allclose(state - before, [[0.5, 0.5], [0, 0], [1, 1]], atol=1e-6)
    result = env.step_chunk([2], np.array([[[1.0]]], np.float32))
    assert result.success[0, 0]
    assert result.terminated[0, 0]


@needs_jax
def test_reset_of_one_env_keeps_other_envs():
    env = FACTORY.make(cfg_of(f"{__name__}:counter"), EnvContext(num_envs=2))
    env.reset([0, 1], [start(1), start(2)])
    env.step_chunk([0, 1], np.full((2, 1, 1), 0.25, np.float32))
    before, after = np.zeros((2, 2, 2), np.float32)
    env.observe([0, 1], NO_IMAGES[:2], before)
    env.reset([0], [start(7)])
    env.observe([0, 1], NO_IMAGES[:2], after)
    np.testing.assert_array_equal(before[1], after[1])
    assert (before[0] != after[0]).all()


@needs_jax
def test_envs_without_an_action_keep_their_state():
    env = FACTORY.make(cfg_of(f"{__name__}:counter"), EnvContext(num_envs=2))
    env.reset([0, 1], [start(1), start(2)])
    before, after = np.zeros((2, 2, 2), np.float32)
    env.observe([0, 1], NO_IMAGES[:2], before)
    env.step_chunk([1], np.ones((1, 1, 1), np.float32))
    env.observe([0, 1], NO_IMAGES[:2], after)
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_allclose(after[1] - before[1], 1, atol=1e-6)


@needs_jax
def test_saved_env_state_continues_the_same_episode():
    env: Any = FACTORY.make(cfg_of(f"{__name__}:counter"), EnvContext(num_envs=2))
    env.reset([0, 1], [start(1), start(2)])
    saved = env.save(0)
    action, first, again = np.full((1, 1, 1), 0.3, np.float32), *np.zeros((2, 1, 2), np.float32)
    env.step_chunk([0], action)
    env.observe([0], NO_IMAGES[:1], first)
    env.load(0, saved)
    env.step_chunk([0], action)
    env.observe([0], NO_IMAGES[:1], again)
    np.testing.assert_array_equal(first, again)


@needs_jax
def test_environment_with_another_interface_is_rejected():
    with pytest.raises(ConfigError, match=r"reset\(key\)"):
        FACTORY.make(cfg_of("numpy:float32", kwargs={"wrong": 1}), EnvContext())


@needs_gymnax
def test_gymnax_episode_equals_a_loop_over_its_functions():
    import gymnax
    import jax

    theirs, params = gymnax.make("CartPole-v1")
    ours = FACTORY.make(cfg_of("gymnax:CartPole-v1"), EnvContext(num_envs=2))
    assert ours.spec.action.kind is ActionKind.discrete
    ours.reset([1, 0], [start(3), start(8)])
    key, state = jax.random.PRNGKey(3), np.zeros((1, 4), np.float32)
    obs, carry = theirs.reset_env(jax.random.fold_in(key, 0), params)
    for step in range(12):
        ours.observe([1], NO_IMAGES[:1], state)
        np.testing.assert_allclose(state[0], np.asarray(obs), rtol=1e-5, atol=1e-6)
        obs, carry, reward, done, _ = theirs.step_env(jax.random.fold_in(key, step + 1), carry, 1, params)
        result = ours.step_chunk([1], np.ones((1, 1, 1), np.float32))
        assert result.reward[0, 0] == float(reward)
        assert result.terminated[0, 0] == bool(done)
        if done:
            return
    raise AssertionError("pushing to one side ends an episode of CartPole within 12 steps")


@needs_gymnax
def test_gymnax_time_limit_truncates():
    env = FACTORY.make(cfg_of("gymnax:Pendulum-v1"), EnvContext(num_envs=1))
    limit = env.spec.max_episode_steps
    env.reset([0], [EpisodeStart(reset_id=1, seed=0, max_episode_steps=10 * limit)])
    for _ in range(limit):
        result = env.step_chunk([0], np.zeros((1, 1, 1), np.float32))
    assert result.truncated[0, 0]
    assert not result.terminated[0, 0]
