"""Values are equal on the command line, in option files and in saved configs."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from embodyrl.config.compose import compose_files, format_override, parse_override
from embodyrl.config.plain_yaml import command_line_type, dump_plain_yaml, read_plain_yaml
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.saved import save_config

GYM = ("env=gym", "env.id=CartPole-v1", "model=mlp", "algorithm=ppo")
NUMBERS = "1e5 1E234 .5 -1e-3 1e+5 5.e3 1. 1_0.5 +5 007 08 0x1F 0o17 0b11 1_1_1 1__0 _1 -0 12:30 1:2:3 1:30.5 .inf"
WORDS = "on yes no y N null NULL ~ true TrUe nan inf -inf .nan = << ??? 2026-11-24 2026_11_24 - a: #b *c &d !e %f @g"
TEXTS = [
    *NUMBERS.split(),
    *WORDS.split(),
    "",
    " ",
    " a",
    "a ",
    "a\\n",
    "a\n b\n\n",
    "\t",
    "\r\n",
    "\x85",
    "\u2028x",
    "\0",
]
TEXTS += [
    "ü",
    "\U0001f600",
    "${a}",
    "\\${a}",
    "a\\\\${b}\\",
    "${oc.env:HOME}",
    "'",
    '"',
    '\\"',
    "[1,2]",
    "{a: 1}",
    "x" * 300,
]
OTHERS = [
    1,
    10**30,
    -0.0,
    1e-7,
    1e17,
    1e300,
    math.inf,
    -math.inf,
    True,
    False,
    None,
    [],
    ["1e5", ["on", 2.5], {"a": "~"}],
]


def test_saved_config_gives_equal_values(tmp_path: Path) -> None:
    values = {f"x{i}": value for i, value in enumerate([*TEXTS, *OTHERS]) if value != "???"}
    words = [format_override(f"env.kwargs.{name}", value) for name, value in values.items() if "${" not in str(value)]
    cfg = load_config("train", [*GYM, *words, "runner.experiment_name=1e-4", "model.path=null"])
    assert cfg.env.kwargs == {name: value for name, value in values.items() if "${" not in str(value)}
    for name in ("1e-4", "007", "2026_11_24", "on", "null", "1e5"):
        saved = cfg.updated({"env.kwargs": values | {"on": 1, "1e5": 2, "1": 3}, "runner.experiment_name": name})
        save_config(saved, tmp_path / "config.yaml")
        loaded = load_saved_config(tmp_path / "config.yaml", ["trust=true"])
        assert repr(loaded.env.kwargs) == repr(saved.env.kwargs)
        assert loaded.runner.experiment_name == name


def test_random_texts_round_trip(tmp_path: Path) -> None:
    draw = random.Random(0)
    letters = [*"${}\\'\" \n\t\r\x85\u2028:#-?&*!|>%@`,[]~=_.a1eé", "${", "0x", "inf"]
    texts = ["".join(draw.choices(letters, k=draw.randint(0, 8))) for _ in range(300)]
    (tmp_path / "a.yaml").write_text(dump_plain_yaml({"texts": texts}), encoding="utf-8")
    assert read_plain_yaml(tmp_path / "a.yaml")["texts"] == texts
    for text in texts[:100]:
        assert parse_override(format_override("a.b", [text, {"c": text}])) == ("a.b", [text, {"c": text}])


@pytest.mark.parametrize("word", [*NUMBERS.split(), *WORDS.split()])
def test_yaml_values_match_command_line_values(word: str, tmp_path: Path) -> None:
    def read_file() -> Any:
        (tmp_path / "env").mkdir(exist_ok=True)
        (tmp_path / "env" / "mine.yaml").write_text(f"defaults: [gym]\nkwargs:\n  x: {word}\n", encoding="utf-8")
        folders = (Path(__file__).parents[2] / "conf", tmp_path)
        found = compose_files("train", (("env", "mine"),), folders)
        return next(setting.value for setting in found if setting.key == "env.kwargs.x")

    try:
        expected = parse_override(f"env.kwargs.x={word}")[1]
    except ConfigError:
        return
    try:
        found = read_file()
    except ConfigError:
        return
    if word and word != "-":
        assert repr(found) == repr(expected)


def test_command_line_types_match_hydra() -> None:
    kinds = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str"}
    for word in {*NUMBERS.split(), *WORDS.split(), "1e5_0", "1._5", "1_.5", "-.5e-3", "+inf", "nAn", "00", "0_1"}:
        try:
            value = parse_override(f"a={word}")[1]
        except ConfigError:
            continue
        assert command_line_type(word) == kinds[type(value)], word


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("env.kwargs.x=.inf", "Write env.kwargs.x=inf, or quote"),
        ("env.kwargs={a.b: 1}", "'a.b' is not a name in env.kwargs"),
        ("env.kwargs={null: 1}", "None is not a name in env.kwargs"),
        ('runner.experiment_name="a\ud800"', "Cannot parse"),
    ],
)
def test_overrides_that_cannot_be_saved_are_rejected(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("train", [*GYM, word])


def test_duplicate_key_is_found_among_many_keys(tmp_path: Path) -> None:
    file, lines = tmp_path / "a.yaml", "".join(f"k{number}: 1\n" for number in range(30_000))
    file.write_text(lines)
    assert len(read_plain_yaml(file)) == 30_000
    file.write_text(f"{lines}k7: 2\n")
    with pytest.raises(ConfigError, match="key 'k7' occurs twice"):
        read_plain_yaml(file)


def test_plain_yaml_is_parsed_strictly(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1e-4\nb: 2026-08-23\nc: .5\nd: 1_000\ne: [true, ~, 'no', '-inf', .nan, -.inf]\n1: x\n")
    assert repr(read_plain_yaml(file)) == (
        "{'a': 0.0001, 'b': '2026-08-23', 'c': 0.5, 'd': 1000, 'e': [True, None, 'no', '-inf', nan, -inf], 1: 'x'}"
    )
    file.write_text(f"a: [{'1,' * 90_000}]")
    assert read_plain_yaml(file) == {"a": [1] * 90_000}
    for text, fragment in (
        ("a: 1\na: 2\n", "key 'a' occurs twice"),
        ("a: " + "[" * 5000, "levels"),
        ("- " * 5000, "levels"),
        (f"a: [{'1,' * 100_000}]", "more than 100000 keys and values"),
        (f"a: [{'[],' * 50_000}]", "more than 100000 keys and values"),
        ("a: 12:30", "12:30 is a number in YAML and text on the command line"),
        ("on: 3", "on is true or false in YAML"),
        ("a: [inf]", "inf is text in YAML and a number"),
        ("a: 007", "Write '007' in quotes"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=fragment):
            read_plain_yaml(file)
