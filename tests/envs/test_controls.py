"""Inputs of a person, and states of simulators that are saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest

import embodyrl
from embodyrl.envs.gym.settings import GymSettings


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"key": "KeyA", "index": 0}, "value is missing"),
        ({"index": 0, "value": 1}, "neither key nor pad"),
        ({"pad": "stick", "index": 0, "value": 1}, "is invalid, expected buttonN"),
        ({"keys": "KeyA", "index": 0, "value": 1}, "keys='KeyA' is unknown"),
        ({"pad": "axis1-", "index": 0, "value": 1}, ""),
    ],
)
def test_declared_inputs_are_checked(given: dict, part: str) -> None:
    problems = [*GymSettings(env_type="gym", id="CartPole-v1", controls=[given]).problems()]
    assert ["env.controls[0]" in line and part in line for line in problems] == [True] * bool(part)


def test_gymnasium_environment_declares_its_inputs() -> None:
    keys = "env.controls=[{key: ArrowLeft, index: 0, value: 0},{key: ArrowRight, index: 0, value: 1}]"
    env = embodyrl.make_env("gym", "env.id=CartPole-v1", keys, "env.neutral=[1]")
    controls = env.layout.action.controls
    env.close()
    assert [(c.key, c.value) for c in controls] == [("ArrowLeft", 0), ("ArrowRight", 1)]
    assert env.layout.action.neutral == (1.0,)
    with pytest.raises(embodyrl.errors.ConfigError, match=r"env.controls\[0\]: index=0, value=2"):
        embodyrl.make_env("gym", "env.id=CartPole-v1", "env.controls=[{key: KeyA, index: 0, value: 2}]")


def test_loaded_state_repeats_the_episode() -> None:
    env = embodyrl.make_env("tabletop", "env.eval.task_ids=[12]", "env.eval.max_episode_steps=6")
    env.reset(seed=3)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (6, 7)).astype(np.float32)
    for action in actions[:2]:
        env.step(action)
    saved = env.save_state()
    first = [env.step(action) for action in actions[2:]]
    assert first[-1][3], "the time limit"
    for _ in range(2):  # a saved state can be loaded several times
        env.load_state(saved)
        again = [env.step(action) for action in actions[2:]]
        for (seen, *rest), (other, *others) in zip(first, again, strict=True):
            assert rest == others
            np.testing.assert_array_equal(seen["images"], other["images"])
            np.testing.assert_array_equal(seen["state"], other["state"])
    env.close()
    cart = embodyrl.make_env("gym", "env.id=CartPole-v1")
    cart.reset(seed=0)
    with pytest.raises(embodyrl.errors.EnvError, match="cannot save its state"):
        cart.save_state()
    cart.close()
