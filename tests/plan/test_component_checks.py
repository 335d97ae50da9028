"""The chosen components judge their part of the config."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.errors import ConfigError
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config


def problems_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_components(load_config("train", [*overrides]))
    return caught.value.problems


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["env.env_type=libreo"], ["Unknown env 'libreo'", "Did you mean 'libero'?"]),
        (["model.model_type=openvlaoft"], ["Unknown model 'openvlaoft'", "openvla_oft"]),
        (["algorithm.adv_type=gpro"], ["gpro", "Did you mean 'grpo'?"]),
        (["algorithm.loss_type=ppo"], ["'ppo'", "ppo_clip"]),
        (["env.task_suite_name=libero_11"], ["libero_11"]),
        (["env.id=CartPole-v1"], ["env.id=CartPole-v1: env_type 'tabletop' does not read env.id; leave it out."]),
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


@pytest.mark.parametrize(
    ("command", "key", "words", "read_with"),
    [
        ("train", "actor.optim.value_lr=1e-3", ["algorithm=grpo"], ["algorithm=ppo"]),
        ("train", "actor.optim.value_clip_grad=1.0", ["algorithm=grpo"], ["algorithm=ppo"]),
        ("train", "env.train.max_steps_per_rollout_epoch=16", ["algorithm=grpo"], ["algorithm=ppo"]),
        ("train", "algorithm.std_unbiased=false", ["algorithm.normalize_advantages=false"], ["algorithm=grpo"]),
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
