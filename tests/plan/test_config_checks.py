"""Keys without effect are accepted with one warning if the value is not the default."""

import subprocess
import sys

import pytest

from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import no_effect_warnings
from embodyrl.plan.command_sections import COMMANDS, get_command_sections
from embodyrl.plan.config import load_config

GYM = "env=gym env.id=CartPole-v1 model=mlp"
FLOW = "model=flow_small"
TEXT = "env=text/copy model=causal_lm_tiny"
OUT = "collect.out=a"


def warnings_of(caplog: pytest.LogCaptureFixture, command: str, words: str) -> list[str]:
    caplog.clear()
    load_config(command, words.split())
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", "rollout.num_workers=1"),
        ("train", "actor.fsdp.shard_size=1"),
        ("train", "actor.fsdp.size=1 actor.fsdp.reshard_after_forward=true"),
        ("train", "launcher=inline launcher.env_workers=auto"),
        ("train", "algorithm.kl_penalty_type=low_var_kl"),
        ("train", "algorithm=grpo actor.optim.value_lr=3e-3"),
        ("train", "algorithm=grpo algorithm.gae_lambda=1.0"),
        ("train", "algorithm=sac " + GYM.replace("CartPole-v1", "Pendulum-v1") + " algorithm.kl_beta=0"),
        ("eval", "env=tabletop algorithm.sampling_params.temperature=1.0"),
        ("eval", "video=none video_cfg.fps=20"),
        ("collect", f"{OUT} actor.optim.lr=1e-4"),
        ("sft", "data.path=a env.train.max_episode_steps=512"),
        ("train", f"{GYM} model.squashed=false"),
    ],
)
def test_override_with_the_default_gives_no_warning(caplog: pytest.LogCaptureFixture, command: str, words: str) -> None:
    assert warnings_of(caplog, command, words) == []


