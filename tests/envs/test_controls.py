"""Inputs of a person, and states of simulators that are saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest

import embodyrl
from embodyrl.envs.controls import action_of, control_problem, controls_of, neutral_action
from embodyrl.types import ActionKind, ActionSpec, Control, GripperConvention


def test_default_keys_cover_all_dimensions_of_a_box_action() -> None:
    action = ActionSpec(dim=2, low=(-2.0, 0.0), high=(4.0, float("inf")))
    assert [(c.key, c.index, c.value) for c in controls_of(action)] == [
        ("KeyA", 0, -2.0),
        ("KeyD", 0, 4.0),
        ("KeyS", 1, 0.0),
        ("KeyW", 1, 1.0),
    ]
    last = neutral_action(action)
    assert action_of(action, {}, last).tolist() == [0.0, 0.0]
    assert action_of(action, {1: 0.5, 3: 1.0}, last).tolist() == [2.0, 1.0]
    assert action_of(action, {0: 1.0, 1: 1.0}, last).tolist() == [2.0, 0.0], "both keys of a pair are added"


def test_gripper_keeps_its_last_command() -> None:
    action = ActionSpec(
        dim=2,
        gripper=GripperConvention(open=-1.0, closed=1.0),
        controls=(Control(label="close", index=-1, value=1.0, key="KeyX"),),
    )
    open_action = neutral_action(action)
    assert open_action.tolist() == [0.0, -1.0]
    closed = action_of(action, {0: 1.0}, open_action)
    assert closed.tolist() == [0.0, 1.0]
    assert action_of(action, {}, closed).tolist() == [0.0, 1.0]


def test_digit_keys_select_categories_and_no_key_is_neutral() -> None:
    action = ActionSpec(dim=1, kind=ActionKind.discrete, sizes=(3,), neutral=(2.0,))
    last = neutral_action(action)
    assert [c.key for c in controls_of(action)] == ["Digit0", "Digit1", "Digit2"]
    assert action_of(action, {}, last).tolist() == [2.0]
    assert action_of(action, {1: 1.0}, last).tolist() == [1.0]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"key": "KeyA", "index": 0}, "value is missing"),
        ({"index": 0, "value": 1}, "neither key nor pad"),
        ({"pad": "stick", "index": 0, "value": 1}, "neither buttonN"),
        ({"keys": "KeyA", "index": 0, "value": 1}, "keys='KeyA' is unknown"),
        ({"pad": "axis1-", "index": 0, "value": 1}, ""),
    ],
)
def test_declared_inputs_are_checked(given: dict, part: str) -> None:
    assert control_problem(given).find(part) >= 0
    assert bool(control_problem(given)) == bool(part)


@pytest.mark.needs("own_loop")
def test_gymnasium_environment_declares_its_inputs() -> None:
    keys = "env.controls=[{key: ArrowLeft, index: 0, value: 0},{key: ArrowRight, index: 0, value: 1}]"
    env = embodyrl.make_env("gym", "env.id=CartPole-v1", keys, "env.neutral=[1]")
    controls = controls_of(env.layout.action)
    env.close()
    assert [(c.key, c.value) for c in controls] == [("ArrowLeft", 0), ("ArrowRight", 1)]
    assert neutral_action(env.layout.action).tolist() == [1.0]
    with pytest.raises(embodyrl.errors.ConfigError, match=r"env.controls\[0\]: dimension 0 and value 2"):
        embodyrl.make_env("gym", "env.id=CartPole-v1", "env.controls=[{key: KeyA, index: 0, value: 2}]")


@pytest.mark.needs("tabletop")
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
