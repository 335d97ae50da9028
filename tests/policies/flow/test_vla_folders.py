"""Small files of a checkpoint folder: statistics of several robots, prompt limits and executed actions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_vla_policy import ENV, build, folder_of, settings
from tiny_vla import FORMS

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies import POLICIES
from embodyrl.policies.flow.vla.folder import read_side_files
from embodyrl.policies.flow.vla.statistics import read_lerobot
from embodyrl.policies.vla.folder import find_data_set

ROBOTS = ("so100", "so100-blue", "so100-red")


def of_robots(pattern: str = "{}.buffer.{}.{}") -> dict[str, torch.Tensor]:
    """Return statistics with the names of `lerobot/smolvla_base`."""
    rows = {("mean", 0.0), ("std", 1.0)}
    sizes = {"observation.state": 5, "action": 7}
    return {
        pattern.format(robot, part if "buffer." in pattern else part.replace(".", "_"), name): torch.full(
            (size,), v + n
        )
        for n, robot in enumerate(ROBOTS)
        for part, size in sizes.items()
        for name, v in rows
    }


@pytest.mark.parametrize("pattern", ["{}.buffer.{}.{}", "normalize_inputs.{}.buffer_{}.{}", "{}_buffer_{}.{}"])
def test_unnorm_key_selects_a_robot(tmp_path: Path, pattern: str) -> None:
    tensors = of_robots(pattern)
    with pytest.raises(
        CheckpointError, match=r"3 data sets or robots: so100, so100-blue, so100-red. Set model.unnorm_key"
    ):
        read_lerobot(tensors, tmp_path)
    with pytest.raises(CheckpointError, match="No statistics 'so101'"):
        read_lerobot(tensors, tmp_path, "so101")
    assert read_lerobot(tensors, tmp_path, "so100-red")["actions"].numbers["mean"] == (2.0,) * 7


def test_policy_uses_the_statistics_of_unnorm_key(tmp_path: Path) -> None:
    folder = folder_of("smolvla", tmp_path, lerobot_statistics=True)
    save_file(of_robots(), folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    with pytest.raises(CheckpointError, match="data sets or robots"):
        build("smolvla", folder)
    policy = build("smolvla", folder, unnorm_key="so100-blue")
    policy.save(tmp_path / "saved")
    build("smolvla", tmp_path / "saved", unnorm_key="so100-blue").load_weights(tmp_path / "saved")


def test_unnorm_key_selects_an_asset_folder(tmp_path: Path) -> None:
    folder = folder_of("pi0", tmp_path)
    other = folder / "assets/lab/other/norm_stats.json"
    other.parent.mkdir()
    other.write_text((folder / "assets/lab/robot/norm_stats.json").read_text().replace("0.1", "0.7"))
    with pytest.raises(CheckpointError, match="2 data sets or robots: lab/other, lab/robot"):
        build("pi0", folder)
    policy = build("pi0", folder, unnorm_key="lab/other")
    policy.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/norm_stats.json").read_text())["norm_stats"]["state"]["mean"] == [0.7] * 5
    found = [read_side_files(folder, settings("pi0", folder, unnorm_key=f"lab/{name}")) for name in ("robot", "other")]
    assert found[0]["norm_stats.json"] != found[1]["norm_stats.json"]


@pytest.mark.parametrize("known", ["libero_spatial", "libero_spatial_no_noops"])
@pytest.mark.parametrize("wanted", ["libero_spatial", "libero_spatial_no_noops"])
def test_no_noops_suffix_is_optional(known: str, wanted: str) -> None:
    assert find_data_set(wanted, [known, "bridge"], Path("x")) == known
    with pytest.raises(CheckpointError, match=r"No statistics 'libero_10_no_noops' \(with or without '_no_noops'\)"):
        find_data_set("libero_10_no_noops", [known], Path("x"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mean": [0.0, float("nan"), 0.0, 0.0, 0.0, 0.0, 0.0]}, r"mean\[1\] is nan, which is not finite"),
        ({"std": [0.5, 0.5, -0.5, 0.5, 0.5, 0.5, 0.5]}, "dimension 2 has a negative range or deviation"),
        ({"std": [0.0] * 7}, "degenerate: no dimension varies"),
        ({"q01": [2.0] * 7}, "dimension 0 has a negative range or deviation"),
        ({"q01": [1.1] * 7}, "degenerate: no dimension varies"),
        ({"std": [0.5] * 6}, "different length"),
        (
            {name: [0.5, 1.0] * 4 for name in ("mean", "std")} | {"q01": [-1.0] * 8, "q99": [1.0] * 8},
            "has 8 dimensions",
        ),
    ],
)
def test_malformed_checkpoint_statistics_are_rejected(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = folder_of("pi0", tmp_path)
    path = folder / "assets/lab/robot/norm_stats.json"
    content = json.loads(path.read_text())
    content["norm_stats"]["actions"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=said):
        build("pi0", folder)


def test_statistics_may_be_padded(tmp_path: Path) -> None:
    folder = folder_of("pi0", tmp_path)
    path = folder / "assets/lab/robot/norm_stats.json"
    content = json.loads(path.read_text())
    for row in content["norm_stats"]["actions"].values():
        row += [0.0] * 5
    path.write_text(json.dumps(content))
    build("pi0", folder)


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["tokenizer_max_length", "max_token_len"])
def test_checkpoint_prompt_limit_is_checked_early(tmp_path: Path, form: str, name: str) -> None:
    folder, cfg = folder_of(form, tmp_path), settings(form, tmp_path / form)
    factory, long = POLICIES.get(form), replace(ENV, tasks=("open it", "x" * 60))
    if form == "pi05":
        factory.spec(cfg, long, 0)
    else:
        with pytest.raises(ConfigError, match=r"has 6\d tokens, but this model supports 48\. Shorten"):
            factory.spec(cfg, long, 0)
    edit_config(folder, **{name: 120})
    factory.spec(cfg, long, 0)
    edit_config(folder, **{name: 50})
    with pytest.raises(ConfigError, match=r"this model supports 50\. Shorten"):
        factory.spec(cfg, long, 0)


def test_different_number_of_executed_actions_gives_a_warning(tmp_path: Path) -> None:
    folder, cfg, factory = folder_of("pi0", tmp_path), settings("pi0", tmp_path / "pi0"), POLICIES.get("pi0")
    assert factory.spec(cfg, ENV, 0).warnings == ()
    edit_config(folder, n_action_steps=3)
    assert factory.spec(cfg, ENV, 0).warnings == ()
    edit_config(folder, n_action_steps=6)
    assert "executes 6 actions per query" in factory.spec(cfg, ENV, 0).warnings[0]