INERT = [
    # command, words, the key of the warning, words that give the key an effect
    ("train", "algorithm.kl_penalty_type=k1", "algorithm.kl_beta=0.1"),
    ("train", "algorithm.kl_in_reward=true", "algorithm.kl_beta=0.1"),
    ("train", "algorithm.kl_beta=0.1 algorithm.kl_target=0.1", "algorithm.kl_in_reward=true"),
    ("train", "algorithm.kl_horizon=5", "algorithm.kl_beta=1 algorithm.kl_in_reward=true algorithm.kl_target=0.1"),
    ("train", "algorithm.m2_threshold=1", "algorithm.old_logprob=recompute"),
    ("train", "algorithm.behave_weight_mode=truncate", "algorithm=decoupled"),
    ("train", "algorithm.filter_refills=1", "algorithm.filter_returns=[0,1]"),
    ("train", "algorithm=gdpo algorithm.reward_clip=3", "algorithm=grpo"),
    ("train", "algorithm=ppo algorithm.value_coef=0 algorithm.value_clip=0.3", "algorithm.value_coef=1"),
    ("train", "algorithm.gae_lambda=0.9", "algorithm=ppo"),
    ("train", "algorithm=dr_grpo algorithm.std_unbiased=false", "algorithm.normalize_advantages=true"),
    (
        "train",
        "algorithm=ppo algorithm.normalize_advantages=false algorithm.normalize_per_task=true",
        "algorithm.normalize_advantages=true",
    ),
    ("train", f"{GYM} model.noise_correlation=0.5", "model.num_action_chunks=4"),
    (
        "train",
        f"{GYM} model.num_action_chunks=4 model.squashed=true model.noise_correlation=0.5",
        "model.squashed=false",
    ),
    ("train", "model=openvla model.cuda_graphs=true", "model=openvla_oft"),
    ("train", "launcher=inline launcher.env_workers=1", "launcher=local"),
    ("train", "rollout.num_workers=2", "rollout.mode=disaggregated"),
    ("train", "rollout.vllm.max_model_len=64", "rollout.backend=vllm"),
    ("train", "cluster.num_nodes=2", None),
    ("train", "actor.minibatches=2 actor.global_batch_size=64", "actor.minibatches=null"),
    ("train", "algorithm=filtered_bc actor.global_batch_size=64 actor.minibatches=2", "actor.minibatches=null"),
    ("sft", "data.path=a actor.global_batch_size=64 actor.minibatches=2", None),
    ("dagger", "actor.global_batch_size=64 actor.minibatches=2", None),
    ("train", "actor.optim.decay_ratio=0.2", "actor.optim.schedule=wsd"),
    ("train", "runner.val_check_interval=-1 runner.val_suites=[colours]", "runner.val_check_interval=1"),
    ("train", "runner.on_existing=resume", "runner.experiment_name=a"),
    ("train", "faults.on_env_crash=fail faults.max_restarts_per_worker=2", "faults.on_env_crash=restart"),
    ("train", "collect.episodes=3", None),
    ("train", f"{FLOW} model.noise_bound=3", "model.likelihood=dsrl"),
    ("train", f"{FLOW} model.fpo_pairs=3", "model.likelihood=fpo"),
    ("train", "model.action_std=0.2", "model.action_head=l1"),
    ("train", "critic.path=a", "algorithm=ppo"),
    ("train", f"{TEXT} env.train.max_episode_steps=4", None),
    ("train", f"{TEXT} model.num_action_chunks=3", None),
    ("train", "env=text/gym env.train.max_episode_steps=4", None),
    ("train", "env=text/gym env.train.ignore_terminations=true", None),
    ("train", "env=text/openenv algorithm.sampling_params.max_new_tokens=4 model.num_action_chunks=3", None),
    ("train", "reward.mode=add", "reward.path=embodyrl.envs:x"),
    ("eval", "algorithm.sampling_params.temperature=2", "eval.sampling_params.do_sample=true"),
    ("eval", "eval.samples=3", "eval.sampling_params.do_sample=true"),
    ("train", "algorithm=grpo actor.optim.value_lr=0.1", "algorithm=ppo"),
    ("train", "algorithm=grpo actor.optim.value_clip_grad=0.1", "algorithm=ppo"),
    ("train", "model.lora.r=4", "model.is_lora=true"),
    ("train", "env=text/reverse model=causal_lm_tiny model.lora.lora_dropout=0.1", "model.is_lora=true"),
    ("train", "env=metaworld env.pixels=false env.init_params.camera_names=[corner]", "env.pixels=true"),
    ("train", "env=maniskill env.obs_mode=state env.init_params.camera_names=[hand_camera]", "env.obs_mode=rgb"),
    ("eval", "video=none video_cfg.fps=3", "video=all"),
    ("eval", "env.train.task_ids=[0]", None),
    ("eval", "eval.episodes=3 eval.episodes_per_task=2", "eval.episodes=null"),
    ("eval", "actor.optim.lr=1", None),
    ("collect", f"{OUT} actor.optim.lr=1", None),
    ("collect", f"{OUT} algorithm.sampling_params.top_p=0.5", "eval.sampling_params.do_sample=true"),
    ("train", "env=tabletop model=pi05_tiny algorithm=ppo model.imitated_time=9", "algorithm=filtered_bc"),
    ("train", "env=tabletop model=pi05_tiny algorithm=grpo model.value_from=expert", "algorithm=ppo"),
    ("eval", "env=tabletop model=pi05_tiny model.imitated_pairs=9", None),
    ("sft", "data.path=a model=pi05_tiny model.value_from=expert", None),
    ("sft", "data.path=a algorithm.group_size=4", None),
    ("sft", "data.path=a env.train.max_episode_steps=4", None),
    ("sft", "data.path=a objective.beta=1", "objective.name=dpo"),
    ("sft", "data.path=a data.val_path=x data.val_share=0.2", "data.val_path=null"),
    ("dagger", "collect.filter=all", None),
    ("check-env", "runner.max_steps=3", None),
]


