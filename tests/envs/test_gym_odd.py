"""Gymnasium environments that return unusual types or values."""

from __future__ import annotations

from collections import namedtuple
from threading import Lock
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from odd_envs import Plain
from settings import env_of
from test_gym import begin, config, look

from embodyrl.envs import ENVS
from embodyrl.envs.gym.sims import to_single_frame
from embodyrl.envs.gym.spaces import ObservationWriter, convert_action_space
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError, EnvError
from embodyrl.types import EnvSpec, ObservationOut

Five = namedtuple("Five", "observation reward terminated truncated info")


class NamedResults(Plain):
    def step(self, action):
        return Five(*super().step(action))


class ListResults(Plain):
    """Environment whose observation has a member that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"n": spaces.Box(-99, 99, (2,))})

    def reset(self, *, seed=None, options=None):
        return [*super().reset(seed=seed)]

    def step(self, action):
        return [*super().step(action)]

    def look(self) -> Any:
        return {"n": super().look(), "lock": Lock()}


class OldGenerator(Plain):
    """Environment that seeds a generator of its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.np_random: Any = np.random.RandomState(0)

    def reset(self, *, seed=None, options=None):
        self.np_random.seed(seed)
        self.place, self.steps = float(self.np_random.randint(1, 5)), 0
        return self.look(), {}


class CannotClose(Plain):
    def close(self):
        raise RuntimeError("the simulator is gone")


class NumpyBoolSuccess(Plain):
    """Environment that reports success in the second step, as NumPy's bool, and None before."""

    def step(self, action):
        seen, reward, _, _, info = super().step(action)
        solved = self.steps == 2
        return seen, reward, solved, False, {**info, "success": np.bool_(True) if solved else None, 7: "a number"}


class SolvedArray(NumpyBoolSuccess):
    def step(self, action):
        *result, info = super().step(action)
        return (*result, {"success": np.array([bool(info["success"])])})


class ResetsAtOnce(NumpyBoolSuccess):
    """Environment that resets in the step that ends, with the last observation in the info."""

    key = "final_obs"

    def step(self, action):
        last, reward, over, cut, info = super().step(action)
        if not over:
            return last, reward, over, cut, info
        seen, _ = self.reset()
        return seen, reward, over, cut, {self.key: last, "final_info": {"success": True}, "success": False}


class ResetsAsBefore(ResetsAtOnce):
    key = "terminal_observation"


def solved(num_envs: int, mode: str = "SAME_STEP", array: bool = False) -> SyncVectorEnv:
    return SyncVectorEnv([SolvedArray if array else NumpyBoolSuccess] * num_envs, autoreset_mode=AutoresetMode[mode])


