"""The chosen components judge their part of the config."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_runs import toy_config

from embodyrl.errors import ConfigError
from embodyrl.plan.blueprint import draw_blueprint
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.roots import TrainConfig


def problems_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_components(load_config("train", [*overrides]))
    return caught.value.problems


def test_a_key_of_another_command_is_not_laid_to_the_part() -> None:
    with pytest.raises(ConfigError, match=r"^env\.train\.task_ids=\[0\]: `embodyrl eval` does not read env.train"):
        load_config("eval", ["env.train.task_ids=[0]"])


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["env.env_type=libreo"], ["Unknown env 'libreo'", "Did you mean 'libero'?"]),
        (["model.model_type=openvlaoft"], ["Unknown model 'openvlaoft'", "openvla_oft"]),
        (["algorithm.adv_type=gpro"], ["gpro", "Did you mean 'grpo'?"]),
        (["algorithm.loss_type=ppo"], ["'ppo'", "ppo_clip"]),
        (["env.task_suite_name=libero_11"], ["libero_11"]),
        (["env.id=CartPole-v1"], ["env_type 'tabletop' (unlike gym, maniskill, metaworld, text_game) does not read"]),
        (["env.kwargs.speed=2"], ["env.kwargs.speed=2", "does not read env.kwargs.speed"]),
        (["algorithm.gae_lambda=0.9"], ["adv_type 'grpo' with loss_type 'ppo_clip'", "does not read"]),
        (["algorithm.group_size=1"], ["group_size"]),
        (["algorithm=ppo", "algorithm.filter_rewards=[0.1,0.9]"], ["filter_rewards", "'gae'"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_component_problem_is_reported(overrides: list[str], fragments: list[str]) -> None:
    lines = [p for p in problems_of(*overrides) if all(f in p for f in fragments)]
    assert len(lines) == 1, problems_of(*overrides)


GYM = ("env=gym", "env.id=CartPole-v1", "model=mlp")
FLOW = ("model=flow_small", "model.stochastic_steps=one")
TEXT = ("env=text/copy", "model=causal_lm_tiny")
ROWS = ("model=causal_lm_tiny", "data.path=embodyrl.datasets.tasks:copy")
SERVED = ("env=tabletop", "model=openvla_oft_tiny")
ONCE = ("runner.val_check_interval=1",)
SAMPLED = "eval.sampling_params.do_sample=true"
FILMS = ("video_cfg.fps=3", "video_cfg.info_on_video=false", "video_cfg.base_dir=a", "faults.on_video_error=stop")
VALIDATED = ("runner.val_suites=[colours]", "checkpoint.keep_best=true")
TRAINED = (
    *("actor.optim.lr=1e-3", "algorithm.group_size=4", "algorithm.clip_ratio_low=0.1", "env.train.task_ids=[0]"),
    *("runner.max_steps=3", "runner.save_interval=3", "checkpoint.keep=2", "rollout.mode=disaggregated"),
    "faults.on_nonfinite=skip",
)


@pytest.mark.parametrize(
    ("command", "key", "words", "read_with"),
    [
        (
            *("sft", "data.val_split=test"),
            *(["model=causal_lm_tiny", "data.path=a.jsonl", "runner.val_check_interval=-1"], ["data.path=a.jsonl"]),
        ),
        ("train", "actor.optim.value_lr=1e-3", ["algorithm=grpo"], ["algorithm=ppo"]),
        ("train", "actor.optim.value_clip_grad=1.0", ["algorithm=grpo"], ["algorithm=ppo"]),
        ("train", "env.train.max_steps_per_rollout_epoch=16", ["algorithm=grpo"], ["algorithm=ppo"]),
        ("train", "algorithm.std_unbiased=false", ["algorithm.normalize_advantages=false"], ["algorithm=grpo"]),
        (
            *("train", "algorithm.normalize_per_task=true"),
            *(["algorithm=ppo", "algorithm.normalize_advantages=false"], ["algorithm=ppo"]),
        ),
        ("train", "algorithm.critic_warmup=3", ["algorithm=ppo", "algorithm.value_coef=0"], ["algorithm=ppo"]),
        ("train", "algorithm.value_clip=0.3", ["algorithm=ppo", "algorithm.value_coef=0"], ["algorithm=ppo"]),
        ("train", "actor.gradient_checkpointing=true", [*GYM], ["model=openvla_oft_tiny"]),
        ("train", "actor.gradient_checkpointing=true", ["model=flow_small"], ["model=openvla_oft_tiny"]),
        ("train", "model.ignore_last=true", [*FLOW, "model.likelihood=flow_cps"], [*FLOW]),
        ("train", "model.imitated_pairs=3", ["model=flow_small"], None),
        ("eval", "model.imitated_time=3", ["model=flow_small"], None),
        ("dagger", "actor.max_tokens_per_mbs=64", [], None),
        ("sft", "data.image_aug=true", ["data.path=a", "objective.name=dpo"], ["data.path=a"]),
        ("eval", "algorithm.sampling_params.temperature=2", [], ["eval.sampling_params.do_sample=true"]),
        ("collect", "algorithm.sampling_params.top_p=0.5", [], ["eval.sampling_params.do_sample=true"]),
        ("dagger", "algorithm.sampling_params.temperature=2", [], ["eval.sampling_params.do_sample=true"]),
        ("eval", "algorithm.sampling_params.temperature=2", [SAMPLED, "eval.sampling_params.temperature=2"], [SAMPLED]),
        ("eval", "env.reward_coef=2", [], None),
        ("eval", "env.reward_coef=2", [*TEXT], None),
        ("serve", "env.reward_coef=2", [*SERVED], None),
        *(("eval", key, ["video=none"], ["video=failures"]) for key in FILMS),
        *(("train", key, [*ONCE, "video=none"], [*ONCE, "video=all"]) for key in FILMS),
        *(("collect", key, [], None) for key in ("video_cfg.base_dir=a", "faults.on_video_error=stop")),
        *(("train", key, ["runner.val_check_interval=-1"], [*ONCE]) for key in VALIDATED),
        ("train", "video=all", ["runner.val_check_interval=-1"], [*ONCE]),
        ("sft", "data.val_path=b", ["data.path=a", "runner.val_check_interval=-1"], ["data.path=a"]),
        *(("train", key, ["runner.only_eval=true"], [*ONCE]) for key in TRAINED),
        ("train", "eval.episodes_per_task=2", [*ONCE, "eval.episodes=4"], [*ONCE]),
        ("train", "eval.protocol.settled=true", [*ONCE], None),
        ("train", "runner.on_existing=resume", [], ["runner.experiment_name=a"]),
        ("dagger", "runner.on_existing=rename", ["runner.experiment_name=a"], None),
        ("train", "runner.logger.offline=true", [], ["runner.logger.backends=[wandb]"]),
        ("eval", "runner.logger.backends=[wandb]", [], None),
        ("train", "faults.max_restarts_per_worker=2", ["faults.on_env_crash=fail"], []),
        ("train", "actor.global_batch_size=64", ["actor.minibatches=2"], []),
        ("sft", "data.split=train", [*ROWS], ["data.path=rows.jsonl"]),
    ],
)
def test_a_key_that_nothing_reads_is_refused(
    command: str, key: str, words: list[str], read_with: list[str] | None
) -> None:
    """And is taken where something does."""
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} has no effect: ") as caught:
        load_config(command, [*words, key])
    assert [line.partition(" ")[0] for line in caught.value.problems] == [name]
    if read_with is not None:
        load_config(command, [*read_with, key])


def test_a_training_without_validations_says_how_its_run_will_be_evaluated() -> None:
    words = ("eval.episodes=4", "env.eval.max_episode_steps=9", "env.eval.task_ids=[0]", "video=none")
    cfg = load_config("train", ["runner.val_check_interval=-1", *words])
    assert (cfg.eval.episodes, cfg.env.eval.max_episode_steps, cfg.env.eval.task_ids) == (4, 9, [0])


def draw_checked(cfg: TrainConfig) -> None:
    check_components(cfg)
    draw_blueprint(cfg, training=True)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor.fsdp.shard_size=1", ["actor.fsdp.size=1"]),
        ("actor.fsdp.reshard_after_forward=false", ["actor.fsdp.size=1"]),
        ("actor.fsdp.gradient_sync=step", ["actor.fsdp.size=1"]),
        ("video=all", [*TEXT, *ONCE]),
        ("model.num_action_chunks=3", [*TEXT]),
        ("env.train.max_episode_steps=4", [*TEXT]),
        ("env.train.ignore_terminations=true", [*TEXT]),
        ("data.prompt_key=zzz", [*TEXT]),
    ],
)
def test_what_the_parts_together_leave_without_effect_is_refused(key: str, words: list[str]) -> None:
    cfg = load_config("train", [*words, key])
    with pytest.raises(ConfigError, match=f"{key.partition('=')[0]} has no effect: ") as caught:
        draw_checked(cfg)
    assert len(caught.value.problems) == 1


def test_what_shards_weights_is_read_with_several_ranks_and_with_weights_in_host_memory() -> None:
    key = "actor.fsdp.reshard_after_forward=false"
    for words in (["actor.fsdp.size=2"], ["actor.fsdp.size=1", "actor.fsdp.cpu_offload=true"]):
        check_components(load_config("train", [*words, key]))


def test_validations_that_nobody_asked_for_refuse_nothing(tmp_path: Path) -> None:
    """Fails where states of a preset's validations, which this environment lacks, are looked up all the same."""
    cfg = toy_config(tmp_path, "~env.eval.state_ids")
    assert cfg.env.eval.state_ids == [0, 9]
    draw_blueprint(cfg, training=True)