@pytest.mark.parametrize(("command", "words", "cure"), INERT, ids=[f"{command} {words}" for command, words, _ in INERT])
def test_a_key_without_effect_gives_one_warning(
    caplog: pytest.LogCaptureFixture, command: str, words: str, cure: str | None
) -> None:
    key = words.split()[-1].partition("=")[0]
    (line,) = warnings_of(caplog, command, words)
    assert line.startswith(f"warning: {key} has no effect")
    assert "\n" not in line
    if cure is not None:
        assert warnings_of(caplog, command, f"{words} {cure}") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algorithm=grpo algorithm.gae_lambda=2", "must be a number at least 0 and at most 1"),
        ("launcher=inline launcher.env_workers=many", "must be auto or an integer"),
        ("rollout.num_workers=0", "must be an integer at least 1"),
        ("collect.episodes=none", "must be an integer"),
        ("algorithm.gae_lamda=0.9", "unknown key"),
        ("env=tabletop env.id=CartPole-v1", "env_type 'tabletop'"),
        ("model=mlp env=gym env.id=CartPole-v1 model.likelihood=dsrl", "model_type 'mlp'"),
    ],
)
def test_wrong_values_and_unknown_keys_are_errors(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("train", words.split())


def test_values_from_files_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, "train", "experiment=tabletop_dsrl") == []
    assert warnings_of(caplog, "eval", "experiment=cartpole video=none") == []


def test_text_keys_give_one_warning_with_a_robot_policy(caplog: pytest.LogCaptureFixture) -> None:
    cfg = load_config("train", ["experiment=cartpole", "algorithm.sampling_params.top_k=5"])
    build_run_plan(cfg, training=True)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("warning: algorithm.sampling_params.top_k has no effect")


PENDULUM = "env=gym env.id=Pendulum-v1 model=mlp algorithm=sac model.squashed=true"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("experiment=tabletop_dsrl algorithm.image_shift=2", "freezes the model, whose features are stored"),
        ("experiment=tabletop_residual algorithm.image_shift=0", "freezes the model, whose features are stored"),
        (f"{PENDULUM} algorithm.image_shift=2", "reads no images"),
        (f"{PENDULUM} actor.micro_batch_size=4", "takes actor.global_batch_size samples at once"),
        ("env=tabletop model=cnn algorithm=sac model.squashed=true algorithm.image_shift=2", ""),
        ("env=tabletop algorithm=grpo env.train.max_steps_per_rollout_epoch=64", "counts episodes, not steps"),
        ("env=tabletop algorithm=ppo env.train.max_steps_per_rollout_epoch=64", ""),
    ],
)
def test_keys_unused_by_the_components_give_one_warning(
    caplog: pytest.LogCaptureFixture, words: str, reason: str
) -> None:
    build_run_plan(load_config("train", words.split()), training=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(reason)
    for line in lines:
        assert line.startswith(f"warning: {words.split()[-1].partition('=')[0]} has no effect: ")
        assert reason in line


def test_keys_by_condition_name_existing_keys() -> None:
    for command in COMMANDS:
        cfg = load_config(command, {"collect": [OUT], "sft": ["data.path=a"]}.get(command, []))
        keys = cfg.schema.keys.keys() | cfg.schema.branches | {"data.val_split"}  # of rows of text
        assert {
            name for names in get_command_sections(command).keys_by_condition.values() for name in names.split()
        } <= keys
        list(no_effect_warnings(cfg, cfg.schema.keys, get_command_sections(command).keys_by_condition))


@pytest.mark.integration
def test_sweep_over_algorithms_accepts_keys_of_each_algorithm() -> None:
    words = [
        "algorithm=grpo,ppo",
        "actor.optim.value_lr=1e-4",
        "algorithm.gae_lambda=0.9",
        "env.train.total_num_envs=3",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli.main", "train", "-m", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert all("total_num_envs=3" in line for line in done.stderr.splitlines() if "error" in line)
