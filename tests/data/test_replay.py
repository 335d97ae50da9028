"""Recorded actions, executed in the simulator from the recorded initial states."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace as with_fields
from pathlib import Path

import numpy as np
import pytest

from embodyrl.api.environment import make_env
from embodyrl.cli.main import main
from embodyrl.commands.data_sets import convert_source, get_episode, open_set
from embodyrl.commands.replay import replay
from embodyrl.data.cards import read_card
from embodyrl.data.layout import ENVIRONMENT_PATH, STATES_PATH, Card, Source
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import ConfigError

ENV = ["env=tabletop", "env.init_params.camera_heights=32", "env.init_params.camera_widths=32", "launcher=inline"]


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return demonstrations whose recorded actions are labels: the executed actions have noise."""
    folder = tmp_path_factory.mktemp("demos")
    words = [f"collect.out={folder}/all", "collect.episodes=6", "env.train.task_ids=[0,1,12]"]
    assert main(["collect", *ENV, *words, "model.expert_noise=0.5", f"runner.output_dir={folder}/runs"]) == 0
    return folder / "all"


def _copy(demos: Path, out: Path, card: Card, **changes: object) -> Path:
    """Write a copy of the demonstrations with another card and other fields, except `sign`, a factor of the actions."""
    loaded, rows = load_demonstrations(demos), open_set(demos).rows
    sign = changes.pop("sign", 1)
    writer = DatasetWriter(out, card)
    for index, row in enumerate(rows):
        names = ("task_id", "reset_id", "trial", "seed", "version")
        source = Source(**{name: row[f"embodyrl/{name}"] for name in names})
        source = convert_source(source, str(loaded.instruction[loaded.start[index]]), read_card(demos).env, card.env)
        source = with_fields(source, **changes)
        episode = get_episode(loaded, index, source)
        writer.append(with_fields(episode, action=sign * episode.action))
    writer.flush()
    writer.close()
    shutil.copyfile(demos / ENVIRONMENT_PATH, out / ENVIRONMENT_PATH)
    return out


def test_replay_repeats_success_with_the_executed_actions(demos: Path) -> None:
    episodes = list(replay(demos, []))
    assert [episode.success for episode in episodes] == [True] * 6
    assert [episode.steps for episode in episodes] == [row["length"] for row in open_set(demos).rows]
    assert [episode.start_difference for episode in episodes] == [0.0] * 6


def test_replay_of_wrong_actions_fails(demos: Path, tmp_path: Path, capsys) -> None:
    card = with_fields(read_card(demos), collected={})
    wrong = _copy(demos, tmp_path / "wrong", card, sign=-1)
    assert main(["data", "replay", str(wrong), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["success"], report["recorded"]) == (0.0, 1.0)
    assert main(["data", "replay", str(demos), "--episodes=2"]) == 0
    assert "success 100.0 % of 2 episodes, recorded 100.0 %" in capsys.readouterr().out


def test_instructions_are_printed_without_control_characters(demos: Path, tmp_path: Path, capsys) -> None:
    copy = Path(shutil.copytree(demos, tmp_path / "copy"))
    for file in (copy / "meta").glob("*.json*"):
        file.write_text(file.read_text().replace("touch the ", r"touch\u001b]0;x\u0007 the "))
    assert main(["data", "replay", str(copy), "--episodes=1"]) == 0
    out = capsys.readouterr().out
    assert "?]0;x?" in out
    assert "\x1b" not in out


def test_replay_reports_another_initial_state(demos: Path, tmp_path: Path) -> None:
    other = _copy(demos, tmp_path / "other", read_card(demos), reset_id=5)
    assert all(episode.start_difference > 1e-3 for episode in replay(other, []))


def test_replay_converts_task_and_state_numbers_of_merged_data(demos: Path, tmp_path: Path) -> None:
    """A merged data set may number its tasks in another order than the environment."""
    card = read_card(demos)
    env = with_fields(card.env, tasks=card.env.tasks[::-1], states_per_task=card.env.states_per_task[::-1])
    merged = _copy(demos, tmp_path / "merged", with_fields(card, env=env))
    assert {row["embodyrl/task_id"] for row in open_set(merged).rows} == {20, 19, 8}
    assert [episode.success for episode in replay(merged, [])] == [True] * 6


@pytest.mark.parametrize(
    ("collected", "changes", "message"),
    [
        ({"labels": "expert"}, {}, "labels of the expert, not the executed actions"),
        ({}, {"reset_id": -1}, r"episode 0 \(.*\) has no recorded initial state"),
    ],
)
def test_replay_rejects_data_without_actions_or_states(
    demos: Path, tmp_path: Path, collected, changes, message
) -> None:
    copy = _copy(demos, tmp_path / "copy", with_fields(read_card(demos), collected=collected), **changes)
    with pytest.raises(ConfigError, match=message):
        list(replay(copy, []))


@pytest.mark.sim
def test_converted_libero_files_are_replayed_from_their_states(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    pytest.importorskip("libero")
    from embodyrl.envs.libero.install import load_init_states

    words = ["env.render_profile=lean", "env.init_params.camera_heights=64", "env.init_params.camera_widths=64"]
    env = make_env("libero_object", *words)
    observation, _ = env.reset(options={"reset_id": 7})
    (folder := tmp_path / "files").mkdir()
    with h5py.File(folder / f"{env.layout.tasks[0].replace(' ', '_')}_demo.hdf5", "w") as file:
        file.create_group("data").attrs["macros_image_convention"] = "opengl"
        state, stored = np.repeat(observation["state"][None], 2, 0), load_init_states("libero_object", 0)[7]
        for demo, start in enumerate((stored, stored + 0.01)):
            arrays = {
                "actions": np.array([[0.0] * 6 + [-1.0], [0.0] * 6 + [1.0]]),
                "rewards": np.zeros(2),
                "states": np.repeat(start[None], 2, 0),
                "obs/ee_states": state[:, :6],
                "obs/gripper_states": state[:, 6:],
                "obs/agentview_rgb": np.zeros((2, 16, 16, 3), np.uint8),
                "obs/eye_in_hand_rgb": np.zeros((2, 16, 16, 3), np.uint8),
            }
            for name, array in arrays.items():
                file[f"data/demo_{demo}/{name}"] = array
    out = tmp_path / "set"
    assert main(["convert", str(folder), str(out)]) == 0
    same, moved = replay(out, ["env=libero_object", *words])
    assert (same.start_difference, same.steps, same.success) == (0.0, 2, False)
    assert moved.start_difference > 1e-3
    (out / STATES_PATH).unlink()
    with pytest.raises(ConfigError, match="Convert LIBERO data"):
        list(replay(out, ["env=libero_object", *words]))


def test_replay_needs_an_environment_that_fits(demos: Path, tmp_path: Path, capsys) -> None:
    (copy := tmp_path / "copy").mkdir()
    shutil.copytree(demos, copy, dirs_exist_ok=True)
    (copy / ENVIRONMENT_PATH).unlink()
    assert [episode.success for episode in replay(copy, ENV[:3], 2)] == [True, True]
    assert main(["data", "replay", str(copy), "env=gym", "env.id=CartPole-v1"]) == 2
    assert "action size 7, state size" in capsys.readouterr().err
    assert main(["data", "replay"]) == 2
    assert main(["data", "info", str(demos), "--episodes=2"]) == 2
    assert main(["data", "replay", str(demos), "--episodes=0"]) == 2
    assert main(["data", "replay", str(demos), "--success"]) == 2
