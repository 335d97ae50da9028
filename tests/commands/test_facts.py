"""Banner lines of a run."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from embodyrl.commands.banner import common_banner_lines
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config


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
    text = dict(common_banner_lines(build_run_plan(cfg, training=False))).get("warning", "")
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
    text = dict(common_banner_lines(build_run_plan(cfg, training=True))).get("warning", "")
    assert warned in text
    assert ("training episodes have at most" in text) == bool(warned)


class Near(gymnasium.Env):
    """The reward is the nearness to a goal, which ends the episode after eight steps; `key` of info is True then."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, key: str = "is_success", sign: float = 1.0) -> None:
        self._key, self._sign, self._steps = key, sign, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        over = self._steps == 8
        return np.zeros(2, np.float32), self._sign * self._steps / 8, over, False, {self._key: over}


def banner_of(*words: str) -> dict[str, str]:
    shared = ("env=gym", "env.id=test_facts:Near", "model=mlp", "algorithm=ppo", "launcher=inline")
    return dict(common_banner_lines(build_run_plan(load_config("train", [*shared, *words]), training=True)))


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ((), True),
        (("env.use_rel_reward=true",), False),
        (("env.kwargs={sign: -1}",), False),
        (("env.kwargs={key: other}",), False),
        (("reward.path=embodyrl.envs.reward:success",), False),
        (("reward.path=embodyrl.envs.reward:success", "reward.mode=add"), True),
    ],
)
def test_dense_reward_with_terminating_success_gives_a_warning(words: tuple[str, ...], warned: bool) -> None:
    assert ("waiting near the goal may earn more" in banner_of(*words).get("warning", "")) == warned


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ((), "info['is_success']"),
        (("env.kwargs={key: sucess}",), "unknown; keys of info: sucess"),
        (("env.kwargs={key: sucess}", "env.success_key=sucess"), "info['sucess']"),
        (("env.success_key=never",), "unknown; keys of info: is_success"),
        (("env.id=CartPole-v1",), "unknown; keys of info: none"),
    ],
)
def test_banner_shows_the_source_of_success(words: tuple[str, ...], source: str) -> None:
    assert banner_of(*words)["success"] == source


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("env=gym env.id=Pendulum-v1 model=mlp algorithm=sac", "sac, 1 updates per sample · "),
        ("env=gym env.id=Pendulum-v1 model=mlp algorithm=ppo", "gae + ppo_clip, clip 0.2/0.2 · "),
    ],
)
def test_banner_shows_only_keys_of_the_algorithm(words: str, text: str) -> None:
    cfg = load_config("train", ["launcher=inline", *words.split()])
    assert dict(common_banner_lines(build_run_plan(cfg, training=True)))["algorithm"].startswith(text)
