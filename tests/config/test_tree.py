"""YAML of settings, and which files a choice of groups stands for."""

from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from embodyrl.config import tree
from embodyrl.config.paths import conf_dir
from embodyrl.errors import ConfigError
from embodyrl.plan.load import parse_word

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
    "extra/circle": "defaults: [circle]",
    "extra/missing": "defaults: [gone]",
    "extra/form": "defaults: [{env@x: b}]",
    "extra/said": "# What it is for\n# @package _global_\nseed: 5",
    "round": "defaults: [{optional env: '${model}'}, {optional model: 'n${env}'}]",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ({}, "root env/a model/m"),
        ({"env": "deep/c"}, "root env/deep/c model/m"),
        ({"env": "b"}, "root env/b model/m start/b-m"),
        ({"extra": "choose"}, "root env/b model/m start/b-m extra/choose"),
        ({"extra": "choose", "env": "a"}, "root env/a model/m extra/choose"),
        ({"extra": "child"}, "root env/b model/m start/b-m extra/choose extra/child"),
        ({"extra": "other"}, "root env/deep/c model/m extra/choose extra/other"),
        ({"extra": "other", "env": "a"}, "root env/a model/m extra/choose extra/other"),
        ({"extra": "late"}, "root env/b model/m start/b-m extra/late extra/choose"),
    ],
)
def test_files_are_read_in_the_order_of_their_defaults(folder: Path, groups: dict[str, str], names: str) -> None:
    parts = tree.compose_files("root", groups, [folder])
    assert [part.name for part in parts] == names.split() == _by_hydra("root", groups, folder)
    packages = {part.name: part.package for part in parts}
    assert packages.get("env/deep/c", "env") == packages["model/m"].replace("model", "env") == "env"
    assert not packages["root"]


@pytest.mark.parametrize(
    ("option", "fragment"),
    [
        ("nowhere", "envv=b: no such group. Did you mean 'env'?"),
        ("circle", "extra/circle.yaml is among its own defaults"),
        ("missing", "extra/missing: there is no extra/gone.yaml"),
        ("form", "cannot read"),
    ],
)
def test_what_cannot_be_composed_is_said(folder: Path, option: str, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment.replace("?", r"\?")):
        tree.compose_files("root", {"extra": option}, [folder])


def test_the_package_may_stand_below_what_a_file_says_about_itself(folder: Path) -> None:
    assert tree.compose_files("root", {"extra": "said"}, [folder])[-1].package == ""
    (folder / "extra/said.yaml").write_text("seed: 5\n# @package _global_\n")
    assert tree.compose_files("root", {"extra": "said"}, [folder])[-1].package == "extra"


def test_groups_that_choose_each_other_without_end_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="choose each other in a circle"):
        tree.compose_files("round", {}, [folder])


def _by_hydra(root: str, groups: dict[str, str], folder: Path) -> list[str]:
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        words = [f"{group}={option}" for group, option in groups.items()]
        found = loader.compute_defaults_list(root, words, run_mode=RunMode.RUN).defaults
    names = (one.config_path for one in found)
    return [name for name in names if name and (folder / f"{name}.yaml").is_file()]


@pytest.mark.parametrize("group", sorted(tree.default_options("train")))
def test_what_ships_is_composed_as_hydra_does(group: str) -> None:
    for option in tree.options(group):
        parts = tree.compose_files(tree.root_file("train"), {group: option}, [conf_dir()])
        assert [part.name for part in parts] == _by_hydra("train", {group: option}, conf_dir()), option


def test_yaml_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1e-4\nb: 2026-08-23\nc: .5\nd: 1_000\ne: [true, ~, 'no', -inf, .nan]\n1: x\n")
    found = tree.read_plain_yaml(file)
    assert repr(found) == (
        "{'a': 0.0001, 'b': '2026-08-23', 'c': 0.5, 'd': 1000, 'e': [True, None, 'no', '-inf', nan], 1: 'x'}"
    )
    for text, fragment in (
        ("a: 1\na: 2\n", "a is there twice"),
        ("a: " + "[" * 5000, "levels"),
        ("- " * 5000, "levels"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=fragment):
            tree.read_plain_yaml(file)


WORDS = (
    "1_000 1__0 007 +5 -0 1e-4 1.e3 .5 5. 1.5_0 inf -NaN True NULL none 1-2 a:b 1:30 0x10 1e e5 - + 1_ _1 1_e5 +inf "
    "nano 1.2.3 0. 00.5 -.5 1e+05 tru false1 runs/x.y a%b@c *? ab|c first:3 1/2"
)


@pytest.mark.parametrize("value", WORDS.split())
def test_plain_words_are_read_as_hydra_reads_them(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"a.b_c={value}")
    assert repr(parse_word(f"a.b_c={value}")) == repr((override.key_or_group, override.value()))
