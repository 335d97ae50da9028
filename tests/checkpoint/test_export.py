"""Exported language-model checkpoints in plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from text_runs import text_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.export import export
from embodyrl.commands.sft import sft
from embodyrl.commands.train import train
from embodyrl.config.paths import resolve_asset
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.text.dataset import open_rows
from embodyrl.text.settings import RowSettings

TRAINED = ("runner.max_steps=1", "runner.save_interval=1", "actor.optim.lr=0.02", "actor.optim.warmup_steps=0")
LORA = ("model.is_lora=true", "model.lora.r=4")
WHOLE_HEAD = (*LORA, "model.lora.modules_to_save=[lm_head]")
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]", "model.precision=fp32")


def model_folder(folder: Path, *, tied: bool) -> Path:
    own = resolve_asset("assets/causal_lm_tiny")
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig.from_pretrained(own, tie_word_embeddings=tied)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(own).save_pretrained(folder)
    return folder


def evaluated(run: Path) -> list[tuple[int, str, str]]:
    """Return row, prompt and greedy reply of each episode of `embodyrl eval`."""
    words = [f"ckpt={run}", "eval.episodes=4", "env.eval.total_num_envs=4", f"runner.output_dir={run.parent}"]
    done = evaluate(load_config("eval", [*words, "runner.experiment_name=eval", *QUIET], base=run / "config.yaml"))
    rows = map(json.loads, (done.folder / "episodes.jsonl").read_text().splitlines())
    return [(row["reset_id"], row["conversation"][0][1], row["conversation"][-1][1]) for row in rows]


def generated(folder: Path, prompt: str, pictures: dict[str, Any]) -> str:
    """Return the greedy reply of plain transformers."""
    kind = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    model = kind.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = pictures or tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    # Replies never contain the token that stands for an image.
    barred = {"suppress_tokens": [model.config.image_token_id]} if pictures else {}
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=2 if pictures else 6, **barred)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("adapters", "tied"), [((), False), (LORA, False), (LORA, True), (WHOLE_HEAD, True), (LORA, None)]
)
def test_exported_lm_generates_the_same_text_in_transformers(
    tmp_path: Path, adapters: tuple[str, ...], tied: bool | None, recwarn: pytest.WarningsRecorder
):
    """None: a model with random weights from the seed, without a folder."""
    model = [] if tied is None else ["model=causal_lm", f"model.path={model_folder(tmp_path / 'base', tied=tied)}"]
    words = [*TRAINED, *QUIET[2:], *adapters, *model, "seed=7"]
    words += ["algorithm.sampling_params.max_new_tokens=6"]
    run = train(text_config(tmp_path / "runs", *words)).run
    out = export(run, 1, tmp_path / "out")
    assert not (out / "adapter").exists()
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {f.name for f in out.iterdir()}
    tensors = load_file(out / "model.safetensors")
    assert not any("lora" in name for name in tensors)
    replies = evaluated(run)
    assert [generated(out, prompt, {}) for _, prompt, _ in replies] == [reply for *_, reply in replies]
    if tied is not None:
        base = load_file(tmp_path / "base" / "model.safetensors")
        assert base.keys() <= tensors.keys()
        assert any(not torch.equal(base[name], tensors[name]) for name in base)
    assert not [str(warning.message) for warning in recwarn if "embodyrl" not in str(warning.filename)]


@pytest.mark.integration
def test_exported_vlm_generates_the_same_text_in_transformers(tmp_path: Path):
    words = [*TRAINED, *LORA, *QUIET[2:], "model=vision_lm_tiny", "data.kwargs={rows: 40}"]
    run = train(text_config(tmp_path / "runs", *words, task="colour")).run
    out = export(run, 1, tmp_path / "out")
    processor = AutoProcessor.from_pretrained(out, local_files_only=True)
    rows = open_rows(RowSettings(path="embodyrl.text.tasks:colour", kwargs={"rows": 40}), tokenizer=None)
    found = []
    for index, _, reply in evaluated(run):
        row = rows[index]
        images = [picture.pixels() for picture in row.pictures]
        text = processor.image_token * len(images) + "?"
        found.append((generated(out, "", processor(text=[text], images=[images], return_tensors="pt")), reply))
    assert found
    assert [a for a, _ in found] == [b for _, b in found]


@pytest.mark.integration
def test_export_needs_neither_data_nor_rewards(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    words = [f"data.path={tmp_path}/rows.jsonl", "data.prompt_key=prompt", "data.answer_key=answer"]
    own = "reward.path=plain_rewards:moody"
    run = train(text_config(tmp_path / "runs", *TRAINED, *LORA, *words, own)).run
    (tmp_path / "rows.jsonl").unlink()
    saved = (run / "config.yaml").read_text()
    assert "plain_rewards:moody" in saved
    (run / "config.yaml").write_text(saved.replace("plain_rewards:moody", "no_such_package:reward"))
    assert (export(run, 1, tmp_path / "out") / "config.json").is_file()


@pytest.mark.integration
def test_adapters_trained_by_text_sft_are_exported(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    words = [f"data.path={tmp_path}/rows.jsonl", "model=causal_lm_tiny", *LORA, *QUIET, "runner.max_steps=1"]
    small = ("actor.global_batch_size=4", "actor.micro_batch_size=4", f"runner.output_dir={tmp_path}/runs")
    run = sft(load_config("sft", [*words, *small])).run
    assert (export(run, 1, tmp_path / "out") / "model.safetensors").is_file()


@pytest.mark.integration
def test_fully_trained_modules_with_adapters_evaluate_in_bfloat16(tmp_path: Path):
    model = ["model=causal_lm", f"model.path={model_folder(tmp_path / 'base', tied=False)}", "model.precision=bf16"]
    run = train(text_config(tmp_path / "runs", *TRAINED, *WHOLE_HEAD, *model)).run
    words = [f"ckpt={run}", "eval.episodes=4", "env.eval.total_num_envs=4", f"runner.output_dir={run.parent}"]
    cfg = load_config("eval", [*words, *QUIET[:2], "runner.experiment_name=eval"], base=run / "config.yaml")
    assert evaluate(cfg).overall.episodes == 4
    from embodyrl.play.scene import load_policy_with_env

    with pytest.raises(ConfigError, match="is a text task without steps"):
        load_policy_with_env(run)
