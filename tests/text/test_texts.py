"""Text tasks end to end: one-step episodes, critics, references and config errors."""

import json
from pathlib import Path

import pytest
import torch
from text_runs import SMALL, text_config
from toy_runs import comparable, rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from embodyrl.cli.main import main
from embodyrl.commands.sft import sft
from embodyrl.commands.train import train
from embodyrl.config.paths import resolve_asset
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.initial_states import select_reset_ids
from embodyrl.plan.saved import save_config


def test_text_run_plan_has_one_chunk_per_episode(tmp_path: Path):
    run_plan = build_run_plan(text_config(tmp_path, task="arithmetic"), training=True)
    assert run_plan.env.reward.components == ("exact", "overlap", "errors")
    assert (run_plan.policy.num_action_chunks, run_plan.policy.tokens_per_chunk) == (4, 4)
    splits = run_plan.cfg.env.train, run_plan.cfg.env.eval
    assert [select_reset_ids(run_plan.env, split) for split in splits] == [[*range(270)], [*range(270, 300)]]
    assert [split.max_episode_steps for split in splits] == [4, 4]
    assert run_plan.capacity == 8 + 2 * 8


@pytest.mark.integration
def test_replies_at_token_limit_count_as_truncated(tmp_path: Path):
    words = ("launcher=inline", "runner.max_steps=1", "algorithm.sampling_params.max_new_tokens=1")
    taken = {}
    for way in ("train", "mask"):
        choice = (f"algorithm.truncated_episodes={way}", f"runner.experiment_name={way}")
        (row,) = rows(train(text_config(tmp_path, *words, *choice)).run)
        taken[way] = row["actor/optimizer_steps"]
        if way == "train":
            assert row["train/cut_off"] > 0.5
            assert row["train/episode_len_min"] == row["train/episode_len_max"] == row["train/episode_len"] == 1
            assert row["actor/prompt_len"] == row["actor/prompt_len_max"] == len("cab=") + 1  # with the first token
            assert row["actor/tokens_per_s"] == pytest.approx(8 * 6 / row["time/update"])
            assert 0.05 < row["actor/memory_gib"] < 100
    # A random model seldom begins with the end.
    assert taken == {"train": 1, "mask": 0}


@pytest.mark.integration
def test_text_grpo_trains_and_resumes_identically(tmp_path: Path):
    """Also with a curriculum over rows, and with a moving reference."""
    words = ("runner.deterministic=true", "algorithm.curriculum=0.5", "data.kwargs={rows: 40}")
    words += ("algorithm.kl_beta=0.01", "algorithm.reference_interval=1", "runner.save_interval=1")
    whole = train(text_config(tmp_path, "runner.experiment_name=whole", *words)).run
    first, second = comparable(whole)
    assert first["train/return"] > 0
    assert first["actor/logprob_gap"] < 1e-5
    assert first["train/reward_errors"] == 0
    assert 0 < first["train/reward_overlap"] < 1
    assert second["actor/grad_norm"] > 0
    assert second["actor/ref_kl"] == pytest.approx(0, abs=1e-7)
    half = text_config(tmp_path, "runner.experiment_name=half", *words)
    went = train(half, on_step=lambda step, _: step == 1).run
    saved = json.loads((went / "checkpoints" / "step_000001" / "algorithm.json").read_text())["seen"]
    assert sum(played for _, played in saved.values()) == 8
    assert comparable(train(half, resume=went).run) == [first, second]


def test_vllm_engine_arguments_are_config_keys_with_types(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"rollout.vllm.max_num_seqs"):
        load_config(
            "train", ["env=text/copy", "model=causal_lm_tiny", "rollout.backend=vllm", "rollout.vllm.max_num_seqs=0"]
        )
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: must be 1; more needs rollout.backend=server"):
        load_config("train", ["env=text/copy", "model=causal_lm_tiny", "rollout.vllm.tensor_parallel_size=2"])
    words = ("rollout.vllm.max_model_len=64", "rollout.vllm.enable_prefix_caching=false")
    cfg = load_config("train", ["env=text/copy", "model=causal_lm_tiny", "rollout.backend=vllm", *words])
    assert cfg.rollout.vllm.arguments == {"max_model_len": 64, "enable_prefix_caching": False}


