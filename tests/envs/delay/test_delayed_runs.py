"""Training and evaluation under a delay, inline."""

import math
from pathlib import Path

import numpy as np
import pytest
from toy_runs import rows, running_crew, toy_config, train_toy

from embodyrl.channels.layout import Record
from embodyrl.commands.evaluate import evaluate
from embodyrl.envs import ENVS
from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.rollout import Rollout

DELAYED = ("env.control.latency_steps=[0,2]",)
ECHO = ("env.kwargs.echo=true", "env.use_rel_reward=false", "env.train.max_episode_steps=7")


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=grpo",),
        ("algorithm=ppo", "env.train.auto_reset=true"),
        ("algorithm=ppo", "algorithm.reward_type=action_level"),
        pytest.param(("algorithm=reinforce_pp",)),
        pytest.param(("algorithm=filtered_bc",)),
        pytest.param(("algorithm=sac", "actor.global_batch_size=4", "algorithm.group_size=1")),
    ],
    ids=lambda words: " ".join(words),
)
def test_every_algorithm_trains_under_a_delay(words, tmp_path):
    run = train_toy(tmp_path, *DELAYED, *words, "env.train.max_episode_steps=7")
    found = rows(run)
    assert len(found) >= 2
    assert all(math.isfinite(v) for row in found for k, v in row.items() if v is not None and k.startswith("train/"))


def test_each_env_step_belongs_to_the_chunk_that_executed_it(tmp_path: Path):
    with running_crew(tmp_path, *DELAYED, *ECHO) as crew:
        cfg, plan = crew.run_plan.cfg, crew.run_plan
        collection = crew.workers.scheduler.collect(Rollout(train_episodes(cfg, plan.env, 0, counts_chunk_steps=False)))
        for episode in collection.episodes:
            assert episode.length == 7
            # The reward of the toy environment is the first number of the executed action.
            done = episode.action[episode.valid][:, 0]
            assert np.allclose(episode.reward[episode.valid], done, atol=1e-5)
            assert (episode.reward[~episode.valid] == 0).all()
            assert episode.valid[0, 0], "the first chunk has no delay"


LEVEL = ("algorithm=ppo", "algorithm.reward_type=action_level")
CUT = ("env.train.max_episode_steps=9", "env.train.max_steps_per_rollout_epoch=2", "env.kwargs.goal=99")


@pytest.mark.parametrize("words", [DELAYED, ("env.control.latency_steps=1",), ()], ids=" ".join)
@pytest.mark.parametrize("length", [(), CUT], ids=["limit", "cut"])
def test_bootstrap_is_the_value_of_the_next_action(words, length, tmp_path: Path):
    """With one value per action; an episode of n chunks of p steps ends L - n p steps after its last observation."""
    limit = length or ("env.train.max_episode_steps=7", "env.kwargs.goal=99")
    with running_crew(tmp_path, *LEVEL, *words, *limit, "env.train.total_num_envs=8") as crew:
        cfg, plan = crew.run_plan.cfg, crew.run_plan
        crew.workers.scheduler.publish(0)
        found = crew.workers.scheduler.collect(Rollout(train_episodes(cfg, plan.env, 0, counts_chunk_steps=True)))
        values = crew.workers.arena[Record.value]
        assert np.ptp(values[found.episodes[0].records[0]]) > 0, "values of a chunk differ"
        places = []
        for episode in found.episodes:
            assert episode.final_record >= 0
            places.append(max(0, episode.length - len(episode.valid) * cfg.chunk_steps))
            assert episode.bootstrap_value == values[episode.final_record][places[-1]]
        assert any(places) == bool(words)


def test_environment_without_delay_is_not_delayed(tmp_path: Path):
    plan = build_run_plan(toy_config(tmp_path, "env.control.latency_steps=0"), training=True)
    env = ENVS.get(plan.cfg.env.env_type).make(plan.env_settings, plan.context)
    assert type(env) is ChunkedEnv
    env.close()


def test_halving_env_steps_per_chunk_doubles_the_planned_samples(tmp_path: Path):
    plain = build_run_plan(toy_config(tmp_path), training=True)
    delayed = build_run_plan(toy_config(tmp_path, *DELAYED), training=True)
    assert delayed.max_samples == 2 * plain.max_samples, "twice as many chunks of half the env steps"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("env.control.latency_steps=3",), "does not fit into chunks of 4 actions"),
        (
            ("env.control.latency_steps=1", "env.kwargs.lockstep=true", "rollout.pipeline_stage_num=1"),
            "all parallel environments together",
        ),
    ],
)
def test_impossible_delays_are_rejected(words, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        build_run_plan(toy_config(tmp_path, *words), training=True)


def test_evaluation_repeats_exactly_with_random_delays(tmp_path: Path):
    results = []
    for name in ("first", "second"):
        cfg = toy_config(tmp_path, *DELAYED, "eval.episodes=6", command="eval", name=name)
        evaluate(cfg)
        results.append(tmp_path / name / "eval" / "step_000000" / "episodes.jsonl")
    kept = [[line.split('"seconds"')[0] for line in sorted(path.read_text().splitlines())] for path in results]
    assert kept[0] == kept[1]
