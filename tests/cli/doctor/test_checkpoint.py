"""`embodyrl doctor FOLDER` names frequent mistakes in the use of a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  (weights are counted in this process)

from embodyrl.cli.doctor.checkpoint import MISTAKES, diagnose, run_forward
from embodyrl.cli.main import main
from embodyrl.config.paths import assets_dir
from embodyrl.config.plain_yaml import dump_plain_yaml, read_plain_yaml
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.policies.inputs import INPUTS_FILE, write_inputs

OFT = ["env=tabletop", "model=openvla_oft_tiny"]
STATISTICS, RECORD = "dataset_statistics.json", "embodyrl_config.yaml"
Edit = Callable[[Any], None]


def edit_json(file: Path, edit: Edit) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def record(folder: Path, **model: object) -> None:
    """Add settings of the model to the record of the training."""
    content = read_plain_yaml(folder / RECORD)
    content["model"] |= model
    (folder / RECORD).write_text(dump_plain_yaml(content))


def check(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, tuple[str, str]]:
    """Return level and text of each finding by name."""
    code = main(["doctor", str(folder), *words, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert code == (3 if any(finding["level"] == "FAIL" for finding in findings) else 0)
    return {finding["name"]: (finding["level"], finding["text"]) for finding in findings}


def failed(findings: dict[str, tuple[str, str]]) -> list[str]:
    return [name for name, (level, _) in findings.items() if level == "FAIL"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint with a record of its training, as a run writes it."""
    out = shutil.copytree(assets_dir() / "openvla_oft_tabletop", tmp_path / "policy")
    run_plan = build_run_plan(load_config("eval", OFT), training=False)
    write_inputs(out, run_plan.policy, run_plan.env)
    record(out, image_pipeline="rlinf", action_normalization="bounds_q99", use_proprio=True, unnorm_key=None)
    return out


def other_statistics(folder: Path) -> None:
    edit_json(folder / STATISTICS, lambda sets: sets.update(bridge_orig=sets["tabletop"]))


def narrow_proprio(folder: Path) -> None:
    def cut(sets: Any) -> None:
        sets["tabletop"]["proprio"] = {row: values[:3] for row, values in sets["tabletop"]["proprio"].items()}

    edit_json(folder / STATISTICS, cut)


def adapter(folder: Path, base: str) -> str:
    out = folder.parent / "adapter"
    out.mkdir()
    (out / "adapter_model.safetensors").write_bytes(b"")
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": base,
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return f"model.lora.path={out}"


def test_doctor_reads_the_inputs_from_the_training_record(folder: Path, capsys) -> None:
    lines, findings = diagnose(str(folder), [*OFT, "model.num_action_chunks=2"], [])
    levels = dict.fromkeys((mistake.name for mistake in MISTAKES if mistake.name != "texture colors"), "ok")
    unknown = dict.fromkeys(("channel order", "adapter"), "?")
    assert {finding.name: finding.level for finding in findings} == levels | unknown | {"chunk length": "FAIL"}
    texts = dict(lines)
    assert (
        texts["command"] == f"embodyrl eval ckpt={folder} {' '.join(OFT)} model.num_action_chunks=2 model.path={folder}"
    )
    assert texts["statistics"] == "tabletop of tabletop; bounds_q99"
    assert "rlinf (bicubic, no crop)" in texts["images"]
    assert "tokenizer.json" in texts["tokenizer"]
    assert "camera front 56x56 and state of 4 numbers" in texts["policy"]


def test_settings_that_published_files_do_not_contain_are_listed(tmp_path: Path, capsys) -> None:
    bare = shutil.copytree(assets_dir() / "openvla_oft_tabletop", tmp_path / "bare")
    (bare / RECORD).unlink()
    findings = check(capsys, bare, *OFT)
    unknown = {mistake.name for mistake in MISTAKES} - {"texture colors"}
    assert {name: level for name, (level, _) in findings.items()} == dict.fromkeys(unknown, "?") | {
        "forward pass": "ok"
    }
    assert findings["forward pass"][1].startswith("8 actions from ")