def test_vllm_sleeps_only_if_it_shares_the_gpu_with_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    words = ("rollout.backend=vllm", "rollout.vllm.enable_sleep_mode=true")
    with pytest.raises(ConfigError, match=r"enable_sleep_mode=true: sleeping frees GPU memory"):
        build_run_plan(text_config(tmp_path, *words), training=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    late = ("algorithm.max_staleness=1", "algorithm=decoupled")
    with pytest.raises(ConfigError, match=r"max_staleness=1: vLLM generates during updates"):
        build_run_plan(text_config(tmp_path, *words, *late), training=True)


@pytest.mark.integration
def test_images_stay_with_their_text_rows(tmp_path: Path):
    words = ("model=vision_lm_tiny", "runner.max_steps=1", "data.kwargs={rows: 40}")
    cfg = text_config(tmp_path, *words, task="colour")
    run_plan = build_run_plan(cfg, training=True)
    assert (run_plan.env.cameras.names, run_plan.env.cameras.size) == (("image_0",), (16, 16))
    (row,) = rows(train(cfg).run)
    assert row["actor/logprob_gap"] < 1e-5
    assert row["actor/grad_norm"] > 0
    with pytest.raises(ConfigError, match="contain images, but model 'causal_lm_tiny' reads none"):
        build_run_plan(text_config(tmp_path, task="colour"), training=True)
    with pytest.raises(ConfigError, match=r"only rollout\.backend=hf supports images"):
        build_run_plan(text_config(tmp_path, *words, "rollout.backend=vllm", task="colour"), training=True)


@pytest.mark.integration
def test_critic_and_reference_are_evaluated_on_every_token(tmp_path: Path):
    ppo = ("algorithm=ppo", "algorithm.group_size=1", "algorithm.update_epoch=1", "runner.max_steps=1")
    for level in ("action_level", "chunk_level"):
        run = train(
            text_config(tmp_path, *ppo, f"algorithm.reward_type={level}", f"runner.experiment_name={level}")
        ).run
        (row,) = rows(run)
        assert row["actor/value_loss"] > 0
        assert row["train/episodes"] == 8
    (row,) = rows(train(text_config(tmp_path, "algorithm.kl_beta=0.1", "runner.max_steps=1")).run)
    assert row["actor/ref_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.integration
def test_token_budget_does_not_change_the_gradient(tmp_path: Path):
    words = ("runner.deterministic=true", "runner.max_steps=1", "env.train.total_num_envs=16")
    found = []
    for name, split in (("whole", "actor.micro_batch_size=8"), ("parts", "actor.max_tokens_per_mbs=24")):
        cfg = text_config(tmp_path, *words, split, f"runner.experiment_name={name}", task="length")
        found.append(rows(train(cfg).run)[0])
    for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-4, abs=1e-6), key


@pytest.mark.integration
def test_text_remax_and_gdpo_runs_log_their_metrics(tmp_path: Path):
    words = ("algorithm=remax", "algorithm.group_size=2", "runner.deterministic=true", "runner.max_steps=1")
    cfg = text_config(tmp_path, *words, "runner.experiment_name=remax")
    (row,) = rows(train(cfg).run)
    assert 0 <= row["train/greedy_return"] < 1
    assert row["train/episodes"] == 8
    assert row["env/steps"] > 8 * row["train/episode_len"], "the greedy episodes are work, too"
    assert row["train/advantage_mean"] == pytest.approx(row["train/return"] - row["train/greedy_return"], abs=0.3)
    assert row["actor/grad_norm"] > 0
    (row,) = rows(train(text_config(tmp_path, "algorithm=gdpo", "runner.max_steps=1")).run)
    assert row["train/advantage_abs_max"] > 0.5
    assert row["actor/grad_norm"] > 0


@pytest.mark.integration
def test_chat_model_trains_on_a_json_file(tmp_path: Path):
    """The command of the README: a model folder, the columns of GSM8K, the reward of the preset."""
    own = resolve_asset("assets/causal_lm_tiny")
    tokenizer = AutoTokenizer.from_pretrained(own)
    said = "{% for m in messages %}|{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = "{{ bos_token }}" + said + "{% if add_generation_prompt %}={% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(own)).save_pretrained(tmp_path / "model")
    sums = [{"question": f"{a}+{b}", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a in range(5) for b in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    words = ["env=text/gsm8k", f"data.path={tmp_path}/sums.jsonl", "model=causal_lm", f"model.path={tmp_path}/model"]
    words += ["data.prompt_template='{prompt}'", "algorithm.sampling_params.max_new_tokens=6", *SMALL]
    words += [f"runner.output_dir={tmp_path}/runs", "runner.experiment_name=run", "runner.logger.backends=[jsonl]"]
    words += ["runner.val_check_interval=2", "launcher=local", "algorithm.entropy_bonus=0.01"]
    assert main(["train", *words]) == 0
    run = tmp_path / "runs" / "run"
    first, *_, last = rows(run)
    assert first["step"] == 0
    assert last["step"] == 2
    assert last["train/reward_errors"] == 0
    assert last["actor/logprob_gap"] < 0.05
    assert last["actor/grad_norm"] > 0
    policy = AutoTokenizer.from_pretrained(next(run.glob("checkpoints/step_*/policy")))
    assert policy.chat_template == tokenizer.chat_template
    seen = [json.loads(line) for line in next(run.glob("eval/step_*/episodes.jsonl")).read_text().splitlines()]
    assert len(seen) == 4


@pytest.mark.integration
def test_failing_rewards_are_counted_and_reported_once(tmp_path: Path):
    path = ("reward.name=null", "reward.weights={}", "reward.path=plain_rewards:moody")
    run = train(text_config(tmp_path, *path)).run
    assert [0 < row["train/reward_errors"] < 1 for row in rows(run)] == [True, True]
    events = (run / "logs" / "events.log").read_text()
    assert events.count("have an unknown reward, which counts as 0: RuntimeError: no reward for this") == 1


@pytest.mark.integration
@pytest.mark.parametrize("path", ["plain_rewards:broken", "http://127.0.0.1:9/score"])
def test_run_without_any_reward_ends_with_an_error(tmp_path: Path, path: str):
    reward = ("reward.name=null", "reward.weights={}", f"reward.path={path}")
    with pytest.raises(EmbodyError, match=r"None of 8 episodes has a reward: .*(no reward today|refused)"):
        train(text_config(tmp_path, *reward))
    with pytest.raises(EmbodyError, match=r"None of 4 episodes has a reward: .*(no reward today|refused)"):
        train(text_config(tmp_path, *reward, "runner.experiment_name=eval", "runner.val_check_interval=1"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=text/gsm8k", "model=causal_lm_tiny"], "data.path is not set"),
        (["env=text/copy", "model=causal_lm_tiny", "reward.name=exakt"], "Did you mean 'exact'"),
        (["env=text/copy", "model=causal_lm"], "model.path is not set"),
        (["env=text/copy", "model=causal_lm_tiny", "data.image_aug=false"], "data.image_aug=false"),
        (["env=tabletop", "reward.name=exact"], "reward.name=exact: env_type 'tabletop' does not read reward.name"),
        (["env=tabletop", "data.prompt_key=q"], "data.prompt_key=q"),
    ],
)
def test_invalid_text_settings_are_rejected_before_the_start(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        check_components(load_config("train", overrides))


def test_mismatched_text_components_are_rejected(tmp_path: Path):
    with pytest.raises(ConfigError, match="takes text actions"):
        build_run_plan(load_config("train", ["env=text/copy", "model=mlp"]), training=True)
    with pytest.raises(ConfigError, match="for text policies only; model 'mlp' outputs actions"):
        build_run_plan(load_config("train", ["experiment=cartpole", "rollout.backend=vllm"]), training=True)


def test_train_command_names_a_malformed_row(tmp_path: Path):
    file = tmp_path / "sums.jsonl"
    good = {"question": "1+1?", "answer": "1+1=2\n#### 2"}
    file.write_text("\n".join(json.dumps(r) for r in [good, good, {"question": "2+2?", "answer": "4"}]))
    cfg = load_config("train", ["env=text/gsm8k", "model=causal_lm_tiny", f"data.path={file}"])
    check_components(cfg)
    with pytest.raises(ConfigError, match=r"sums\.jsonl, row 3: column 'answer' does not match"):
        build_run_plan(cfg, training=True)


@pytest.mark.integration
def test_rl_starts_from_a_text_sft_checkpoint(tmp_path: Path):
    words = ["data.path=embodyrl.text.tasks:copy", "data.kwargs={rows: 200}", "model=causal_lm_tiny"]
    words += ["runner.max_steps=40", "runner.val_check_interval=40", "actor.micro_batch_size=32", "actor.optim.lr=3e-3"]
    words += [
        "actor.global_batch_size=64",
        "launcher=inline",
        f"runner.output_dir={tmp_path}",
        "runner.logger.backends=[jsonl]",
    ]
    cfg = load_config("sft", words)
    check_components(cfg)
    run = sft(cfg).run
    measured = rows(run)
    assert measured[-1]["eval/loss"] < 0.5 * measured[0]["eval/loss"]
    tuned = rows(train(text_config(tmp_path, f"ckpt={run}", "runner.max_steps=1")).run)[0]["train/return"]
    fresh = rows(train(text_config(tmp_path, "runner.experiment_name=fresh", "runner.max_steps=1")).run)[0][
        "train/return"
    ]
    assert tuned > fresh + 0.1


def test_key_of_another_dataset_type_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["model=causal_lm_tiny", "data.path=embodyrl.text.tasks:copy", "data.image_aug=false"]
    check_components(load_config("sft", words))
    check_components(load_config("sft", [f"data.path={tmp_path}", "data.prompt_key=q"]))
    first, second = (record.getMessage() for record in caplog.records)
    assert "data.image_aug has no effect" in first
    assert "data.prompt_key has no effect" in second


def test_eval_of_a_text_run_uses_its_own_task(tmp_path: Path):
    cfg = text_config(tmp_path, "data.kwargs={size: 2}")
    save_config(cfg, tmp_path / "config.yaml")
    again = load_config("eval", [f"ckpt={tmp_path}"], base=tmp_path / "config.yaml")
    assert (again.data, again.reward) == (cfg.data, cfg.reward)
    other = load_config("eval", ["env=tabletop", f"ckpt={tmp_path}"], base=tmp_path / "config.yaml")
    assert not other.reads_rows
