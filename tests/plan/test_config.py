"""Configs that start from a saved run, and overrides that depend on context."""

from pathlib import Path

import pytest

from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.saved import find_ckpt_config, save_config

REPLY = "algorithm.sampling_params.max_new_tokens"


def found(command: str, *words: str, base: Path | None = None) -> dict:
    return dict(load_config(command, words, base=base).leaves())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the config path of a run."""
    (tmp_path / "a_b" / "checkpoints").mkdir(parents=True)
    return tmp_path / "a_b" / "config.yaml"


@pytest.mark.parametrize("name", ["2026_11_24", "1e-4", "1.50", "007", "+5"])
def test_number_like_name_is_kept_as_a_string(name: str) -> None:
    assert found("train", f"runner.experiment_name={name}")["runner.experiment_name"] == name
    assert found("eval", f"ckpt={name}")["ckpt"] == name
    with_seed = found("train", "seed=1_0", "runner.experiment_name=${seed}")
    assert (with_seed["seed"], with_seed["runner.experiment_name"]) == (10, "10")


def test_interpolations_resolve_to_default_values() -> None:
    """Fails if `${seed}` is only resolved after a seed is set."""
    words = ["env=gym", "env.kwargs.a=[${seed},${env.reward_coef}]", "env.eval.max_episode_steps=${env.kwargs.b}"]
    values = found("train", *words, "env.kwargs.b=7", "runner.max_steps=${algorithm.group_size}")
    assert (values["env.kwargs"], values["env.eval.max_episode_steps"]) == ({"a": [0, 1.0], "b": 7}, 7)
    assert values["runner.max_steps"] == 8


def test_empty_mapping_override_replaces_values_from_files() -> None:
    assert found("train", "env=text/calculator")["data.kwargs"] == {"digits": 2}
    assert found("train", "env=text/calculator", "data.kwargs={}")["data.kwargs"] == {}
    assert found("train", "env=text/calculator", "data.kwargs={}", "data.kwargs.rows=9")["data.kwargs"] == {"rows": 9}
    assert found("train", "env.train={}") == found("train"), "a group of keys is no mapping of one's own"


def test_eval_null_removes_the_protocol_of_a_run(run: Path) -> None:
    save_config(load_config("train", ["eval=tabletop_axes"]), run)
    assert found("eval", base=run)["eval.protocol.name"] == "tabletop_axes"
    values = found("eval", "eval=null", base=run)
    assert (values["eval.protocol.name"], values["runner.val_suites"]) == (None, [])
    assert found("eval", "experiment=null", base=run)["eval.protocol.name"] == "tabletop_axes"
    with pytest.raises(ConfigError, match="a saved run accepts no group options"):
        load_saved_config(run, ["eval=null"])
    with pytest.raises(ConfigError, match=r"launcher=inline: .*, for example launcher\.name=inline\."):
        load_saved_config(run, ["launcher=inline"])


def test_overrides_and_later_protocols_take_precedence() -> None:
    words = ["env=libero_10", "eval=libero_standard", "eval.episodes_per_task=3", "env.eval.task_ids=[1]"]
    values, each = found("eval", *words), "eval.episodes_per_task"
    assert (values[each], values["env.eval.task_ids"], values["env.eval.state_ids"]) == (3, [1], None)
    values = found("eval", *words[:2], f"eval.protocol.settings=['{each}=4']")
    assert (values[each], values["env.eval.state_ids"]) == (4, [0, 9])


def test_reply_length_follows_the_evaluated_task(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    words = ["env=text/gsm8k", "model=causal_lm_tiny", f"data.path={tmp_path / 'rows.jsonl'}"]
    save_config(load_config("train", words), run)
    for command in ("train", "eval"):
        values = found(command, base=run)
        assert (values[REPLY], values["data.prompt_key"], values["reward.name"]) == (512, "question", "gsm8k")
        assert found(command, "env=text/math", base=run)[REPLY] == 1024
        assert found(command, "env=text/math", f"{REPLY}=9", base=run)[REPLY] == 9
    save_config(load_config("train", [*words, f"{REPLY}=77"]), run)
    assert found("train", base=run)[REPLY] == found("eval", base=run)[REPLY] == 77
    assert found("train", "algorithm=rloo", base=run)[REPLY] == 77


def test_training_from_a_run_keeps_its_algorithm(run: Path) -> None:
    """The run used grpo's groups of 8, which do not fit one environment."""
    save_config(load_config("train", ["experiment=cartpole", "actor.optim.lr=0.002"]), run)
    values = found("train", base=run)
    assert (values["algorithm.adv_type"], values["algorithm.update_epoch"], values["actor.optim.lr"]) == (
        "gae",
        20,
        0.002,
    )
    values = found("train", "algorithm=reinforce_pp", base=run)
    assert (values["algorithm.update_epoch"], values["env.id"]) == (1, "CartPole-v1")
    assert values["actor.optim.lr"] == 0.002
    values = found("train", "env=tabletop", "model=openvla_oft_tiny", base=run)
    assert (values["algorithm.adv_type"], values["env.env_type"], values["model.unnorm_key"]) == (
        "gae",
        "tabletop",
        None,
    )