@pytest.mark.parametrize(
    ("name", "change", "words", "text"),
    [
        ("flip", lambda f: edit_json(f / INPUTS_FILE, lambda c: c.update(image_rotation_deg=180)), [], "=180"),
        (
            "gripper",
            lambda f: edit_json(f / INPUTS_FILE, lambda c: c["gripper"].update(open=0.0, closed=1.0)),
            [],
            "opens at 0",
        ),
        ("statistics key", other_statistics, ["model.unnorm_key=bridge_orig"], "bridge_orig"),
        ("statistics key", lambda f: None, ["model.unnorm_key=bridge_orig"], "No statistics 'bridge_orig'"),
        ("crop", lambda f: record(f, image_pipeline="official"), [], "image_pipeline=official"),
        ("proprioception", narrow_proprio, [], "have 3"),
        ("proprioception", lambda f: record(f, use_proprio=False), [], "use_proprio=false"),
        ("chunk length", lambda f: None, ["model.num_action_chunks=8"], "num_action_chunks=8"),
        ("chunk length", lambda f: None, ["model.num_action_chunks=2"], "num_action_chunks=4"),
        ("normalization", lambda f: None, ["model.action_normalization=bounds"], "action_normalization=bounds_q99"),
    ],
)
def test_doctor_reports_each_kind_of_mistake(
    folder: Path, capsys, name: str, change: Callable[[Path], None], words: list[str], text: str
) -> None:
    change(folder)
    findings = check(capsys, folder, *OFT, *words)
    assert failed(findings) == [name]
    assert text in findings[name][1]


def test_doctor_reports_state_statistics_of_another_robot(folder: Path) -> None:
    """The statistics have the width of this robot's state, so only a rendered observation shows the mistake."""
    arguments = [*OFT, f"model.path={folder}"]
    assert run_forward(str(folder), arguments, []).name == "forward pass"
    rows = {"mean": 70.0, "std": 9.0, "min": 50.0, "max": 95.0, "q01": 55.0, "q99": 90.0}
    edit_json(
        folder / STATISTICS,
        lambda sets: sets["tabletop"]["proprio"].update({row: [value] * 4 for row, value in rows.items()}),
    )
    finding = run_forward(str(folder), arguments, [])
    assert (finding.name, finding.level) == ("proprioception", "FAIL")
    assert "state dimensions [0, 1, 2, 3] of env 'tabletop' are far outside" in finding.text


def test_statistics_key_of_several_data_sets_is_accepted(folder: Path, capsys) -> None:
    """A checkpoint of all suites has one key, which no environment has."""
    edit_json(folder / STATISTICS, lambda sets: sets.update(all_suites=sets.pop("tabletop")))
    record(folder, unnorm_key="all_suites", image_pipeline="official")
    findings = check(capsys, folder, *OFT, "model.unnorm_key=all_suites")
    assert failed(findings) == ["crop"]
    assert findings["statistics key"] == ("ok", "as in training model.unnorm_key=all_suites")


def test_adapter_of_another_base_model_is_reported(folder: Path, capsys) -> None:
    findings = check(capsys, folder, *OFT, adapter(folder, "owner/older"))
    assert failed(findings) == ["adapter"]
    assert "was trained on owner/older" in findings["adapter"][1]


def test_adapter_that_is_already_merged_is_reported(folder: Path, capsys) -> None:
    (inner := folder / "lora_adapter").mkdir()
    (inner / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]})
    )
    findings = check(capsys, folder, *OFT, f"model.lora.path={inner}")
    assert failed(findings) == ["adapter"]
    assert "already merged" in findings["adapter"][1]


def test_doctor_reports_texture_colorspace_mismatch(capsys) -> None:
    pytest.importorskip("libero")
    soup, words = assets_dir() / "openvla_oft_tiny_soup", ["model=openvla_oft_tiny", "env.render_profile=lean"]
    findings = check(capsys, soup, *words, "env.texture_colorspace=linear")
    assert failed(findings) == ["texture colors"]
    assert "env.texture_colorspace=auto" in findings["texture colors"][1]


def test_doctor_reports_normalization_mode_mismatch_with_lerobot_config(tmp_path: Path, capsys) -> None:
    folder = shutil.copytree(assets_dir() / "pi05_tiny_tabletop", tmp_path / "pi05")
    (statistics,) = json.loads((folder / STATISTICS).read_text()).values()
    (folder / STATISTICS).unlink()
    parts = {"state": statistics["proprio"], "actions": statistics["action"]}
    numbers = {part: {row: rows[row] for row in ("mean", "std", "q01", "q99")} for part, rows in parts.items()}
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": numbers}))
    edit_json(folder / "config.json", lambda config: config.update(normalization_mapping={"ACTION": "MEAN_STD"}))
    findings = check(capsys, folder, "env=tabletop", "model=pi05_tiny")
    assert failed(findings) == ["normalization"]
    assert "trained with MEAN_STD" in findings["normalization"][1]


def test_all_presets_that_fit_the_files_are_listed(folder: Path, capsys) -> None:
    assert main(["doctor", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "fits model=openvla_oft_official|openvla_oft_tiny. The files do not show" in error
    assert main(["doctor", str(folder), "other"]) == 2
    assert main(["doctor", "other"]) == 6
    assert "ckpt=other: no such run, checkpoint or model folder." in capsys.readouterr().err
    (folder / RECORD).unlink()
    (folder / INPUTS_FILE).unlink()
    assert main(["doctor", str(folder)]) == 2
    assert "do not contain the training environment" in capsys.readouterr().err
