"""Gymnasium environments behind the environment interface."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from settings import env_of

from embodyrl.envs import ENVS
from embodyrl.envs.gym.spaces import ObservationWriter, convert_action_space, make_action_converter
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import EnvSettings
from embodyrl.errors import ConfigError, EnvError, MissingDependencyError, UnknownNameError
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.types import ActionKind, EnvSpec, EpisodeStart, ObservationOut


class Counter(gymnasium.Env):
    """Environment that counts its actions; each test chooses spaces and endings."""

    metadata = {"render_modes": []}

    def __init__(self, last: int = 3, end: str = "terminated", action: str = "discrete") -> None:
        self.observation_space = spaces.Dict(
            {
                "picture": spaces.Box(0, 255, (4, 5, 3), np.uint8),
                "where": spaces.Box(-9, 9, (2, 2), np.float64),
                "kind": spaces.Discrete(3, start=5),
                "switches": spaces.MultiBinary(2),
                "dials": spaces.MultiDiscrete([2, 3]),
            }
        )
        self.action_space = {
            "discrete": spaces.Discrete(3, start=-1),
            "multi": spaces.MultiDiscrete([2, 4]),
            "shifted": spaces.MultiDiscrete([2, 4], start=[5, -1]),
            "counts": spaces.Box(np.array([-2, 3]), np.array([1, 9]), dtype=np.int64),
            "box": spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, np.inf])),
            "text": spaces.Text(4),
        }[action]
        self.last, self.end = last, end
        self.seen: list[Any] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = []
        self.offset = self.np_random.uniform(-1, 1)
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.seen.append(action)
        over = len(self.seen) == self.last
        info = {"is_success": over and self.end == "terminated"}
        return self._observe(), 2.0, over and self.end != "truncated", over and self.end != "terminated", info

    def _observe(self):
        count = len(self.seen)
        return {
            "picture": np.full((4, 5, 3), 10 + count, np.uint8),
            "where": np.full((2, 2), self.offset),
            "kind": 5 + count % 3,
            "switches": np.array([1, 0], np.int8),
            "dials": np.array([1, count % 3]),
        }


def double_reward(env: gymnasium.Env) -> gymnasium.Env:
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * reward)


def needs_more(env: gymnasium.Env, scale: float) -> gymnasium.Env:
    return env


def needs_box() -> gymnasium.Env:
    raise gymnasium.error.DependencyNotInstalled("box is missing, install box")


class WithExpert(gymnasium.Wrapper):
    """Environment with an expert action."""

    def __init__(self, env: gymnasium.Env, right: Any) -> None:
        super().__init__(env)
        self.right = right

    def expert_action(self) -> Any:
        return np.array(self.right)


COUNTER = "test_gym:Counter"


def config(env_id: str, **values: Any) -> EnvSettings:
    return env_of(env_type="gym", id=env_id, use_rel_reward=False, **values)


def begin(cfg: EnvSettings, env_indices: int = 1, *, limit: int = 100):
    env = ENVS.get("gym").make(cfg, EnvContext(num_envs=env_indices))
    start = EpisodeStart(reset_id=7, seed=0, max_episode_steps=limit)
    env.reset(list(range(env_indices)), [start] * env_indices)
    return env


def look(env: Any, env_index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    spec: EnvSpec = env.spec
    images = np.zeros((len(spec.cameras.names), *spec.cameras.size, 3), np.uint8)
    state = np.full(spec.state_dim, np.nan, np.float32)
    env.observe([env_index], images[None], state[None])
    return images, state


def test_dict_observations_become_cameras_and_one_state_vector():
    env = begin(config(COUNTER, kwargs={"action": "multi"}))
    spec = env.spec
    assert (spec.cameras.names, spec.cameras.size, spec.state_dim) == (("picture",), (4, 5), 4 + 3 + 2 + (2 + 3))
    env.step_chunk([0], np.zeros((1, 2, 2), np.float32))
    images, state = look(env)
    assert (images == 12).all()
    offset = gymnasium.utils.seeding.np_random(7)[0].uniform(-1, 1)
    parts = {"where": [offset] * 4, "kind": [0, 0, 1], "switches": [1, 0], "dials": [0, 1, 0, 0, 1]}
    in_order = [parts[name] for name in Counter().observation_space.spaces if name in parts]
    np.testing.assert_allclose(state, np.concatenate(in_order), rtol=1e-6)


@pytest.mark.parametrize(
    ("action", "kind", "sent", "received"),
    [
        ("discrete", ActionKind.discrete, [[2.0]], 1),
        ("multi", ActionKind.multi_discrete, [[1.0, 3.0]], [1, 3]),
        ("shifted", ActionKind.multi_discrete, [[1.0, 3.0]], [6, 2]),
        ("counts", ActionKind.multi_discrete, [[3.0, 1.0]], [1, 4]),
        ("box", ActionKind.box, [[-5.0, 7.5]], [-2.0, 7.5]),
        ("box", ActionKind.box, [[5.0, -1.0]], [2.0, 0.0]),
    ],
)
def test_actions_are_converted_to_the_action_space(action, kind, sent, received):
    made = Counter(action=action)
    declared = convert_action_space("counter", made.action_space)
    assert declared.kind is kind
    assert len(declared.sizes or declared.low) == len(sent[0])
    native = make_action_converter("counter", made.action_space)(np.float32(sent[0]))
    assert made.action_space.contains(native)
    np.testing.assert_array_equal(native, received)


def knowing(action: str, right: Any) -> EnvSettings:
    return config(COUNTER, kwargs={"action": action}, wrappers=[{"name": "test_gym:WithExpert", "right": right}])


@pytest.mark.parametrize(
    ("action", "right", "flat"),
    [
        ("discrete", 1, [2.0]),
        ("multi", [1, 3], [1.0, 3.0]),
        ("counts", [1, 4], [3.0, 1.0]),
        ("box", [1.9, 7.5], [1.9, 7.5]),
    ],
)
def test_wrapper_with_expert_action_is_used_as_expert(action, right, flat):
    env = begin(knowing(action, right))
    assert env.spec.expert.tasks == (0,)
    clean, _ = env.expert_chunk([0], 1, noise=1e-6)
    np.testing.assert_array_equal(clean[0, 0], np.float32(flat))
    (seen,) = env._sims._envs[0].unwrapped.seen
    np.testing.assert_allclose(seen, right, atol=1e-5)


def test_invalid_expert_action_is_an_error():
    with pytest.raises(EnvError, match=r"expert_action returned array\(\[1., 2., 3.\]\), expected an action of Box"):
        begin(knowing("box", [1.0, 2.0, 3.0])).expert_chunk([0], 1, noise=0.0)


def test_out_of_range_discrete_action_is_rejected():
    with pytest.raises(EnvError, match=r"action \[3\], expected ids from 0 to \[2\]"):
        make_action_converter("counter", spaces.Discrete(3))(np.float32([3.0]))


@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_time_limit_of_the_environment_truncates(end):
    env = begin(config(COUNTER, kwargs={"end": end}))
    result = env.step_chunk([0], np.zeros((1, 5, 1), np.float32))
    assert result.valid[0].tolist() == [True, True, True, False, False]
    assert result.terminated[0, 2] == (end != "truncated")
    assert result.truncated[0, 2] == (end == "truncated")
    assert result.success[0].tolist() == [False, False, end == "terminated", False, False]
    np.testing.assert_array_equal(result.reward[0], [2, 2, 2, 0, 0])


def test_max_episode_steps_truncates():
    result = begin(config(COUNTER), limit=2).step_chunk([0], np.zeros((1, 5, 1), np.float32))
    assert result.truncated[0].tolist() == [False, True, False, False, False]


def test_cartpole_matches_gymnasium():
    """Equal seeds and actions give equal observations, rewards and ends."""
    theirs = gymnasium.make("CartPole-v1")
    expected, _ = theirs.reset(seed=7)
    env = begin(config("CartPole-v1"))
    assert env.spec.max_episode_steps == 500
    assert env.spec.action is not None
    assert env.spec.action.sizes == (2,)
    for step in range(30):
        np.testing.assert_array_equal(look(env)[1], expected)
        action = step % 3 % 2
        expected, reward, terminated, _, _ = theirs.step(action)
        result = env.step_chunk([0], np.full((1, 1, 1), action, np.float32))
        assert (result.reward[0, 0], result.terminated[0, 0]) == (reward, terminated)
        if terminated:
            break
    assert terminated


def test_parallel_envs_are_independent_and_reset_ids_are_seeds():
    env = ENVS.get("gym").make(config("Pendulum-v1"), EnvContext(num_envs=3))
    starts = [EpisodeStart(reset_id=i, seed=9, max_episode_steps=50) for i in (4, 5, 4)]
    env.reset([0, 1, 2], starts)
    env.step_chunk([1], np.ones((1, 4, 1), np.float32))
    states = [look(env, env_index)[1] for env_index in range(3)]
    np.testing.assert_array_equal(states[0], states[2])
    assert not np.allclose(states[0], states[1])


def test_wrappers_are_applied_in_order():
    cfg = config(COUNTER, wrappers=["test_gym:double_reward", "gymnasium.wrappers:FlattenObservation"])
    env = begin(cfg)
    assert env.spec.cameras.names == ()
    assert env.spec.state_dim == 4 * 5 * 3 + 4 + 3 + 2 + 5
    assert env.step_chunk([0], np.zeros((1, 1, 1), np.float32)).reward[0, 0] == 4.0


@pytest.mark.parametrize(
    ("shape", "frames", "colors"),
    [
        ((4, 6, 3), 1, 3),
        ((4, 6, 1), 1, 1),
        ((4, 6), 1, 1),
        ((2, 4, 6, 3), 2, 3),
        ((2, 4, 6), 2, 1),
        ((2, 4, 6, 1), 2, 1),
    ],
    ids=str,
)
def test_images_and_image_stacks_become_cameras(shape, frames, colors):
    writer = ObservationWriter("eyes", spaces.Box(0, 255, shape, np.uint8))
    assert writer.image_size == (4, 6)
    assert writer.grey == (colors == 1)
    assert writer.cameras == (("observation",) if frames == 1 else ("observation.0", "observation.1"))
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    out = ObservationOut(images=np.zeros((frames, 4, 6, 3), np.uint8), state=np.zeros(0, np.float32))
    writer.write(picture, out)
    expected = np.broadcast_to(picture.reshape(frames, 4, 6, colors), (frames, 4, 6, 3))
    np.testing.assert_array_equal(out.images, expected)
    np.testing.assert_array_equal(writer.get_latest_frame(picture), expected[-1])


def test_gray_frames_can_be_stacked_on_the_last_axis():
    writer = ObservationWriter("eyes", spaces.Box(0, 255, (6, 8, 4), np.uint8))
    assert (writer.image_size, writer.cameras[-1], writer.grey) == ((6, 8), "observation.3", True)
    picture = np.random.default_rng(0).integers(0, 256, (6, 8, 4), dtype=np.uint8)
    out = ObservationOut(images=np.zeros((4, 6, 8, 3), np.uint8), state=np.zeros(0, np.float32))
    writer.write(picture, out)
    for frame in range(4):
        np.testing.assert_array_equal(out.images[frame], np.repeat(picture[..., frame, None], 3, axis=2))
    np.testing.assert_array_equal(writer.get_latest_frame(picture), out.images[3])


def test_image_order_is_kept():
    sizes = {"left": (4, 6, 3), "past": (2, 4, 6, 3), "right": (4, 6, 3)}
    space = spaces.Dict({name: spaces.Box(0, 255, shape, np.uint8) for name, shape in sizes.items()})
    writer, seen = ObservationWriter("eyes", space), space.sample()
    assert writer.cameras == ("left", "past.0", "past.1", "right")
    out = ObservationOut(images=np.zeros((4, 4, 6, 3), np.uint8), state=np.zeros(0, np.float32))
    writer.write(seen, out)
    np.testing.assert_array_equal(out.images, np.stack([seen["left"], *seen["past"], seen["right"]]))


def test_channels_first_stacks_give_a_warning():
    from embodyrl.envs.check.observations import get_observation_warnings

    space = spaces.Box(0, 255, (4, 3, 8, 8), np.uint8)
    (warning,) = get_observation_warnings(space, [space.sample()], None)
    assert "channels are not last, which become 768 numbers" in warning
    stack = spaces.Box(0, 255, (4, 8, 8, 3), np.uint8)
    assert not [*get_observation_warnings(stack, [np.zeros((4, 8, 8, 3), np.uint8)], None)]


def test_non_image_byte_arrays_become_state():
    assert ObservationWriter("ram", spaces.Box(0, 255, (128,), np.uint8)).state_dim == 128


def test_images_of_different_sizes_are_rejected():
    sizes = {"left": spaces.Box(0, 255, (4, 6, 3), np.uint8), "right": spaces.Box(0, 255, (5, 6, 3), np.uint8)}
    with pytest.raises(ConfigError, match=r"different sizes \[\(4, 6\), \(5, 6\)\]"):
        ObservationWriter("eyes", spaces.Dict(sizes))


def test_image_observation_replaces_a_missing_render_mode():
    env = begin(config(COUNTER))
    np.testing.assert_array_equal(env.render(0), np.full((4, 5, 3), 10, np.uint8))
    assert env.spec.simulator.renders


def test_video_without_images_is_rejected():
    env = begin(config(COUNTER, wrappers=["gymnasium.wrappers:FlattenObservation"]))
    with pytest.raises(EnvError, match="no image to record"):
        env.render(0)
    assert not env.spec.simulator.renders
    # Also where nobody draws, as in a training without recordings.
    assert ENVS.get("gym").spec(config("CartPole-v1"), EnvContext(renders_images=False)).simulator.renders


def test_time_limit_defaults_to_max_episode_steps():
    assert (
        ENVS.get("gym").spec(config(COUNTER), EnvContext()).max_episode_steps == config(COUNTER).train.max_episode_steps
    )
    longer = config(COUNTER).updated({"eval.max_episode_steps": 700})
    assert ENVS.get("gym").spec(longer, EnvContext()).max_episode_steps == 700, "the longest one"
    assert ENVS.get("gym").spec(config("Pendulum-v1"), EnvContext()).max_episode_steps == 200


def frozen_statistics() -> gymnasium.Env:
    env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
    env.update_running_mean = False
    return env


def running_statistics() -> gymnasium.Env:
    return gymnasium.wrappers.NormalizeReward(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward"])
def test_wrappers_with_running_statistics_are_rejected(name):
    with pytest.raises(ConfigError, match=rf"env.wrappers: '.*{name}'.*model.normalize_state=true"):
        ENVS.get("gym").spec(config("CartPole-v1", wrappers=[f"gymnasium.wrappers:{name}"]), EnvContext())
    warnings = ENVS.get("gym").spec(config("test_gym:running_statistics"), EnvContext()).warnings
    assert "'NormalizeReward' in env.id=test_gym:running_statistics" in " ".join(warnings)
    assert not ENVS.get("gym").spec(config("test_gym:frozen_statistics"), EnvContext()).warnings


class Counting(gymnasium.ObservationWrapper):
    calls = 0

    def observation(self, observation):
        self.calls += 1
        return observation + np.float32(1e-3 * self.calls)


def test_wrapper_that_keeps_state_between_episodes_is_reported():
    wrappers = ["test_gym:Counting", "gymnasium.wrappers:FlattenObservation"]
    (warning,) = ENVS.get("gym").spec(config("CartPole-v1", wrappers=wrappers), EnvContext()).warnings
    assert warning.startswith("'Counting' keeps state between episodes")


@pytest.mark.parametrize(("env_id", "known"), [("CartPole-v1", False), ("pixel_env:PixelEnv", True), (COUNTER, True)])
def test_success_signals_are_detected(env_id, known):
    assert ENVS.get("gym").spec(config(env_id), EnvContext()).reward.reports_success == known


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "pixel_env:PixelEnv", COUNTER])
def test_gym_environment_passes_check_env(env_id):
    from embodyrl.envs.check import check_env

    cfg = load_config("train", ["env=gym", f"env.id={env_id}"]).env
    findings = list(check_env(cfg))
    assert {finding.level for finding in findings} == {"ok"}, findings


def test_wrong_observation_shape_is_an_error():
    writer = ObservationWriter("mine", spaces.Dict({"arm": spaces.Box(-1, 1, (3,))}))
    out = ObservationOut(images=np.zeros((0, 0, 0, 3), np.uint8), state=np.zeros(3, np.float32))
    with pytest.raises(EnvError, match=r"shape \(2,\) in 'arm', but its observation space declares \(3,\)"):
        writer.write({"arm": np.zeros(2)}, out)


@pytest.mark.parametrize(
    ("env_id", "values", "error", "text"),
    [
        ("CartPole-v7", {}, UnknownNameError, "CartPole-v1"),
        ("CratPole-v1", {}, UnknownNameError, "CartPole"),
        ("test_gym:Countre", {}, UnknownNameError, "Did you mean 'Counter'"),
        ("no_such_pkg:Env", {}, UnknownNameError, "no_such_pkg"),
        ("no_such_pkg:Env-v0", {}, MissingDependencyError, "no_such_pkg"),
        ("test_gym:needs_box", {}, MissingDependencyError, "install box"),
        ("CartPole-v1", {"kwargs": {"speed": 2}}, ConfigError, "speed"),
        (COUNTER, {"kwargs": {"speed": 2}}, ConfigError, "speed"),
        (COUNTER, {"kwargs": {"action": "text"}}, ConfigError, "are not supported. Convert the space to Discrete"),
        (COUNTER, {"wrappers": ["test_gym:needs_more"]}, ConfigError, "cannot wrap"),
        (COUNTER, {"wrappers": ["test_gym:nothing"]}, UnknownNameError, "nothing"),
    ],
)
def test_gym_config_errors_are_reported_before_the_start(env_id, values, error, text):
    with pytest.raises(error, match=text):
        ENVS.get("gym").spec(config(env_id, **values), EnvContext())


def test_missing_import_of_an_environment_or_wrapper_is_reported(tmp_path, monkeypatch):
    (tmp_path / "incomplete.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"No module named 'no_such_package'\. Install it"):
        ENVS.get("gym").spec(config("incomplete:Env"), EnvContext())
    with pytest.raises(ConfigError, match=r"env\.wrappers: 'incomplete:wrap'.*no_such_package"):
        ENVS.get("gym").spec(config(COUNTER, wrappers=["incomplete:wrap"]), EnvContext())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "env.id is not set"),
        (["env.id=CartPole-v1", "env.wrappers=[FlattenObservation]"], "package.module:attr"),
        (["env.id=CartPole-v1", "env.train.ignore_terminations=true"], "ignore_terminations"),
        (["env.id=CartPole-v1", "env.task_suite_name=libero_10"], "does not read env.task_suite_name"),
        (["env.id=CartPole-v1", "model.precision=bf16"], "set model.precision=fp32"),
        (["env.id=CartPole-v1", "model.action_dim=2"], "does not read model.action_dim"),
    ],
)
def test_invalid_settings_are_rejected_without_importing_gymnasium(words, text):
    with pytest.raises(ConfigError, match=text):
        check_components(load_config("train", ["env=gym", "model=mlp", *words]))


class SamplesBeforeSeeding(gymnasium.Wrapper):
    """Wrapper that samples before the environment is seeded."""

    def reset(self, **options):
        drawn = float(self.unwrapped.np_random.uniform())
        seen, info = self.env.reset(**options)
        return seen, info | {"drawn": drawn}


def test_wrapper_randomness_depends_on_the_reset_id():
    cfg = env_of(env_type="gym", id="CartPole-v1", wrappers=["test_gym:SamplesBeforeSeeding"], use_rel_reward=False)
    env, drawn = ENVS.get("gym").make(cfg, EnvContext(num_envs=1)), []
    for reset_id in (3, 4, 3):
        env.reset([0], [EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=9)])
        drawn.append(env._sims.info(0)["drawn"])
    env.close()
    assert drawn[0] == drawn[2] != drawn[1]
