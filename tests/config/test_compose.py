"""Composition of YAML files by Hydra."""

from pathlib import Path

import pytest
from hydra import compose as compose_by_hydra
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from embodyrl.config.compose import compose_files
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config

FILES = {
    "root": "defaults: [_self_, {env: a}, {model: m}, {optional start: '${env}-${model}'}, {extra: null}]\nseed: 1",
    "env/a": "x: 1",
    "env/b": "# @package _global_\nenv: {x: 2}",
    "env/deep/c": "x: 3",
    "model/m": "y: 1",
    "start/b-m": "# @package _global_\nmodel: {y: 2}",
    "extra/choose": "# @package _global_\ndefaults: [{override /env: b}]\nseed: 2",
    "extra/child": "# @package _global_\ndefaults: [choose, _self_]\nseed: 3",
    "extra/late": "# @package _global_\ndefaults: [_self_, choose]\nseed: 4",
    "extra/other": "# @package _global_\ndefaults: [choose, {override /env: deep/c}]",
    "extra/nowhere": "defaults: [{override /envv: b}]",
    "extra/missing": "defaults: [gone]",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "values"),
    [
        ({}, {"seed": 1, "env.x": 1, "model.y": 1}),
        ({"env": "deep/c"}, {"seed": 1, "env.x": 3, "model.y": 1}),
        ({"env": "b"}, {"seed": 1, "env.x": 2, "model.y": 2}),
        ({"extra": "choose"}, {"seed": 2, "env.x": 2, "model.y": 2}),
        ({"extra": "choose", "env": "a"}, {"seed": 2, "env.x": 1, "model.y": 1}),
        ({"extra": "child"}, {"seed": 3, "env.x": 2, "model.y": 2}),
        ({"extra": "late"}, {"seed": 2, "env.x": 2, "model.y": 2}),
    ],
)
def test_overrides_take_precedence_over_files(folder: Path, groups: dict[str, str], values: dict[str, int]) -> None:
    found = {s.key: s.value for s in compose_files("root", tuple(groups.items()), (folder,))}
    assert {key.replace("env.deep.", "env."): value for key, value in found.items()} == values


def test_each_value_has_its_source_file(folder: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    (more / "extra").mkdir(parents=True)
    (more / "extra" / "mine.yaml").write_text("# @package _global_\ndefaults: [{override /env: b}]\nz: 9\n")
    files = {s.key: s.source for s in compose_files("root", (("extra", "mine"),), (folder, more))}
    assert files == {
        "seed": f"{folder.name}/root.yaml",
        "env.x": f"{folder.name}/env/b.yaml",
        "model.y": f"{folder.name}/start/b-m.yaml",
        "z": str(more / "extra" / "mine.yaml"),
    }
    files = {s.key: s.source for s in compose_files("root", (("extra", "child"),), (folder,))}
    assert files["seed"] == f"{folder.name}/extra/child.yaml"


@pytest.mark.parametrize(
    ("option", "fragment"), [("nowhere", "envv"), ("missing", "extra/gone"), ("none", "extra/none")]
)
def test_failed_composition_raises_a_config_error(folder: Path, option: str, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        compose_files("root", (("extra", option),), (folder,))


def test_compose_does_not_change_the_global_hydra_state(folder: Path) -> None:
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        found = compose_files("root", (("env", "b"),), (folder,))
        assert [s.value for s in found if s.key == "env.x"] == [2]
        assert compose_by_hydra("root").seed == 1
    OmegaConf.clear_resolver("now")
    compose_files("root", (("env", "b"),), (folder,))
    assert not OmegaConf.has_resolver("now")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a: &a [x, x]\nb: [*a, *a]\n", "aliases are refused"),
        (b"defaults: [other]\n", "aliases are refused"),
        (b"defaults: [mine]\n", "form a cycle"),
        (b"defaults: 5\n", "must be a list"),
        (b"[" * 100_000, "levels"),
        (b"env_type: \xff\xfe\n", "not valid YAML"),
        (b"env_type: {{ value }}\n", "not valid YAML"),
        (b"? [a, b]\n: c\n", "not valid YAML"),
        (b"env_type: !!python/name:os.system\n", "is refused"),
        (b"- 1\n", "Write lines of the form `key: value`"),
    ],
    ids=["aliases", "chain", "cycle", "defaults", "deep", "bytes", "braces", "list as key", "tag", "list"],
)
def test_config_dir_files_must_be_plain_yaml(tmp_path, text: bytes, says: str) -> None:
    folder = tmp_path / "env"
    folder.mkdir()
    (folder / "other.yaml").write_bytes(b"a: &a [x]\nb: *a\n")
    (folder / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=says):
        load_config("train", ["env=mine"], config_dirs=[tmp_path])


def test_valid_config_dir_file_is_used(tmp_path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("defaults: [gym, _self_]\nid: CartPole-v1\n")
    cfg = load_config("train", ["env=mine", "model=mlp"], config_dirs=[tmp_path])
    assert cfg.env.id == "CartPole-v1"