def test_sweep_is_checked_with_the_config_of_its_ckpt(run: Path) -> None:
    """Fails if `-m` rejects a key of the run's own model."""
    from embodyrl.cli.sweep import sweep

    save_config(load_config("train", ["env=gym", "env.id=CartPole-v1", "model=mlp", "algorithm=ppo"]), run)
    assert find_ckpt_config([f"ckpt='{run.parent}'"]) == find_ckpt_config([f"ckpt={run.parent}"]) == run
    words = ["seed=0,1", f"ckpt={run.parent}", "algorithm=ppo", "model.hidden_sizes=[8]", "model.unnorm_key=x"]
    with pytest.raises(ConfigError) as caught:
        sweep("train", words, [])
    assert "hidden_sizes" not in str(caught.value)
    assert "model.unnorm_key" in str(caught.value)


def test_answer_pattern_must_be_a_regular_expression(tmp_path: Path) -> None:
    text = ["env=text/gsm8k", "model=causal_lm_tiny", f"data.path={tmp_path}/rows.jsonl"]
    with pytest.raises(ConfigError, match="must be a regular expression"):
        load_config("train", [*text, "data.answer_pattern='('"])


def test_data_function_and_data_files_can_be_combined(tmp_path: Path) -> None:
    from embodyrl.text.dataset import open_rows

    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "rows.jsonl").write_text('{"prompt": "1=", "answer": "x"}\n')
    words = ["env=text/length", "model=causal_lm_tiny", f"data.val_path={tmp_path}"]
    cfg = load_config("train", [*words, "data.kwargs={rows: 5}", "data.subset=main"])
    assert (len(open_rows(cfg.data, tokenizer=None)), cfg.data.subset) == (6, "main")
    cfg = load_config("train", ["env=text/calculator", "model=causal_lm_tiny", f"data.path={tmp_path}/main/rows.jsonl"])
    assert cfg.data.kwargs == {"digits": 2}, "not typed, so nobody's fault"
    assert len(open_rows(cfg.data.updated({"val_share": 0.0}), tokenizer=None)) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("env.train.total_num_envs=8 env.eval.total_num_envs=8 launcher.env_workers=8", ""),
        ("env.train.total_num_envs=8 env.eval.total_num_envs=8 launcher.env_workers=9", "some workers would idle"),
        ("algorithm.max_staleness=1", ""),
        ("algorithm.max_staleness=1 runner.deterministic=true", "depend on timing"),
        ("algorithm.max_staleness=1 actor.fsdp.cpu_offload=true", "which needs one actor rank"),
        ("algorithm.max_staleness=1 actor.fsdp.cpu_offload=true rollout.mode=disaggregated", ""),
        ("algorithm.max_staleness=1 algorithm.curriculum=0.5", "set algorithm.max_staleness=0"),
        ("algorithm=ppo critic.path=x actor.fsdp.size=2", "works with one actor rank"),
        ("algorithm=ppo critic.path=x runner.deterministic=true", "works with one actor rank"),
        ("actor.fsdp.size=2 model.compile=true", "works with one actor rank"),
        ("runner.resume_dir=a ckpt=b", "Use one of the two keys"),
        (
            "launcher.name=spread_launcher:SpreadLauncher cluster.num_nodes=2 cluster.min_nodes=3",
            "min_nodes=3 is above cluster.num_nodes=2",
        ),
    ],
)
def test_incompatible_data_keys_are_rejected(words: str, problem: str) -> None:
    if not problem:
        assert load_config("train", words.split())
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        load_config("train", words.split())
    assert len(caught.value.problems) == 1


def test_overrides_apply_on_top_of_a_saved_run(run: Path) -> None:
    words = ["experiment=cartpole", "runner.max_steps=7", "runner.experiment_name=first", "seed=3"]
    save_config(load_config("train", words), run)
    values = found("train", f"ckpt={run.parent}", "actor.optim.lr=0.5", base=run)
    assert (values["runner.max_steps"], values["seed"], values["env.id"]) == (7, 3, "CartPole-v1")
    assert (values["actor.optim.lr"], values["runner.experiment_name"]) == (0.5, None)
    values = found("eval", "env.eval.total_num_envs=3", base=run)
    assert (values["seed"], values["env.eval.total_num_envs"], values["env.eval.max_episode_steps"]) == (3, 3, 500)


@pytest.mark.parametrize("words", [("data.path=local",), ("data={path: local}",)])
def test_overridden_data_path_is_not_downloaded(words: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: fetched.append(repo))
    (tmp_path / "experiment").mkdir()
    (tmp_path / "local").mkdir()
    text = "# @package _global_\n# Rows\ndefaults:\n  - override /env: text/gsm8k\n  - override /model: causal_lm\n"
    (tmp_path / "experiment" / "hub_rows.yaml").write_text(text + "data:\n  path: openai/gsm8k\nmodel:\n  path: a\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    cfg = load_config("train", ["experiment=hub_rows", *words], config_dirs=[tmp_path])
    assert (cfg.data.path, fetched) == ("local", [])
