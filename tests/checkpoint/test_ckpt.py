"""`embodyrl ckpt`: list, export, verify and prune."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_runs import TOY_OFT, train_toy, weights

from embodyrl.cli.main import main

WORDS = ("runner.max_steps=3", "runner.save_interval=1", "actor.optim.lr=0.001", "env.kwargs.goal=0.7")
SOUP = Path(__file__).parents[2] / "assets" / "openvla_oft_tiny_soup"
VALIDATED = (*WORDS, "runner.val_check_interval=1", "eval.episodes=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("runs"), *VALIDATED)


def answer(capsys, *words):
    assert main(["ckpt", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ls_lists_complete_checkpoints_and_the_best(run, capsys):
    rows = answer(capsys, "ls", run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    best = json.loads((run / "checkpoints" / "step_000003" / "loop.json").read_text())["best_step"]
    assert [row["step"] for row in rows if row["best"]] == ([best] if best else [])
    files = [f for f in (run / "checkpoints" / "step_000001").rglob("*") if f.is_file()]
    assert rows[0]["bytes"] == sum(f.stat().st_size for f in files)
    (run / "checkpoints" / "step_000009").mkdir()
    assert [row["step"] for row in answer(capsys, "ls", run)] == [1, 2, 3], "an incomplete one does not count"
    (run / "checkpoints" / "step_000009").rmdir()


def test_full_export_contains_policy_and_model_card(run, tmp_path, capsys):
    out = tmp_path / "models" / "mine"
    answer(capsys, "export", "trust=true", run / "checkpoints" / "step_000002", out)
    assert {p.name: p.read_bytes() for p in out.glob("*.safetensors")} == weights(run, 2)
    card = (out / "README.md").read_text()
    assert all(text in card for text in ("step 2", "| go right |", "seed 0"))
    assert main(["ckpt", "export", str(run), str(out)]) == 2, "never over something"


def test_export_merges_adapters(tmp_path, capsys):
    lora = ("model.is_lora=true", "model.lora.r=4", "model.lora.lora_alpha=8")
    soup = ("model.path=assets/openvla_oft_tiny_soup", "model.unnorm_key=libero_object_no_noops")
    run = train_toy(tmp_path, *WORDS, *TOY_OFT, *lora, *soup, "env.kwargs.echo=true")
    answer(capsys, "export", "trust=true", run, tmp_path / "out")
    adapter = load_file(run / "checkpoints/step_000003/policy/lora_adapter/adapter_model.safetensors")
    base, merged = load_file(SOUP / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert base.keys() == merged.keys()
    changed = 0
    for key in merged:
        low = adapter.get(f"base_model.model.{key.removesuffix('.weight')}.lora_A.weight")
        if low is None:
            torch.testing.assert_close(merged[key], base[key].to(merged[key].dtype), msg=key)
            continue
        high = adapter[f"base_model.model.{key.removesuffix('.weight')}.lora_B.weight"]
        delta = (high.flatten(1) @ low.flatten(1)).reshape(merged[key].shape) * (8 / 4)
        changed += bool(delta.abs().max() > 0)
        torch.testing.assert_close(merged[key].float(), base[key].float() + delta, atol=1e-6, rtol=1e-4, msg=key)
    assert changed > 5


@pytest.mark.parametrize("adapters", [False, True])
def test_complete_checkpoint_is_used_without_the_initial_weights(adapters: bool, tmp_path: Path, capsys):
    initial = shutil.copytree(SOUP, tmp_path / "initial")
    words = (f"model.path={initial}", "model.unnorm_key=libero_object_no_noops", f"model.is_lora={adapters}")
    run = train_toy(tmp_path, *WORDS, *TOY_OFT, *words, "runner.max_steps=1", "env.kwargs.echo=true")
    initial.rename(tmp_path / "moved")
    command = ("eval", "trust=true", f"ckpt={run}", "eval.episodes=1", f"runner.output_dir={tmp_path}/evaluations")
    assert main(command) == (2 if adapters else 0)
    if adapters:  # the base weights are in no checkpoint
        assert f"model.path: {initial} is not a folder" in capsys.readouterr().err


def test_verify_names_the_damaged_file_and_fails(tmp_path, capsys):
    run = train_toy(tmp_path, *WORDS)
    assert answer(capsys, "verify", run)["problems"] == []
    victim = run / "checkpoints" / "step_000002" / "training_state.safetensors"
    victim.write_bytes(victim.read_bytes()[:-7])
    assert main(["ckpt", "verify", str(run)]) == 6
    shown = capsys.readouterr()
    assert all(text in shown.err for text in ("training_state.safetensors", "truncated"))
    assert (shown.out.count("ok "), shown.out.count("FAIL")) == (2, 1)
    assert main(["ckpt", "verify", str(run / "checkpoints" / "step_000003")]) == 0
    assert main(["ckpt", "export", str(run / "checkpoints" / "step_000002"), str(tmp_path / "out")]) == 6
    assert not (tmp_path / "out").exists()


def test_prune_keeps_newest_and_best(tmp_path, capsys):
    run = train_toy(tmp_path, *VALIDATED)
    best = json.loads((run / "checkpoints" / "step_000003" / "loop.json").read_text())["best_step"]
    answer(capsys, "prune", run, "--keep", "1")
    left = sorted(int(p.name[5:]) for p in (run / "checkpoints").iterdir())
    assert left == sorted({3, best} & {1, 2, 3} | {3})
    assert main(["ckpt", "prune", str(run)]) == 2
    assert main(["ckpt", "prune", str(run), "--keep", "0"]) == 2


@pytest.mark.parametrize("words", [[], ["list"], ["ls"], ["ls", "nowhere"], ["export", "nowhere"]])
def test_wrong_ckpt_arguments_are_usage_errors(words):
    assert main(["ckpt", *words]) == 2
