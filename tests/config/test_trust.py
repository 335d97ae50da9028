"""Values that a config from a folder may contain (`tests/faults/test_foreign_runs.py` tests whole runs)."""

from pathlib import Path
from typing import Any

import pytest

from embodyrl.config.trust import TRUST, distrusted, split_trust, trust_words
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
    "embodyrl.extensions.text.tasks:copy",
    "${oc.env:HOME}/runs",
    "runs/a b",
    "libero_10",
    3,
    None,
    True,
    ["a", {"b": 1}],
]


@pytest.mark.parametrize("value", DOORS, ids=str)
def test_code_paths_from_files_are_refused_unless_on_the_command_line(value: Any) -> None:
    (line,) = distrusted({"env.x": value, "seed": 1}, {"env.y": "typed", "trust": "true"}, FILE)
    assert line.startswith(f"{FILE}: env.x: ")
    assert f"add {TRUST};" in line
    assert not distrusted({"env.x": value}, {"env.x": "typed"}, FILE)
    assert not distrusted({"env.x": value}, {"trust": True}, FILE)
    assert not distrusted({"runner.experiment_name": value, "video": value, "video.x": value}, {}, FILE)
    assert distrusted({"video_cfg.base_dir": value, "trust": True}, {}, FILE)


@pytest.mark.parametrize("value", FINE, ids=str)
def test_component_names_and_file_paths_are_trusted(value: Any) -> None:
    assert not distrusted({"env.x": value}, {}, FILE)


def test_code_path_in_a_key_is_untrusted() -> None:
    assert distrusted({"reward.weights.mine:f": 0.5}, {}, FILE)


def test_trust_flag_is_a_separate_argument() -> None:
    assert split_trust([TRUST, "seed=1", "env.x=trust=true"]) == ([TRUST], ["seed=1", "env.x=trust=true"])
    assert trust_words(load_config("train", ["env=text/copy", "model=causal_lm_tiny"])) == []
    own = load_config(
        "train", ["env=text/copy", "model=causal_lm_tiny", "data.path=embodyrl.extensions.text.tasks:other"]
    )
    assert trust_words(own) == [TRUST]