class ListBatch(SyncVectorEnv):
    """Vector environment whose rewards and flags are lists."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([Plain] * num_envs, autoreset_mode=AutoresetMode.DISABLED)

    def step(self, actions):
        seen, *results, info = super().step(actions)
        return (seen, *(result.tolist() for result in results), info)


class NoAutoresetMode(SyncVectorEnv):
    """Vector environment without autoreset mode in its metadata."""

    declared: Any = None

    def __init__(self, num_envs: int) -> None:
        super().__init__([NumpyBoolSuccess] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self.metadata = {} if self.declared is None else {"autoreset_mode": self.declared}


class SpelledMode(NoAutoresetMode):
    declared = "SameStep"


class UnknownMode(NoAutoresetMode):
    declared = "sometimes"


def described(name: str, **values: Any) -> EnvSpec:
    return ENVS.get("gym").spec(config(name, **values), EnvContext())


def write(space: spaces.Box, value: Any) -> ObservationOut:
    writer = ObservationWriter("odd", space)
    shape = (len(writer.cameras), *writer.image_size, 3)
    out = ObservationOut(images=np.zeros(shape, np.uint8), state=np.zeros(writer.state_dim, np.float32))
    writer.write(value, out)
    return out


@pytest.mark.parametrize(
    "name",
    [
        *("NamedResults", "ListResults", "OldGenerator", "CannotClose"),
        "ListBatch",
    ],
)
def test_unusual_gymnasium_environments_run(name):
    env = begin(config(f"test_gym_odd:{name}"), env_indices=2)
    before = look(env)[1]
    result = env.step_chunk([0, 1], np.full((2, 3, 1), 0.5, np.float32))
    assert result.valid.all()
    np.testing.assert_allclose(look(env)[1], before + np.array([1.5, 3]), atol=1e-6)
    env.close()


def test_failing_close_is_reported(caplog):
    warnings = described("test_gym_odd:CannotClose").warnings
    assert "close() of env.id=test_gym_odd:CannotClose failed: RuntimeError: the simulator is gone" in warnings[0]
    begin(config("test_gym_odd:CannotClose"), env_indices=2).close()
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == [
        "close() of env 'test_gym_odd:CannotClose' failed: RuntimeError: the simulator is gone"
    ] * 2


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_batched_success_can_be_none_or_an_array(mode, array):
    cfg = config("test_gym_odd:solved").updated({"kwargs": {"mode": mode, "array": array}})
    env = begin(cfg, env_indices=2)
    result = env.step_chunk([0, 1], np.zeros((2, 3, 1), np.float32))
    assert result.success.tolist() == [[False, True, False]] * 2
    assert result.valid.tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(0, 127, (2,), np.int8), np.array([300, -4])),
        (spaces.Box(-9, 9, (2,), np.int32), np.array([1.5, -0.5])),
        (spaces.Box(0, 1, (2,), bool), np.array([3, 1])),  # type: ignore[arg-type]
    ],
    ids=["int8", "int32", "bool"],
)
def test_values_outside_the_declared_dtype_are_kept(space, value):
    np.testing.assert_array_equal(write(space, value).state, value)


@pytest.mark.parametrize(
    "value", [np.full((4, 4, 3), 0.4), np.full((4, 4, 3), 300), np.full((4, 4, 3), -1), np.ones((4, 4, 3), np.bool_)]
)
def test_images_outside_0_to_255_are_rejected(value):
    with pytest.raises(EnvError, match=r"for the uint8 image 'observation', expected 0\.\.255\. Fix: "):
        write(spaces.Box(0, 255, (4, 4, 3), np.uint8), value)


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.uint8])
def test_images_of_another_dtype_are_read(kind):
    value = np.arange(48).reshape(4, 4, 3)
    image = write(spaces.Box(0, 255, (4, 4, 3), np.uint8), value.astype(kind)).images[0]
    np.testing.assert_array_equal(image, value)


@pytest.mark.parametrize(
    ("shape", "high", "doubted"), [((3, 3), 2, False), ((6, 7, 2), 1, False), ((64, 64, 3), 1, True)]
)
def test_uint8_arrays_without_image_bounds_are_read_as_state(shape, high, doubted):
    from embodyrl.envs.check.observations import get_observation_warnings

    space = spaces.Box(0, high, shape, np.uint8)
    writer = ObservationWriter("board", space)
    assert (writer.state_dim, writer.cameras) == (np.prod(shape), ())
    found = [*get_observation_warnings(space, [space.sample()], None)]
    assert [f"its bounds are 0..{high}" in warning for warning in found] == [True] * doubted


@pytest.mark.parametrize(("frame", "pixel"), [(np.full((4, 6, 3), 0.5), 128), (np.full((4, 6, 3), 70.4), 70)])
def test_rendered_floats_become_bytes(frame, pixel):
    shown = to_single_frame(frame)
    assert (shown.dtype, shown.shape, shown.max(), shown.min()) == (np.uint8, (4, 6, 3), pixel, pixel)


@pytest.mark.parametrize("frame", [np.zeros((3, 4, 6), np.uint8), np.zeros(1, np.uint8), "drawn"])
def test_rendered_value_without_an_image_is_rejected(frame):
    shape = str(np.shape(frame)).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(EnvError, match=rf"shape {shape}, expected \[H, W, 3\]"):
        to_single_frame(frame)


def test_largest_float_as_bound_means_unbounded():
    largest = np.finfo(np.float32).max
    space = spaces.Box(np.array([-largest, -2, 0]), np.array([largest, 2, largest]), dtype=np.float32)
    assert convert_action_space("odd", space).bounds == ((-np.inf, -2, 0), (np.inf, 2, np.inf))


def test_empty_action_space_is_rejected():
    with pytest.raises(ConfigError, match="is empty, expected at least one dimension"):
        convert_action_space("odd", spaces.Box(-1, 1, (0,)))


def test_time_limit_of_minus_one_is_ignored():
    cfg = config("CartPole-v1").updated({"kwargs": {"max_episode_steps": -1}})
    assert ENVS.get("gym").spec(cfg, EnvContext()).max_episode_steps == cfg.train.max_episode_steps


def test_vector_environment_without_autoreset_mode_gives_a_warning():
    assert "has no autoreset_mode" in " ".join(described("test_gym_odd:NoAutoresetMode").warnings)
    assert not described("test_gym_odd:solved").warnings
    with pytest.raises(ConfigError, match=r"'sometimes'. Set it to one of NextStep, SameStep, Disabled"):
        described("test_gym_odd:UnknownMode")


def test_autoreset_mode_may_be_a_string():
    """The final observation is that of the ended episode (2 steps), not of the next one."""
    env = begin(config("test_gym_odd:SpelledMode"))
    assert env.step_chunk([0], np.zeros((1, 3, 1), np.float32)).success.tolist() == [[False, True, False]]
    assert look(env)[1][1] == 2


@pytest.mark.parametrize("name", ["ResetsAtOnce", "ResetsAsBefore"])
def test_final_observation_is_kept_if_the_environment_resets_in_the_same_step(name):
    env = begin(config(f"test_gym_odd:{name}"))
    assert env.step_chunk([0], np.zeros((1, 3, 1), np.float32)).success.tolist() == [[False, True, False]]
    assert look(env)[1][1] == 2


@pytest.mark.parametrize("name", ["is_win", "victory", "metrics.at_goal", "metrics.sucess", "suceeded"])
def test_unused_success_key_candidates_give_a_warning(name):
    from embodyrl.envs.check.info_warnings import success_warnings

    (warning,) = success_warnings(env_of(env_type="gym", id="x"), ["energy", name, "window"], has_success=False)
    assert f"env.success_key={name}" in warning
    assert not [
        *success_warnings(env_of(env_type="gym", id="x"), ["winner_id", "process", "unfinished"], has_success=False)
    ]
