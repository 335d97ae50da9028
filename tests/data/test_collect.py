"""Demonstrations collected by real workers: filtering, order and completeness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from processes import start_cli, wait_until
from toy_env import toy_spec
from toy_runs import TOY, TOY_COLLECT, TOY_EVAL

from embodyrl.api.environment import make_env
from embodyrl.channels.arena import Arena
from embodyrl.commands.collect import (
    CollectResult,
    build_card,
    build_collection_plan,
    collect,
    list_demonstration_episodes,
)
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.rl_demonstrations import load_rl_demonstrations
from embodyrl.data.tables import read_episodes
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.episodes import EpisodeList, eval_episodes, train_episodes
from embodyrl.plan.schema import Config
from embodyrl.policies.protocol import POLICIES
from embodyrl.scheduler.start import build_policy_init
from embodyrl.types import Observation, PolicySpec
from embodyrl.workers.noise import generate_token_noise

TASKS = "env.kwargs.tasks=2"
POLICY = PolicySpec(name="toy", num_action_chunks=4, action_dim=7, tokens_per_chunk=28)


def words(folder: Path, *overrides: str) -> list[str]:
    places = (f"collect.out={folder}/demos", f"runner.output_dir={folder}/runs")
    return [*TOY_COLLECT, TASKS, *places, *overrides]


def config(folder: Path, *overrides: str) -> Config:
    cfg = load_config("collect", words(folder, "launcher=inline", "runner.logger.backends=[jsonl]", *overrides))
    check_components(cfg)
    return cfg


def run(folder: Path, *overrides: str) -> CollectResult:
    return collect(config(folder, *overrides))


def sources(root: Path) -> list[tuple[int, int, int, int]]:
    names = ("task_id", "trial", "reset_id", "seed")
    rows = [tuple(row[f"embodyrl/{name}"] for name in names) for row in read_episodes(root)]
    return rows  # type: ignore[return-value]


def test_every_expert_step_is_recorded(tmp_path: Path) -> None:
    result = run(tmp_path, "collect.episodes=7")
    root = tmp_path / "demos"
    assert (result.episodes, result.tried, result.succeeded, result.dropped) == (7, 7, 7, 0)
    assert check_layout(root) == []
    assert [s[0] for s in sources(root)] == [0, 0, 0, 0, 1, 1, 1]
    demos = load_demonstrations(root)
    for row, (start, stop) in zip(read_episodes(root), zip(demos.start, demos.stop, strict=True), strict=True):
        sign = 1.0 if row["embodyrl/task_id"] == 0 else -1.0
        np.testing.assert_array_equal(demos.action[start:stop, 0], 0.5 * sign)
        # The toy moves by the action: the states before each action are an arithmetic sequence from its start.
        position = demos.state[start:stop, 0]
        np.testing.assert_allclose(np.diff(position), 0.5 * sign, atol=1e-6)
        state = row["embodyrl/reset_id"] % 4
        assert position[0] == pytest.approx(0.1 * state + 0.01 * (row["embodyrl/seed"] % 7), abs=1e-6)
        assert abs(position[-1] + 0.5 * sign) > 2.0 >= abs(position[-1])
        assert demos.instruction[start] == toy_spec(2).tasks[row["embodyrl/task_id"]]
        pixels = demos.images[start:stop, 0, 8]
        columns = (np.clip((position + 4) / 8, 0, 0.99) * 24).astype(int)
        assert (pixels[np.arange(len(columns)), columns] == 255).all()
    table = pq.read_table(root / "data/chunk-000/file-000.parquet")
    assert table["next.success"].to_pylist() == table["next.done"].to_pylist()
    assert set(table["embodyrl.actor"].to_pylist()) == {Actor.expert}


def test_replayed_actions_reproduce_recorded_states(tmp_path: Path) -> None:
    """Repeated from its initial state, an episode gives the recorded states: each action belongs to its step."""
    places = [f"collect.out={tmp_path}/demos", f"runner.output_dir={tmp_path}/runs", "launcher=inline"]
    collect(load_config("collect", ["env=tabletop", "collect.episodes=3", "runner.logger.backends=[jsonl]", *places]))
    demos = load_demonstrations(tmp_path / "demos")
    env = make_env("tabletop")
    for row, start, stop in zip(read_episodes(tmp_path / "demos"), demos.start, demos.stop, strict=True):
        seen, _ = env.reset(options={"reset_id": row["embodyrl/reset_id"]})
        assert len(np.unique(demos.action[start:stop], axis=0)) > 1
        for frame in range(start, stop):
            np.testing.assert_allclose(seen["state"], demos.state[frame], atol=1e-6)
            seen, *_ = env.step(demos.action[frame])
    env.close()


def test_rewards_and_success_belong_to_their_step(tmp_path: Path) -> None:
    """Noise makes the policy lose the goal again: success is that of the next state, rewards its change."""
    hard = ("model.expert_noise=1.0", "env.kwargs.goal=0.4", "env.train.ignore_terminations=true")
    run(tmp_path, *hard, "collect.episodes=6", "collect.filter=all")
    demos, lost = load_demonstrations(tmp_path / "demos"), 0
    for row, start, stop in zip(read_episodes(tmp_path / "demos"), demos.start, demos.stop, strict=True):
        sign = 1.0 if row["embodyrl/task_id"] == 0 else -1.0
        success = demos.success[start:stop]
        np.testing.assert_array_equal(success[:-1], sign * demos.state[start + 1 : stop, 0] > 0.4)
        np.testing.assert_allclose(np.cumsum(demos.reward[start:stop]), success, atol=1e-6)
        lost += int((success[:-1] & ~success[1:]).sum())
    assert lost, "or this shows little"


def test_dataset_card_describes_the_environment(tmp_path: Path) -> None:
    run(tmp_path, "collect.episodes=2")
    card = read_card(tmp_path / "demos")
    env = toy_spec(2)
    assert (card.env.name, card.env.action, card.env.cameras, card.env.state_dim) == (
        *(env.name, env.action, env.cameras, env.state_dim),
    )
    assert (card.env.tasks, card.env.states_per_task, card.env.benchmark) == (
        *(env.tasks, env.states_per_task, env.benchmark),
    )
    assert (card.fps, card.collected["model"], card.collected["seed"]) == (20, "scripted", 0)


def test_dataset_card_contains_the_training_states_of_an_environment_with_held_out_states(tmp_path: Path) -> None:
    run_plan = build_collection_plan(config(tmp_path))
    env = run_plan.env
    divided = replace(run_plan, env=replace(env, benchmark=replace(env.benchmark, held_out=1)))
    assert build_card(run_plan).collected["state_ids"] is None
    assert build_card(divided).collected["state_ids"] == [0, env.states_per_task[0] - 2]


def test_action_noise_changes_states_but_not_recorded_actions(tmp_path: Path) -> None:
    run(tmp_path, "collect.episodes=2", "model.expert_noise=0.3", "env.train.max_episode_steps=30")
    demos = load_demonstrations(tmp_path / "demos")
    assert set(np.unique(demos.action[:, 0])) == {-0.5, 0.5}
    assert read_card(tmp_path / "demos").collected["expert_noise"] == 0.3
    steps = np.diff(demos.state[demos.start[0] : demos.stop[0], 0])
    assert steps.std() > 0.05


def test_loaded_demonstrations_contain_the_executed_noisy_actions(tmp_path: Path) -> None:
    """The reward of the environment is the first number of the executed action."""
    echo = ("env.kwargs.echo=true", "env.use_rel_reward=false", "collect.filter=all")
    run(tmp_path, "collect.episodes=4", "model.expert_noise=0.3", *echo)
    demos = load_demonstrations(tmp_path / "demos")
    assert np.abs(demos.executed - demos.action)[:, 0].max() > 0.2
    np.testing.assert_allclose(demos.executed[:, 0], demos.reward, atol=1e-6)
    np.testing.assert_array_equal(demos.executed[:, -1], demos.action[:, -1], "the gripper has no noise")
    shown = load_rl_demonstrations([str(tmp_path / "demos")], POLICY, read_card(tmp_path / "demos").env)
    np.testing.assert_allclose(shown.executed[:, 0], demos.reward, atol=1e-6)


def test_failed_episodes_are_replaced_within_the_same_task(tmp_path: Path) -> None:
    """Eight noisy steps for a goal that needs five clean steps: some episodes fail."""
    hard = ("model.expert_noise=1.0", "env.kwargs.goal=2.5", "collect.episodes=12")
    result = run(tmp_path, *hard)
    assert result.tried > result.succeeded >= 12
    found = sources(tmp_path / "demos")
    assert sorted(s[0] for s in found) == [0] * 6 + [1] * 6
    assert max(s[1] for s in found) > 5, "a later trial stepped in"
    assert all(row["embodyrl/success"] for row in read_episodes(tmp_path / "demos"))


def test_collect_without_filter_keeps_every_episode(tmp_path: Path) -> None:
    result = run(tmp_path, "model.expert_noise=1.0", "env.kwargs.goal=2.5", "collect.episodes=12", "collect.filter=all")
    assert (result.tried, result.episodes) == (12, 12)
    assert {row["embodyrl/success"] for row in read_episodes(tmp_path / "demos")} == {True, False}


def test_task_without_success_error_contains_a_fix(tmp_path: Path) -> None:
    with pytest.raises(EmbodyError, match=r"task 0 .* only 0 of 20 episodes .*collect.filter=all"):
        run(tmp_path, "env.kwargs.goal=50", "collect.episodes=2")


def test_collecting_more_episodes_appends_to_the_folder(tmp_path: Path) -> None:
    run(tmp_path, "collect.episodes=4")
    before = load_demonstrations(tmp_path / "demos")
    result = run(tmp_path, "collect.episodes=10")
    assert (result.tried, result.episodes) == (6, 10)
    assert run(tmp_path, "collect.episodes=10").tried == 0
    after = load_demonstrations(tmp_path / "demos")
    np.testing.assert_array_equal(after.images[: len(before.images)], before.images)
    run(tmp_path / "whole", "collect.episodes=10")
    assert sorted(sources(tmp_path / "demos")) == sorted(sources(tmp_path / "whole" / "demos"))
    with pytest.raises(EmbodyError, match=r"collected.seed is 0 in the data set, but 1"):
        run(tmp_path, "collect.episodes=12", "seed=1")


def test_data_are_independent_of_workers_and_stages(tmp_path: Path) -> None:
    run(tmp_path / "a", "collect.episodes=9")
    run(tmp_path / "b", "collect.episodes=9", "env.train.total_num_envs=3", "rollout.pipeline_stage_num=1")
    for name in ("images", "state", "action", "start"):
        left, right = (getattr(load_demonstrations(tmp_path / run / "demos"), name) for run in "ab")
        np.testing.assert_array_equal(left, right)


def test_chunked_policy_is_recorded_step_by_step(tmp_path: Path) -> None:
    words = ("model=random", "model.num_action_chunks=4", "eval.sampling_params.do_sample=true")
    result = run(tmp_path, *words, "env.kwargs.goal=9", "collect.episodes=3", "collect.filter=all")
    assert result.frames == 3 * 8
    demos = load_demonstrations(tmp_path / "demos")
    for start in demos.start:
        moved, action = np.diff(demos.state[start : start + 8, 0]), demos.action[start : start + 8]
        np.testing.assert_allclose(moved, action[:7, 0], atol=1e-6)
        assert len(np.unique(action, axis=0)) == 8, "every query draws its own noise"


def test_collect_executes_whole_chunks(tmp_path: Path) -> None:
    """Two episodes at once with ten steps each: the third chunk is cut."""
    words = ("model=random", "model.num_action_chunks=4", "eval.sampling_params.do_sample=true", "collect.filter=all")
    words = (*words, "env.kwargs.goal=99", "env.train.max_episode_steps=10", "env.train.total_num_envs=2")
    cfg = config(tmp_path, *words, "collect.episodes=3")
    collect(cfg)
    run_plan = build_collection_plan(cfg)
    plan = list_demonstration_episodes(cfg, run_plan.env, [(0, 0), (0, 1), (1, 0)])
    arena = Arena.create(run_plan.layout, run_plan.capacity)
    policy = POLICIES.get("random").build(cfg.model, build_policy_init(run_plan, arena, None).request)
    arena.close()
    nothing = Observation(images=np.zeros((3, 0, 0, 0, 3), np.uint8), state=np.zeros((3, 1)), instructions=("",) * 3)
    demos = load_demonstrations(tmp_path / "demos")
    specs = sorted(plan.episodes, key=lambda spec: spec.episode_id)
    for start, spec in zip(demos.start, specs, strict=True):
        noise = generate_token_noise([spec.noise_seed] * 3, range(3), policy.spec.tokens_per_chunk)
        chosen = policy.act(nothing, noise=noise).actions.reshape(12, -1)
        np.testing.assert_array_equal(demos.action[start : start + 10, :6], chosen[:10, :6])  # the gripper is converted


@pytest.mark.integration
def test_killed_collect_resumes_to_the_same_episodes(tmp_path: Path) -> None:
    """SIGKILL after the first file is complete; the second call completes the data set."""
    overrides = words(tmp_path, "collect.episodes=70", "env.train.max_episode_steps=30", "env.kwargs.goal=9")
    command = start_cli("collect", *overrides, cwd=tmp_path)
    first = tmp_path / "demos/meta/episodes/chunk-000/file-000.parquet"
    try:
        assert wait_until(first.exists, 60.0), command.printed
    finally:
        command.stop()
    assert 0 < len(read_episodes(tmp_path / "demos")) < 70
    result = run(tmp_path, "collect.episodes=70", "env.train.max_episode_steps=30", "env.kwargs.goal=9")
    assert result.episodes == 70
    assert check_layout(tmp_path / "demos") == []
    found = sources(tmp_path / "demos")
    assert sorted((task, trial) for task, trial, *_ in found) == [(t, i) for t in range(2) for i in range(35)]


def test_splits_use_only_their_initial_states() -> None:
    keys = ("env.train.state_ids=[2,3]", "env.eval.state_ids=[0,1]", "eval.episodes_per_task=6")
    cfg = load_config("train", [*TOY, TASKS, "algorithm.rollout_epoch=4", *keys])
    env = toy_spec(2)

    def reset_ids(*plans: EpisodeList) -> list[int]:
        return [e.reset_id for plan in plans for wave in plan.waves for e in wave.queues[0]]

    training = reset_ids(*(train_episodes(cfg, env, step, counts_chunk_steps=False) for step in range(9)))
    judging = reset_ids(eval_episodes(cfg, env, POLICY))
    demos = reset_ids(list_demonstration_episodes(cfg, env, [(task, i) for task in (0, 1) for i in range(6)]))
    assert set(training) == set(demos) == {2, 3, 6, 7}
    assert sorted(demos) == [2] * 3 + [3] * 3 + [6] * 3 + [7] * 3, "each state equally often"
    assert set(judging) == {0, 1, 4, 5}
    with pytest.raises(ConfigError, match=r"env\.eval\.state_ids=\[2,4\]: task 0 of env 'toy' has only states 0 to 3"):
        eval_episodes(load_config("eval", [*TOY_EVAL, "env.eval.state_ids=[2,4]"]), env, POLICY)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["collect.out=null"], "collect.out is not set"),
        (["data.path=x"], "data.path=x: env_type 'toy_env:FACTORY' does not read data.path; remove the key"),
    ],
)
def test_collect_reports_missing_and_unused_keys(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, *overrides)