def test_episodes_of_each_task_win_over_the_total_of_a_preset() -> None:
    assert load_config("train", [*TEXT]).eval.episodes is not None
    cfg = load_config("train", [*TEXT, "eval.episodes_per_task=3"])
    assert (cfg.eval.episodes, cfg.eval.episodes_per_task) == (None, 3)


def test_problems_of_all_components_come_together() -> None:
    text = "\n".join(problems_of("env.env_type=libreo", "model.model_type=openvlaoft", "algorithm.adv_type=gpro"))
    for fragment in ("libreo", "openvla", "gpro"):
        assert fragment in text


def test_env_type_may_be_code_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_kitchen.py").write_text(
        "from embodyrl.envs.settings import EnvSettings\n"
        "class Settings(EnvSettings):\n"
        "    kwargs: dict = {}\n"
        "class Factory:\n"
        "    settings = Settings\n"
        "    spec = make = None\n"
        "    def validate(self, cfg):\n"
        "        return [] if cfg.kwargs.get('speed') == 2 else ['env.kwargs.speed: must be 2.']\n"
        "FACTORY = Factory()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = [
        "env=libero_10",
        "env.env_type=my_kitchen:FACTORY",
    ]
    assert problems_of(*mine) == ["env.kwargs.speed: must be 2."]
    check_components(load_config("train", [*mine, "env.kwargs.speed=2"]))
    left = problems_of(*mine, "env.reward_coef=3", "model.model_type=nope")
    assert len(left) == 2
    assert any("nope" in p for p in left)
    assert "env.reward_coef=3: env_type 'my_kitchen:FACTORY' does not read env.reward_coef; leave it out." in left
