"""Stored runs of earlier versions load with their original values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.settings import to_builtin
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_saved_config
from embodyrl.registry import load

RUNS = sorted((Path(__file__).parent / "runs_0_1").iterdir())

DERIVED = {
    "train_libero": {"env.eval.max_episode_steps": 280, "eval.protocol.settled": True},
    "train_text": {"env.train.max_episode_steps": 4, "env.eval.max_episode_steps": 4, "model.num_action_chunks": 4},
}
"""Derived values; version 0.1 derived them after it wrote the config."""
DELETED = {"rollout.dump", "model.use_film", "eval.baseline"}
"""Keys of version 0.1 that have been deleted."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_stored_config_loads_with_its_values(run: Path) -> None:
    stored = dict(_leaves(read_plain_yaml(run / "config.yaml")))
    found = dict(_leaves(to_builtin(load_saved_config(run, [], command=run.name.partition("_")[0]))))
    # Which keys of data there are depends on its path: version 0.1 also wrote those of other paths.
    missing = [k for k in stored.keys() - found.keys() if not k.startswith("data.") and k not in DELETED]
    assert missing == []
    changed = {key: value for key, value in found.items() if stored.get(key, value) != value}
    assert changed == DERIVED.get(run.name, {})


@pytest.mark.parametrize("module", ["embodyrl.datasets.tasks", "embodyrl.extensions.text.tasks"])
@pytest.mark.parametrize("task", ["copy", "reverse", "arithmetic", "countdown", "length", "colour"])
def test_stored_config_accepts_the_former_text_task_modules(task: str, module: str, tmp_path: Path) -> None:
    path = f"{module}:{task}"
    text = (RUNS[0].parent / "train_text" / "config.yaml").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(text.replace("embodyrl.datasets.tasks:copy", path), encoding="utf-8")
    assert load_saved_config(tmp_path, [], command="train").data.path == path
    assert load(path, "data.path", wants="a function", fits=callable).__module__ == "embodyrl.text.tasks"


def test_stored_libero_run_keeps_the_colors_of_its_images() -> None:
    """Version 0.1 rendered textures as MuJoCo 3.3.7 decodes them."""
    assert load_saved_config(RUNS[0].parent / "train_libero", []).get("env.texture_colorspace") == "auto"


EARLIER = Path(__file__).parent / "runs_416006cb"
"""Configs that commit 416006cb wrote, with old module paths and keys that have been deleted since."""


@pytest.mark.parametrize(
    ("run", "key", "value", "ignored"),
    [
        ("eval_flow", "env.control.latency_steps", 2, ["model.rtc=guided", "rollout.chunk_overlap=3"]),
        ("train_history", "env.history", 2, []),
        ("train_history", "env.env_type", "tabletop", []),
        ("train_oft", "model.model_type", "openvla_oft", ["model.use_film=true"]),
        ("train_text", "data.path", "embodyrl.extensions.text.tasks:reverse", []),
    ],
)
def test_a_deleted_key_of_a_stored_run_gives_one_warning(run: str, key: str, value: object, ignored: list[str]) -> None:
    cfg = load_saved_config(EARLIER / run, [], command=run.partition("_")[0])
    assert cfg.get(key) == value
    assert sorted(line.split()[1] for line in cfg.warnings) == ignored
    assert all(line.endswith("is ignored: the key has been deleted.") for line in cfg.warnings)


def test_deleted_recap_keys_of_a_stored_run_warn_unless_they_have_their_defaults(tmp_path: Path) -> None:
    text = (RUNS[0].parent / "sft_tabletop" / "config.yaml").read_text(encoding="utf-8")
    for lines, ignored in (("guidance: 1.0\n  labels: null", []), ("guidance: 1.5", ["objective.guidance=1.5"])):
        stored = text.replace("objective:\n", f"objective:\n  {lines}\n  label_dropout: 0.3\n")
        (tmp_path / "config.yaml").write_text(stored, encoding="utf-8")
        cfg = load_saved_config(tmp_path, [], command="sft")
        assert [line.split()[1] for line in cfg.warnings if "deleted" in line] == ignored


def test_unknown_function_of_a_renamed_module_requires_trust(tmp_path: Path) -> None:
    text = (RUNS[0].parent / "train_text" / "config.yaml").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(text.replace("datasets.tasks:copy", "datasets.tasks:open"), encoding="utf-8")
    with pytest.raises(ConfigError, match="trust=true"):
        load_saved_config(tmp_path, [], command="train")


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
