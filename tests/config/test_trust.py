"""Values that a config from a folder may contain (`tests/faults/test_foreign_runs.py` tests whole runs)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodyrl.config.trust import (
    TRUST,
    find_untrusted_values,
    find_user_modules,
    format_shell_command,
    python_path,
    split_trust,
    trust_overrides,
)
from embodyrl.plan.config import load_config

FILE = Path("run/config.yaml")
DOORS = [
    "os:system",
    "os:system\nwith a second line",
    "tasks:copy",  # the end of a shipped path
    "http://host/x",
    "${oc.env:NOT_SET,os:system}",
    "${oc.env:HOME}:system",
    "${seed}",
    ["fine", ["os:system"]],
    [{"os:system": 1}],
    {"a": {"b": "os:system"}},
]
FINE = [
    "embodyrl.text.tasks:copy",
    "${oc.env:HOME}/runs",
    "runs/a b",
    "libero_10",
    3,
    None,
    True,
    ["a", {"b": 1}],
]


@pytest.mark.parametrize("value", DOORS, ids=str)
def test_code_paths_from_files_are_rejected_unless_on_the_command_line(value: Any) -> None:
    (line,) = find_untrusted_values({"env.x": value, "seed": 1}, {"env.y": "typed", "trust": "true"}, FILE)
    assert line.startswith(f"{FILE}: env.x: ")
    assert f"add {TRUST};" in line
    assert not find_untrusted_values({"env.x": value}, {"env.x": "typed"}, FILE)
    assert not find_untrusted_values({"env.x": value}, {"trust": True}, FILE)
    texts = {"runner.experiment_name": value, "video": value, "data.system_prompt": value, "video.x": value}
    grows = value in ("${seed}", "${oc.env:NOT_SET,os:system}")
    assert len(find_untrusted_values(texts, {}, FILE)) == 4 * grows
    assert find_untrusted_values({"video_cfg.base_dir": value, "trust": True}, {}, FILE)


@pytest.mark.parametrize(
    ("value", "variable", "is_trusted"),
    [
        ("payload${oc.env:X}", ":0", False),
        ("${oc.env:X}", "ubuntu:GNOME", False),
        (["a", "env.env_type=payload${oc.env:X}"], ":0", True),  # the setting of a protocol, which is parsed first
        ("payload${oc.env:X}", "${seed}", False),
        ("${oc.env:X}/runs", "/home/a:b", True),
        ("${oc.env:X}", "hf_0123", True),
    ],
)
def test_values_of_environment_variables_are_checked(value, variable, is_trusted, monkeypatch) -> None:
    monkeypatch.setenv("X", variable)
    assert bool(find_untrusted_values({"env.x": value}, {}, FILE)) is not is_trusted


@pytest.mark.parametrize("key", ["env.python", "model.chat_template"])
def test_programs_and_copied_texts_of_a_saved_config_are_untrusted(key: str) -> None:
    assert find_untrusted_values({key: "~/.ssh/id_rsa"}, {}, FILE)
    assert not find_untrusted_values({key: "~/.ssh/id_rsa"}, {key: "typed"}, FILE)
    assert not find_untrusted_values({key: None}, {}, FILE)


@pytest.mark.parametrize("value", FINE, ids=str)
def test_component_names_and_file_paths_are_trusted(value: Any) -> None:
    assert not find_untrusted_values({"env.x": value}, {}, FILE)


def test_texts_of_a_saved_config_may_contain_environment_variables_and_escaped_interpolations() -> None:
    key = "data.system_prompt"
    assert not find_untrusted_values({key: r"Ask ${oc.env:USER}: \${x} \\\${y} $x {y}"}, {}, FILE)
    for text in (r"\\${seed}", "${data.${seed}}", ["a", "${oc.env:USER}${seed}"], {"${seed}": 1}):
        assert find_untrusted_values({key: text}, {}, FILE), text
    words = ["env=text/copy", "model=causal_lm_tiny"]
    assert trust_overrides(load_config("train", [*words, r"data.system_prompt='write \${x}'"])) == []


def test_code_path_in_a_key_is_untrusted() -> None:
    assert find_untrusted_values({"reward.weights.mine:f": 0.5}, {}, FILE)


def test_trust_flag_is_a_separate_argument() -> None:
    assert split_trust([TRUST, "seed=1", "env.x=trust=true"]) == ([TRUST], ["seed=1", "env.x=trust=true"])
    assert trust_overrides(load_config("train", ["env=text/copy", "model=causal_lm_tiny"])) == []
    own = load_config("train", ["env=text/copy", "model=causal_lm_tiny", "data.path=embodyrl.text.tasks:other"])
    assert trust_overrides(own) == [TRUST]


OWN = {
    "alone.py": "alone:LOSS",
    "pkg/__init__.py": "pkg:LOSS",
    "pkg/part.py": "pkg.part:LOSS",
    "space/deep/m.py": "space.deep.m:A.b",
}
"""Source files of a user, and values that name them; `space` is a package without `__init__.py`."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own code"
    for name in OWN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("LOSS = 1\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


@pytest.mark.parametrize(("file", "value"), OWN.items())
def test_own_source_files_are_found_by_their_import_path(file: str, value: str, own: Path) -> None:
    cfg = load_config("train", ["env=tabletop"]).updated({"algorithm.loss_type": value})
    assert find_user_modules(cfg) == {value.partition(":")[0]: own / file}
    nested = cfg.updated({"algorithm.loss_type": "ppo_clip", "env.init_params.camera_names": ["x", {"b": value}]})
    assert find_user_modules(nested) == find_user_modules(cfg)


@pytest.mark.parametrize(
    "value", ["ppo_clip", "os:system", "torch:Tensor", "embodyrl.types:EnvSpec", "no:LOSS", "alone: x", "alone:80"]
)
def test_installed_and_missing_modules_have_no_own_source_files(value: str, own: Path) -> None:
    assert find_user_modules(load_config("train", ["env=tabletop"]).updated({"algorithm.loss_type": value})) == {}


@pytest.mark.integration
def test_suggested_command_sets_pythonpath_only_for_folders_that_need_it(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_config("train", ["env=tabletop"])
    cfg = plain.updated({"algorithm.loss_type": "pkg.part:LOSS"})
    assert python_path(cfg) == [], "on Python's path without PYTHONPATH, as installed with `pip install -e`"
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{own.name}")
    assert python_path(cfg) == ["/elsewhere", str(own)]
    line = format_shell_command(["train", "a=b c"], cfg)
    assert line == f"PYTHONPATH='/elsewhere:{own}' embodyrl train 'a=b c'"
    assert format_shell_command(["train"], plain) == "embodyrl train"
    shown = subprocess.run(
        ["bash", "-c", line.replace("embodyrl train", f"{sys.executable} -c 'import pkg.part; print(pkg.part.LOSS)'")],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert shown.stdout == "1\n", shown.stderr
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(own)  # as with `python -m embodyrl.cli.main`
    assert python_path(cfg) == [str(own)]
