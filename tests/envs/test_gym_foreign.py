"""Third-party Gymnasium environments: text observations, other success keys and image formats."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign_envs
import numpy as np
import pytest
from test_gym import begin, config

from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError, EmbodyError, EnvError, UnknownNameError
from embodyrl.types import EnvSpec


def place(name: str) -> str:
    return f"foreign_envs:{name}" if name in vars(foreign_envs) and name != "Plain" else f"odd_envs:{name}"


def described(name: str, **values: Any) -> EnvSpec:
    return ENVS.get("gym").spec(config(place(name), **values), EnvContext())


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("Words", {}, "go"),
        ("Missions", {}, "go to 7"),
        ("BytesWords", {}, "go"),
        ("InfoWords", {"instruction_key": "goal.say"}, "go to 7"),
        ("InfoWords", {"instruction": "turn left"}, "turn left"),
        ("Missions", {"instruction_key": "deep.0.mission"}, "go to 7"),
        pytest.param("make_env", {}, "go to 7"),
    ],
)
def test_text_observation_is_the_instruction(name, values, said):
    env = begin(config(place(name), **values), env_indices=2)
    assert (env.instruction(0), env.instruction(1)) == (said, said)
    assert env.spec.text.instructed
    assert env.spec.state_dim == 2


def test_missing_instruction_key_error_lists_keys():
    with pytest.raises(EnvError, match=r"instruction_key=say does not exist.*goal"):
        described("InfoWords", instruction_key="say")
    assert not described("InfoWords").text.instructed


@pytest.mark.parametrize(
    ("name", "values", "reports", "warning"),
    [
        ("LateSuccess", {}, True, ""),
        ("SimilarKey", {}, False, "env.success_key=metrics.task_success"),
        ("Won", {}, False, "env.success_key=won"),
        ("Reached", {}, False, "env.success_key=reached"),
        ("SimilarKey", {"success_key": "metrics.task_success"}, True, ""),
        ("SimilarKey", {"success_key": "metrics.task_sucess"}, False, "Did you mean 'metrics.task_success'"),
        ("Plain", {}, False, ""),
    ],
)
def test_success_keys_are_found_in_whole_episodes(name, values, reports, warning):
    spec = described(name, **values)
    assert spec.reward.reports_success == reports
    assert warning in " ".join(spec.warnings)
    assert bool(warning) == bool(spec.warnings)


def test_nested_success_key_is_read():
    env = begin(config("foreign_envs:SimilarKey", success_key="metrics.task_success"))
    assert env.step_chunk([0], np.zeros((1, 1, 1), np.float32)).success[0, 0]


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("RedPicture", "one RGB image with its channels first"),
        ("Rgba", "one RGBA image;"),
        ("RgbaFirst", "one RGBA image with its channels first"),
        ("TrueStack", ""),
        ("ColorStack", "6 gray cameras and looks like 2 RGB images"),
        ("InfoTask", "fix: env.instruction_key=task"),
        ("EmptyWords", "'mission' is empty"),
        ("GreyStack", ""),
        ("Stamp", "1073741824, and observations are float32"),
        ("FarAway", "float32"),
        ("MaskInInfo", "info['legal_actions'] is not applied"),
        ("MaskInObservation", "'action_mask' is part of the state and is not applied"),
        ("IgnoresSeed", "two resets with the same seed return different observations"),
        ("Depth", "uint16 image"),
        ("TupleObs", ""),
        ("make_suites", "and near/0 is used; select with env.suite=NAME"),
    ],
)
def test_suspicious_observation_spaces_give_warnings(name, warning):
    found = described(name).warnings
    assert warning in " ".join(found)
    assert len(found) == bool(warning)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LacksMember", "returned no 'n', a member of its observation space"),
        ("ManyCategories", "would have 1099511627776 numbers"),
    ],
)
def test_observations_are_checked_before_workers_start(name, said):
    with pytest.raises(EmbodyError, match=said):
        described(name)


@pytest.mark.parametrize("name", ["PartialSuccess", "partial_batch"])
def test_fraction_is_not_accepted_as_success(name):
    env = begin(config(f"foreign_envs:{name}"), env_indices=2)
    with pytest.raises(EnvError, match=r"0.3.* for success in info, expected True or False"):
        env.step_chunk([0, 1], np.zeros((2, 1, 1), np.float32))


def test_suite_selects_an_environment():
    assert "float32" in " ".join(described("make_suites", suite="far").warnings)
    with pytest.raises(ConfigError, match=r"has no suite 'deep' .*Suites: near/0, far/0"):
        described("make_suites", suite="deep")
    with pytest.raises(ConfigError, match="returned no environment"):
        described("make_no_suites")


def test_frames_of_several_cameras_are_concatenated():
    frame = begin(config("foreign_envs:TwoCameras")).render(0)
    assert frame.shape == (8, 20, 3)
    assert (frame[0, 9, 0], frame[0, 10, 0]) == (10, 200)


def test_hub_repository_error_contains_the_fix():
    with pytest.raises(UnknownNameError, match=r"review its code, .*@COMMIT trust=true"):
        described_id("hub_owner/some-env")


def described_id(env_id: str) -> EnvSpec:
    return ENVS.get("gym").spec(config(env_id), EnvContext())


def test_lerobot_style_id_imports_its_package(tmp_path, monkeypatch):
    source = "import gymnasium\ngymnasium.register('gym_little/Plain-v0', 'odd_envs:Plain', max_episode_steps=7)\n"
    (tmp_path / "gym_little.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert described_id("gym_little/Plain-v0").max_episode_steps == 7


@pytest.mark.integration
def test_constructor_that_renders_gets_a_rendering_backend():
    """A new process without a display; MuJoCo chooses its backend when it is imported."""
    pytest.importorskip("mujoco")
    chosen = {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY", "PYOPENGL_PLATFORM"}
    environ = {name: value for name, value in os.environ.items() if name not in chosen}
    program = (
        "from embodyrl.envs import ENVS\n"
        "from embodyrl.envs.protocol import EnvContext\n"
        "from test_gym import config\n"
        "context = EnvContext(renders_images=False)\n"
        "print(ENVS.get('gym').spec(config('foreign_envs:RendersAtOnce'), context).state_dim)\n"
    )
    paths = os.pathsep.join([str(Path(foreign_envs.__file__).parent), str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == "2\n", done.stderr
