"""Compare what every option of conf/ and every stored run of version 0.1 means with what version 0.1 read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodyrl.config import tree
from embodyrl.config.settings import keys_of, leaves, plain
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config, load_saved_config

HERE = Path(__file__).parent
GOLDEN = HERE / "options_0_1.json"
RUNS = sorted(folder for folder in (HERE / "runs_0_1").iterdir())
_DATA = "data.path=assets/x"
GROUPS = ("env", "model", "algorithm", "launcher", "eval", "experiment")


def cases() -> Iterator[tuple[str, ...]]:
    """Return a command line for each option, alone and in the commands and combinations that treat it differently."""
    yield from (("train",), ("collect",), ("sft", _DATA), ("dagger",), ("serve",), ("check-env",))
    yield from (("train", f"{group}={option}") for group in GROUPS for option in tree.options(group))
    for option in tree.options("env"):
        yield from (("eval", f"env={option}"), ("check-env", f"env={option}"))
    yield from (("sft", f"model={option}", _DATA) for option in tree.options("model"))
    for env in ("gym", "tabletop", "libero_object"):
        for model in ("mlp", "flow_small", "openvla_oft_tiny", "random"):
            yield from (("train", f"env={env}", f"model={model}", f"algorithm={a}") for a in ("ppo", "sac", "rlpd"))


def set_values(cfg: Any) -> dict[str, Any]:
    """Return the keys whose values are not their defaults."""
    keys = keys_of(type(cfg))
    return {
        name: plain(value)
        for name, value in leaves(cfg)
        if name not in keys or plain(keys[name].default) != plain(value)
    }


def values_of(command: str, *words: str) -> dict[str, Any]:
    try:
        return set_values(load_config(command, words, fetch=False))
    except ConfigError as error:
        return {"error": str(error)}


def write() -> None:
    """Store what the loader gives: `python -c "import test_golden; test_golden.write()"` in this folder."""
    lines = (f"{json.dumps(' '.join(case))}: {json.dumps(values_of(*case), sort_keys=True)}" for case in cases())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def test_every_option_means_what_it_meant() -> None:
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    expected.pop("train launcher=ray")  # depends on the packages of the machine
    for line, wanted in expected.items():
        found = values_of(*line.split())
        # One tree for all commands: others than `train` have more keys than in version 0.1.
        keys = wanted.keys() | (found.keys() if line.startswith("train") else set())
        assert {key: found.get(key) for key in keys} == {key: wanted.get(key) for key in keys}, line


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_stored_run_loads_with_its_values(run: Path) -> None:
    stored = dict(_leaves(tree.read_plain_yaml(run / "config.yaml")))
    found = dict(_leaves(plain(load_saved_config(run, [], command=run.name.partition("_")[0]))))
    # Which keys of data there are depends on its path: version 0.1 also wrote those of other paths.
    missing = [key for key in stored.keys() - found.keys() if not key.startswith("data.")]
    assert missing == []
    assert {key: value for key, value in found.items() if stored.get(key, value) != value} == {}


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
