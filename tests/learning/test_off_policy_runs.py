"""SAC and RLPD on real environments in complete training runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from safetensors.numpy import load_file

from embodyrl.channels.arena import Arena
from embodyrl.commands.collect import collect
from embodyrl.commands.train import train
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import ConfigError
from embodyrl.learners.off_policy.sac_learner import SacLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.workers.policy_host import PolicyHost

QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")
SMALL = (
    *("env=gym", "env.id=Pendulum-v1", "model=mlp", "model.hidden_sizes=[16]", "actor.global_batch_size=16"),
    *("env.train.max_steps_per_rollout_epoch=16", "algorithm.learning_starts=16", *QUIET),
)


def words_of(folder: Path, *words: str) -> list[str]:
    return [*words, f"runner.output_dir={folder}"]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tensors(run: Path, name: str) -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in load_file(run / "checkpoints/step_000004" / name).items()}


@pytest.mark.integration
@pytest.mark.parametrize("more", [(), ("env.id=goal_env:Walk", "algorithm.hindsight_goals=4")])
def test_resumed_sac_matches_an_uninterrupted_run(tmp_path, more):
    words = (
        *SMALL,
        *more,
        "algorithm=sac",
        "runner.max_steps=4",
        "runner.save_interval=2",
        "runner.deterministic=true",
    )
    words = words_of(tmp_path, *words, "env.train.continue_episodes=false", "checkpoint.keep=9")
    whole = train(load_config("train", [*words, "runner.experiment_name=whole"])).run
    started = load_config("train", [*words, "runner.experiment_name=half"])
    half = train(started, on_step=lambda step, _: step == 2).run
    train(load_saved_config(half, ["trust=true"]), resume=half)
    for name in ("policy/model.safetensors", "critics.safetensors", "replay.safetensors"):
        assert tensors(half, name) == tensors(whole, name), name
    assert [row["actor/optimizer_steps"] for row in rows(whole)] == [16, 16, 16, 16]
    assert rows(whole)[-1]["actor/replay_size"] == 4 * 16


@pytest.mark.integration
def test_resume_without_a_saved_buffer_refills_it(tmp_path):
    words = (*SMALL, "algorithm=sac", "runner.max_steps=4", "runner.save_interval=2", "algorithm.save_replay=false")
    started = load_config("train", words_of(tmp_path, *words, "algorithm.learning_starts=32"))
    run = train(started, on_step=lambda step, _: step == 2).run
    train(load_saved_config(run, []), resume=run)
    assert [row["actor/optimizer_steps"] for row in rows(run)] == [0, 16, 0, 16]
    assert ["actor/loss" in row for row in rows(run)] == [False, True, False, True], "nothing learned is no loss of 0"


SCALED = ("algorithm.reward_scale=0.25",)


def demonstrated_rewards(words: list[str]) -> np.ndarray:
    """Return the rewards in the demonstration buffer of a run."""
    run_plan = build_run_plan(load_config("train", words), training=True)
    arena = Arena.create(run_plan.layout, run_plan.capacity)
    host = PolicyHost(build_policy_init(run_plan, arena, None))
    try:
        assert isinstance(host._learner, SacLearner)
        assert host._learner._demonstrations is not None
        return host._learner._demonstrations["reward"].copy()
    finally:
        host.close()
        arena.close()


class TwinPendulum(PendulumEnv):
    """Another environment of the same sizes."""


@pytest.mark.integration
def test_half_of_each_batch_can_be_demonstrations(tmp_path):
    demos = tmp_path / "demos"
    words = ("env=gym", "env.id=Pendulum-v1", "model=random", "launcher=inline", "collect.filter=all")
    collect(load_config("collect", words_of(tmp_path, *words, f"collect.out={demos}", "collect.episodes=2")))
    assert len(np.unique(load_demonstrations(demos).action)) > 300, "not the middle of the range every time"
    given = (*SMALL, "algorithm=rlpd", f"algorithm.demonstrations=[{demos}]", "runner.max_steps=2")
    plain, scaled = (demonstrated_rewards(words_of(tmp_path, *given, *more)) for more in ((), SCALED))
    np.testing.assert_allclose(scaled, 0.25 * plain, rtol=1e-5)
    run = train(load_config("train", words_of(tmp_path, *given, "algorithm.updates_per_sample=1"))).run
    assert [row["actor/optimizer_steps"] for row in rows(run)] == [16, 16]
    for wrong, said in (
        ("env.id=MountainCarContinuous-v0", "Collect data with the settings"),
        ("env.id=test_off_policy_runs:TwinPendulum", "has no task of env 'test_off_policy_runs:TwinPendulum'"),
        ("env.reward_coef=0.1", r"collected with env.reward_coef=1.0, but this run has 0.1"),
        ("env.use_rel_reward=true", "env.use_rel_reward=False, but this run has True"),
        ("algorithm.demonstrations=[nowhere]", "nowhere is not a folder"),
        (
            "reward.path=embodyrl.envs.reward:success",
            r"reward\.path=None, but this run has embodyrl\.envs\.reward:success",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            build_run_plan(load_config("train", words_of(tmp_path, *given, wrong)), training=True)
    card = demos / "meta/embodyrl.json"
    played = json.loads(card.read_text())
    card.write_text(json.dumps(played | {"collected": played["collected"] | {"labels": "expert"}}))
    with pytest.raises(ConfigError, match="contains labels of the expert"):
        build_run_plan(load_config("train", words_of(tmp_path, *given)), training=True)
    noisy = {"expert_noise": 0.1, "labels": "expert"}
    card.write_text(json.dumps(played | {"collected": played["collected"] | noisy}))
    build_run_plan(load_config("train", words_of(tmp_path, *given)), training=True)


@pytest.mark.integration
def test_critic_loss_trains_the_image_encoder(tmp_path):
    words = (*SMALL[:1], "env.id=pixel_env:PointingEnv", "env.kwargs.size=12", "model=cnn", *SMALL[3:], "algorithm=sac")
    words = words_of(tmp_path, *words, "runner.save_interval=1", "runner.max_steps=2", "checkpoint.keep=9")
    run = train(load_config("train", [*words, "env.train.max_episode_steps=8"])).run
    first, last = (
        load_file(run / f"checkpoints/step_00000{step}/policy/model.safetensors")["encoder.0.weight"] for step in (1, 2)
    )
    assert (first != last).any()


@pytest.mark.slow
@pytest.mark.integration
def test_sac_learns_pendulum(tmp_path):
    words = ("env=gym", "env.id=Pendulum-v1", "model=mlp", "algorithm=sac", "model.hidden_sizes=[64,64]", *QUIET)
    rates = ("actor.optim.lr=0.001", "actor.optim.value_lr=0.001", "algorithm.learning_starts=100")
    steps = ("runner.max_steps=160", "runner.val_check_interval=160", "eval.episodes=10")
    last = rows(train(load_config("train", words_of(tmp_path, *words, *rates, *steps))).run)[-1]
    assert last["eval/return"] > -300, "about -150 after 10 240 steps; about -1 200 at first"


class GoesToItsGoal(gymnasium.Wrapper[Any, Any, Any, Any]):
    """FetchReach with a scripted expert."""

    way = np.zeros(3)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        seen, info = self.env.reset(**options)
        self.way = seen["desired_goal"] - seen["achieved_goal"]
        return seen, info

    def step(self, action: Any) -> Any:
        seen, *rest = self.env.step(action)
        self.way = seen["desired_goal"] - seen["achieved_goal"]
        return seen, *rest

    def expert_action(self) -> Any:
        return np.append(np.clip(10.0 * self.way, -1.0, 1.0), 0.0).astype(np.float32)


@pytest.mark.slow
@pytest.mark.integration
def test_rlpd_learns_with_demonstrations_and_hindsight(tmp_path):
    pytest.importorskip("gymnasium_robotics")
    reach = ("env=gym", "env.id=gymnasium_robotics:FetchReach-v4", "env.wrappers=[test_off_policy_runs:GoesToItsGoal]")
    demos = ("model=scripted", "launcher=inline", f"collect.out={tmp_path}/demos", "collect.episodes=20")
    collect(load_config("collect", words_of(tmp_path, *reach, *demos)))
    learner = (
        "model=mlp",
        "algorithm=rlpd",
        f"algorithm.demonstrations=[{tmp_path}/demos]",
        "algorithm.alpha_init=0.1",
        "algorithm.hindsight_goals=4",
    )
    sizes = ("model.hidden_sizes=[64,64]", "model.normalize_state=true", "algorithm.learning_starts=100")
    rates = (
        "actor.optim.lr=0.001",
        "actor.optim.value_lr=0.001",
        "algorithm.gamma=0.95",
        "algorithm.policy_interval=1",
    )
    steps = ("algorithm.updates_per_sample=1", "env.train.max_steps_per_rollout_epoch=50", "runner.max_steps=30")
    looks = ("runner.val_check_interval=30", "eval.episodes=20", "env.eval.total_num_envs=5")
    words = words_of(tmp_path, *reach, *learner, *sizes, *rates, *steps, *looks, *QUIET)
    found = rows(train(load_config("train", words)).run)
    assert found[0]["eval/return"] < -45, "it reaches nothing at first"
    assert found[-1]["eval/return"] > -5
