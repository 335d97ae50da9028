"""The same weights get the same settings under each name: a run, its checkpoint, a copy, or an exported folder."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repository
from huggingface_hub import constants

from embodyrl.config.paths import assets_dir
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.plan.saved import EXPORTED_CONFIG, find_ckpt_config, save_config
from embodyrl.plan.schema import Config
from embodyrl.policies.inputs import INPUTS_FILE

PAIR = ("env=tabletop", "model=flow_small")
MADE = ("model.path=assets/flow_small", "env.init_params.camera_names=[front]", "model.num_action_chunks=6")
LIMITS = ("env.train.max_episode_steps=36", "env.eval.max_episode_steps=40")


def load(*words: str, command: str = "eval", config_dirs: tuple[Path, ...] = ()) -> Config:
    return load_config(command, words, base=find_ckpt_config(words), config_dirs=config_dirs)


def found(cfg: Config) -> tuple[object, ...]:
    cameras = cfg.env.init_params
    return cameras.camera_heights, cameras.camera_names, cfg.model.num_action_chunks, cfg.env.eval.max_episode_steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    policy = tmp_path / "run" / "checkpoints" / "step_000001" / "policy"
    policy.mkdir(parents=True)
    inputs = {"environment": "tabletop", "cameras": ["front"], "image_size": [112, 112], "num_action_chunks": 6}
    (policy / INPUTS_FILE).write_text(json.dumps(inputs))
    save_config(load_config("train", [*PAIR, *MADE, *LIMITS]), tmp_path / "run" / "config.yaml")
    shutil.copytree(policy, tmp_path / "copy")
    shutil.copytree(policy, tmp_path / "exported")
    shutil.copy(tmp_path / "run" / "config.yaml", tmp_path / "exported" / EXPORTED_CONFIG)
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["eval", "train"])
@pytest.mark.parametrize(
    "words",
    [
        ["ckpt=run"],
        ["ckpt=run", "env=tabletop"],
        ["ckpt=run", "model=flow_small"],
        ["ckpt=exported"],
        [*PAIR, "ckpt=run"],
        [*PAIR, "ckpt=exported"],
        [*PAIR, "model.path=exported"],
        [*PAIR, "model.path=run/checkpoints/step_000001/policy"],
        ["experiment=tabletop_dsrl", "model.path=exported"],
        ["experiment=tabletop_residual", "ckpt=run"],
    ],
)
def test_settings_do_not_depend_on_the_path_of_the_weights(
    command: str, words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    if command == "eval" or "experiment=" not in words[0]:
        cfg = load(*words, command=command)
        assert found(cfg) == (112, ["front"], 6, 40)
        assert cfg.env.train.max_episode_steps == 36
        assert words[-1] != "ckpt=run" or cfg.model.path == "assets/flow_small"


@pytest.fixture
def hub(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the exported folder as me/exported, and a copy of the checkpoint as me/copy; the cache is empty."""
    hub, commit = Hub(), "a" * 40
    address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(run.parent / "cache"), "HUGGINGFACE_CO_URL_TEMPLATE": address}
    for name, value in {**settings, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("exported", "copy"):
        files = {file.name: file.read_bytes() for file in (run.parent / name).iterdir()}
        hub.repositories["model", f"me/{name}"] = Repository({commit: files}, {"main": commit})
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.mark.parametrize("command", ["eval", "train"])
@pytest.mark.parametrize("key", ["model.path=", "ckpt="])
@pytest.mark.parametrize("name", ["exported", "copy"])
def test_hub_weights_get_the_same_settings_as_a_local_folder(
    command: str, key: str, name: str, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    local, remote = (load(*PAIR, f"{key}{path}", command=command) for path in (name, f"me/{name}"))
    assert found(remote) == found(local)
    assert found(remote)[:3] == (112, ["front"], 6)
    assert remote.get(key.removesuffix("=")) == f"me/{name}@{'a' * 40}"
    assert found(load(*PAIR, f"{key}me/{name}@main", "model.num_action_chunks=2", command=command))[2] == 2
    with pytest.raises(ConfigError, match="output chunks of 6 actions"):
        load(*PAIR, f"{key}me/{name}", "model.num_action_chunks=100", command=command)


def test_missing_repository_of_the_hub_is_an_error(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=me/none: no such folder here, and"):
        load(*PAIR, "model.path=me/none")


def test_copied_checkpoint_keeps_its_images_and_chunk_length(run: Path) -> None:
    assert found(load(*PAIR, f"model.path={run.parent / 'copy'}"))[:3] == (112, ["front"], 6)


def test_user_preset_with_weights_replaces_the_start_file(run: Path) -> None:
    folder = run.parent / "conf" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"defaults: [flow_small]\npath: {run.parent / 'exported'}\n")
    (folder / "short.yaml").write_text(f"defaults: [mine]\npath: {run.parent / 'exported'}\nnum_action_chunks: 2\n")
    dirs = (folder.parent,)
    start = run.parent / "conf" / "start"
    start.mkdir()
    (start / "tabletop-mine.yaml").write_text(
        "# @package _global_\ndefaults: [tabletop-flow_small]\nmodel: {path: x}\n"
    )
    assert found(load("env=tabletop", "model=mine", f"model.path={run.parent / 'exported'}", config_dirs=dirs)) == (
        *(112, ["front"], 6, 40),
    )
    assert found(load("env=tabletop", "model=short", config_dirs=dirs)) == (112, ["front"], 2, 40)


def test_command_line_value_overrides_saved_inputs_with_one_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        words = ("model.num_action_chunks=2", "env.init_params.camera_heights=56")
        assert found(load(*PAIR, f"model.path={run.parent / 'exported'}", *words)) == (56, ["front"], 2, 40)
    assert [record.message.partition("exported")[2] for record in caplog.records] == [
        " were trained with model.num_action_chunks=6 env.init_params.camera_heights=112."
    ]


@pytest.mark.parametrize("words", [[*PAIR, "model.path=exported"], [*PAIR, "model.path=copy"], ["ckpt=run"]])
def test_chunk_length_above_that_of_the_weights_is_rejected(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(ConfigError, match=r"model.num_action_chunks=100: the weights .* output chunks of 6 actions"):
        load(*words, "model.num_action_chunks=100")


def test_start_file_applies_to_its_own_weights_only() -> None:
    own = (56, ["front"], 4, 12)
    for path in ("assets/flow_small_tabletop", str(assets_dir() / "flow_small_tabletop")):
        assert (
            found(load(*PAIR, f"model.path={path}")) == found(load(*PAIR, f"ckpt={path}")) == found(load(*PAIR)) == own
        )
    assert load(*PAIR, "model.path=assets/flow_small_soup").env.eval.task_ids is None
    assert load(*PAIR, "model.path=assets/flow_small_soup").env.eval.max_episode_steps == 48
    # Start files without weights suit any weights.
    assert load(
        "env=gym", "env.id=CartPole-v1", "model=mlp", "algorithm=ppo", command="train"
    ).algorithm.normalize_returns


def test_included_checkpoint_has_its_settings_with_other_presets() -> None:
    cfg = load("env=tabletop", "model=openvla_oft", "model.path=assets/openvla_oft_tabletop")
    assert found(cfg) == (56, ["front"], 4, 24)


def test_copied_included_checkpoint_keeps_its_training_tasks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(assets_dir() / "flow_small_tabletop", tmp_path / "copy")
    for key in ("model.path=", "ckpt="):
        copy = load(*PAIR, f"{key}{tmp_path / 'copy'}")
        assert copy.env.eval.task_ids == load(*PAIR).env.eval.task_ids == [0, 1, 2]
        assert load(*PAIR, f"{key}{tmp_path / 'copy'}", "env.eval.task_ids=[1,5]").env.eval.task_ids == [1, 5]
    assert caplog.records == []


def test_banner_shows_the_start_preset() -> None:
    from embodyrl.commands.banner import preset_banner_lines

    ((label, text),) = preset_banner_lines(load(*PAIR))
    assert label == "presets"
    assert text == "conf/start/tabletop-flow_small.yaml sets 11 keys (--print-config prints the values)"
    assert preset_banner_lines(load(*PAIR, "model.path=assets/flow_small")) == []
