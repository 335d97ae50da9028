"""Banner lines of a run."""

import pytest

from embodyrl.commands.facts import facts
from embodyrl.plan.config import load_config
from embodyrl.plan.run_plan import build_run_plan


@pytest.mark.needs("tabletop")
@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("model=mlp", True),
        ("model=mlp env.eval.task_ids=[3]", False),
        ("model=scripted", False),
        ("model=flow_small", False),
        ("model=act model.path=assets/act env.eval.task_ids=[0,1]", True),
        ("model=act model.path=assets/act env.eval.task_ids=[0]", False),
    ],
)
def test_policy_without_instructions_warns_of_several_tasks(words: str, warned: bool) -> None:
    cfg = load_config("eval", ["env=tabletop", "launcher=inline", *words.split()])
    text = dict(facts(build_run_plan(cfg, training=False))).get("warning", "")
    assert ("reads no instructions" in text) == warned


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("algorithm=ppo env.train.continue_episodes=false", ""),
        ("algorithm=ppo env.train.continue_episodes=false env.train.max_steps_per_rollout_epoch=90", "90 of 200 steps"),
        ("algorithm=ppo env.train.max_steps_per_rollout_epoch=90 runner.val_check_interval=2", "180 of 200 steps"),
        ("algorithm=ppo env.train.max_steps_per_rollout_epoch=90 runner.val_check_interval=3", ""),
        ("algorithm=sac env.train.max_steps_per_rollout_epoch=1 runner.val_check_interval=20", "20 of 200 steps"),
        ("algorithm=sac env.train.max_steps_per_rollout_epoch=1", ""),
        ("algorithm=grpo algorithm.group_size=4 env.train.max_steps_per_rollout_epoch=90", ""),
    ],
)
def test_rollouts_and_validations_shorter_than_an_episode_warn(words: str, warned: str) -> None:
    cfg = load_config("train", ["env=gym", "env.id=Pendulum-v1", "model=mlp", "launcher=inline", *words.split()])
    text = dict(facts(build_run_plan(cfg, training=True))).get("warning", "")
    assert warned in text
    assert ("training episodes have at most" in text) == bool(warned)
