"""Checks of the config by its components."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_runs import toy_config

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.build import build_run_plan
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
        (["env.id=CartPole-v1"], ["env_type 'tabletop' does not read env.id"]),
        (["env.kwargs.speed=2"], ["env.kwargs.speed=2", "does not read env.kwargs.speed"]),
        (["algorithm.group_size=1"], ["group_size"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_problem_of_a_component_is_reported(overrides: list[str], fragments: list[str]) -> None:
    lines = [p for p in problems_of(*overrides) if all(f in p for f in fragments)]
    assert len(lines) == 1, problems_of(*overrides)


TEXT = ("env=text/copy", "model=causal_lm_tiny")


def test_dagger_rejects_text_tasks(tmp_path: Path) -> None:
    words = ("env=text/arithmetic", "dagger.expert=human", f"collect.out={tmp_path}", f"data.path={tmp_path}")
    with pytest.raises(ConfigError, match="env_type=text: `embodyrl dagger` corrects robot policies"):
        check_components(load_config("dagger", words))


def test_evaluation_settings_are_kept_if_validation_is_disabled() -> None:
    words = ("eval.episodes=4", "env.eval.max_episode_steps=9", "env.eval.task_ids=[0]", "video=none")
    cfg = load_config("train", ["runner.val_check_interval=-1", *words])
    assert (cfg.eval.episodes, cfg.env.eval.max_episode_steps, cfg.env.eval.task_ids) == (4, 9, [0])


def test_disabled_validation_is_not_checked(tmp_path: Path) -> None:
    """Fails if initial states of a preset's validation, which this environment lacks, are looked up."""
    cfg = toy_config(tmp_path, "~env.eval.state_ids")
    assert cfg.env.eval.state_ids == [90000, 94999]
    build_run_plan(cfg, training=True)


def test_episodes_per_task_replaces_the_total_of_a_preset() -> None:
    assert load_config("train", [*TEXT]).eval.episodes is not None
    cfg = load_config("train", [*TEXT, "eval.episodes_per_task=3"])
    assert (cfg.eval.episodes, cfg.eval.episodes_per_task) == (None, 3)


def test_problems_of_all_components_are_reported_together() -> None:
    text = "\n".join(problems_of("env.env_type=libreo", "model.model_type=openvlaoft", "algorithm.adv_type=gpro"))
    for fragment in ("libreo", "openvla", "gpro"):
        assert fragment in text


def test_env_type_accepts_user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "env.reward_coef=3: env_type 'my_kitchen:FACTORY' does not read env.reward_coef; remove the key." in left


def test_missing_reference_policy_is_rejected_before_a_run(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    words = [
        "env=gym",
        "env.id=CartPole-v1",
        "model=mlp",
        "algorithm.kl_beta=0.1",
        f"algorithm.reference_path={missing}",
    ]
    cfg = load_config("train", words)
    assert str(cfg.algorithm.reference_path) == str(missing)
    with pytest.raises(CheckpointError, match=r"algorithm\.reference_path=.*none"):
        check_components(cfg)
