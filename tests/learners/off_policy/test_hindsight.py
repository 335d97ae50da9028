"""Hindsight relabeling: candidate goals, rewards and terminations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goal_env import LENGTH, NEAR, Ending, OneByOne, Walk
from safetensors.numpy import load_file
from settings import algorithm_of, env_of

from embodyrl.algorithms.off_policy.replay import Frames, ReplayBuffer
from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.commands.collect import collect
from embodyrl.commands.train import train
from embodyrl.envs.gym.factory import FACTORY
from embodyrl.envs.gym.goals import GymGoalReward
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError, EnvError
from embodyrl.learners.off_policy.hindsight import Hindsight, UnfinishedEpisodes
from embodyrl.learners.off_policy.sac_learner import SacLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.workers.policy_host import PolicyHost

GAMMA, SCALE, FACTOR = 0.5, 0.5, 4.0
DESIRED, ACHIEVED = slice(2, 4), slice(0, 2)
"""Columns of the state; the space sorts its members by name."""


def episode(length: int, seed: int, *, terminated: bool = False, final: bool = True, number: int = 0) -> Frames:
    """Return a random walk as in a rollout; its rewards are distinguishable from those of the goals."""
    rng = np.random.default_rng(seed)
    count = length + final
    state = np.zeros((count, 6), np.float32)
    state[:, ACHIEVED] = np.cumsum(rng.uniform(-0.1, 0.1, (count, 2)), axis=0)
    state[:, DESIRED] = rng.uniform(5.0, 6.0, 2)
    state[:, 4] = seed
    acted = np.arange(count) < length
    return Frames(
        seen={"observed_state": state},
        action=np.zeros((count, 2), np.float32),
        reward=np.where(acted, 100.0 + np.arange(count), 0.0).astype(np.float32),
        acted=acted,
        terminated=terminated & (np.arange(count) == length - 1),
        episode=np.full(count, number),
    )


@pytest.fixture
def build() -> Iterator[Any]:
    made: list[Hindsight] = []

    def hindsight(env: str, **keys: Any) -> Hindsight:
        cfg = env_of("gym", id=f"goal_env:{env}", use_rel_reward=False, reward_coef=FACTOR)
        rules = algorithm_of("sac", hindsight_goals=4, gamma=GAMMA, reward_scale=SCALE, **keys)
        made.append(Hindsight(rules, cfg, FACTORY.spec(cfg, EnvContext())))
        return made[-1]

    yield hindsight
    for one in made:
        one.close()


def by_hand(states: np.ndarray, place: int, last: int, goal: np.ndarray, n_step: int, ends: Any) -> tuple[Any, ...]:
    """Return reward, discount and end of a transition with this goal, as defined in the docs."""
    reward, discount, at = 0.0, 1.0, place
    for _ in range(n_step):
        if at == last:
            break
        reached = np.linalg.norm(states[at + 1, ACHIEVED].astype(np.float64) - goal) <= NEAR
        reward += discount * FACTOR * SCALE * (0.0 if reached else -1.0)
        at, discount = at + 1, discount * GAMMA
        if ends(at, reached):
            return reward, 0.0, at
    return reward, discount, at


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("env", ["Walk", "Ending", "OneByOne"])
def test_relabeled_window_has_rewards_of_the_new_goal(build, env, n_step):
    """Mutants: the goal of the same or an earlier step, or of the next episode; the old rewards, only the first one
    new; no end at the end of the new goal, or the old end without one; missing discount factors.
    """
    hindsight, buffer = build(env, n_step=n_step), ReplayBuffer(1000, GAMMA, n_step)
    parts = [episode(6, 0, terminated=True), episode(4, 1), episode(5, 2, final=False), episode(1, 3)]
    for part in parts:
        buffer.add(part)
    states = buffer["observed_state"]
    last = np.repeat(np.cumsum([len(p.acted) for p in parts]) - 1, [len(p.acted) for p in parts])
    drawn = buffer.transitions(np.tile(buffer.starts, 200))
    found = hindsight.relabel(drawn, np.random.default_rng(0))
    assert found.discount is not drawn.discount
    sources = set()
    for row, goal in zip(found.relabeled, found.goal, strict=True):
        place = found.indices[row]
        (source,) = np.flatnonzero((states[:, ACHIEVED] == goal).all(axis=1))
        assert place < source <= last[place], "what the same episode reached later"
        sources.add((int(place), int(source)))

        def ends(at: int, reached: bool) -> bool:
            return reached if env == "Ending" else at == 6  # the first one terminated, whatever its goal

        reward, discount, end = by_hand(states, place, int(last[place]), goal, n_step, ends)
        assert found.reward[row] == pytest.approx(reward, abs=1e-6)
        assert found.discount[row] == pytest.approx(discount)
        assert found.after[row] == end or discount == 0
    possible = {(int(p), q) for p in buffer.starts for q in range(p + 1, last[p] + 1)}
    assert sources == possible, "each of them, at some time"
    kept = np.setdiff1d(np.arange(len(drawn.indices)), found.relabeled)
    for name in ("reward", "discount", "after"):
        np.testing.assert_array_equal(getattr(found, name)[kept], getattr(drawn, name)[kept])
    blind = buffer["left"][drawn.indices] == 0
    assert len(found.relabeled) / (~blind).sum() == pytest.approx(0.8, abs=0.03)
    assert not blind[found.relabeled].any()


def test_overwritten_replay_buffer_does_not_mix_episodes(build):
    hindsight, buffer = build("Walk"), ReplayBuffer(11, GAMMA, 1)
    for seed in range(6):
        buffer.add(episode(3, seed))
    drawn = buffer.transitions(np.tile(buffer.starts, 50))
    found = hindsight.relabel(drawn, np.random.default_rng(0))
    states = buffer["observed_state"]
    assert len(found.relabeled) > 300
    for row, goal in zip(found.relabeled, found.goal, strict=True):
        (source,) = np.flatnonzero((states[:, ACHIEVED] == goal).all(axis=1))
        assert states[source, 4] == states[found.indices[row], 4] == states[found.after[row], 4]


def test_parts_of_a_continued_episode_are_joined_at_its_end():
    """Mutants: the last frame of a part is duplicated; frames without continuation are lost; parts are reordered."""
    whole = [episode(6, 0), episode(5, 1, terminated=True), episode(4, 2)]

    def piece(source: Frames, start: int, stop: int, number: int) -> Frames:
        part = source.map(lambda array: array[start : stop + 1].copy())
        part.acted[-1] = False
        part.episode[:] = number
        return part

    def both(*parts: Frames) -> Frames:
        names = ("action", "reward", "acted", "terminated", "episode")
        seen = {"observed_state": np.concatenate([part.seen["observed_state"] for part in parts])}
        return Frames(seen=seen, **{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    held = UnfinishedEpisodes()
    first = both(*(piece(one, 0, 2, i) for i, one in enumerate(whole)))
    assert held.append_frames(first, {}, {0: 70, 1: 71, 2: 72}) == []
    kept = held.state()
    assert np.unique(kept["episode"]).tolist() == [0, 1, 2]
    second = both(piece(whole[1], 2, 5, 5), piece(whole[0], 2, 4, 6))
    lost, done = held.append_frames(second, {5: 71, 6: 70}, {6: 70})
    (last,) = held.append_frames(piece(whole[0], 4, 6, 9), {9: 70}, {})
    for found, source in ((done, whole[1]), (last, whole[0])):
        np.testing.assert_array_equal(found.seen["observed_state"], source.seen["observed_state"])
        np.testing.assert_array_equal(found.acted, source.acted)
        assert len(np.unique(found.episode)) == 1
    np.testing.assert_array_equal(lost.seen["observed_state"], whole[2].seen["observed_state"][:3])
    assert held.state() == {}


def test_unbatched_goal_reward_is_called_for_each_goal():
    rng = np.random.default_rng(0)
    achieved, desired = rng.uniform(-0.2, 0.2, (2, 50, 2)).astype(np.float32)
    expected = -(np.linalg.norm(achieved.astype(np.float64) - desired, axis=1) > NEAR).astype(np.float32)
    assert len(np.unique(expected)) == 2
    for env in (Walk(), OneByOne(), Ending()):
        goals = GymGoalReward("t", env)
        reward, over = goals(achieved, desired)
        np.testing.assert_array_equal(reward, expected)
        assert over is None if not isinstance(env, Ending) else (over == (expected == 0)).all()
        assert calls_of(goals, achieved) == (50 if isinstance(env, OneByOne) else 1)


def calls_of(goals: GymGoalReward, achieved: np.ndarray) -> int:
    """Return the number of calls of the environment's reward function for a batch."""
    env: Any = goals._env
    own, count = env.compute_reward, []
    env.compute_reward = lambda *given: count.append(0) or own(*given)
    counted = GymGoalReward("t", env)
    count.clear()
    counted(achieved, achieved)
    return len(count)


def test_failing_goal_reward_error_contains_the_goals():
    class Fails(Walk):
        def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
            if np.abs(achieved_goal).max() > 1:
                raise KeyError("far")
            return super().compute_reward(achieved_goal, desired_goal, info)

    with pytest.raises(EnvError, match=r"compute_reward.*KeyError.*hindsight_goals=0"):
        GymGoalReward("t", Fails())(np.full((1, 2), 2.0, np.float32), np.zeros((1, 2), np.float32))


SMALL = ("env=gym", "env.id=goal_env:Walk", "model=mlp", "algorithm=sac", "algorithm.hindsight_goals=4")
QUIET = (
    *("launcher=inline", "runner.logger.backends=[jsonl]", "model.hidden_sizes=[8]", "algorithm.learning_starts=8"),
    *("actor.global_batch_size=16", "runner.save_interval=1", "checkpoint.keep=9"),
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.id=Pendulum-v1"], "has no goals to relabel"),
        (["env.id=goal_env:Otherwise"], "for an empty info, the reward of a step"),
        (["env.id=goal_env:Told"], "for an empty info"),
        (["env.wrappers=[gymnasium.wrappers:FlattenObservation]"], "keep the observation a dictionary"),
        (["model.num_action_chunks=2"], "model.num_action_chunks=1"),
        (["env.use_rel_reward=true"], "env.use_rel_reward=false"),
        (["reward.path=goal_env:careful"], "remove one of the two keys"),
    ],
)
def test_hindsight_is_rejected_without_a_goal_interface(tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        build_run_plan(load_config("train", [*SMALL, f"runner.output_dir={tmp_path}", *words]), training=True)


def test_hindsight_goals_give_a_warning_with_an_algorithm_that_ignores_them():
    (line,) = load_config("train", [*SMALL, "algorithm=ppo"]).warnings
    assert line.startswith("algorithm.hindsight_goals has no effect")


def transitions(run: Path, step: int) -> dict[str, np.ndarray]:
    arrays = load_file(run / f"checkpoints/step_{step:06d}/replay.safetensors")
    arrays = {name.split("/")[-1]: array for name, array in arrays.items() if "open" not in name}
    starts = np.flatnonzero(arrays["ahead"])
    after = arrays["observed_state"][starts + arrays["ahead"][starts]]
    return {name: array[starts] for name, array in arrays.items()} | {"after": after}


@pytest.mark.integration
@pytest.mark.parametrize(("env", "killed_at"), [("Walk", 0), ("Ending", 0), ("Walk", 5)])
def test_hindsight_goals_span_several_training_steps(tmp_path, env, killed_at):
    """Steps of 3 cut episodes of 7; a resumed run starts new episodes, and so does a run whose env worker
    dies in the second step. Mutants: parts are not joined, joined with another environment's, or lost at the end of a
    run; the final observation of terminated episodes is missing.
    """
    sizes = ("env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=3", "runner.max_steps=8")
    words = [*SMALL, *QUIET, *sizes, f"env.id=goal_env:{env}", f"runner.output_dir={tmp_path}"]
    if killed_at:
        wrapper = f"{{name:pixel_env:DiesOnce,at:{killed_at},marker:{tmp_path}/died}}"
        words += ["launcher.name=mixed_launcher:MixedLauncher", "launcher.env_workers=2", f"env.wrappers=[{wrapper}]"]
    run = train(load_config("train", words), on_step=lambda step, _: step == 4).run
    train(load_saved_config(run, ["trust=true"]), resume=run)
    assert (tmp_path / "died").exists() == bool(killed_at)
    held = load_file(run / "checkpoints/step_000008/replay.safetensors")
    found = transitions(run, 8)
    waiting = sum(array.sum() for name, array in held.items() if name.endswith("acted"))
    assert len(found["reward"]) + waiting == 8 * 3 * 2
    state, after = found["observed_state"], found["after"]
    np.testing.assert_allclose(after[:, ACHIEVED], state[:, ACHIEVED] + 0.1 * found["action"], atol=1e-6)
    np.testing.assert_array_equal(after[:, DESIRED], state[:, DESIRED])
    reached = np.linalg.norm(after[:, ACHIEVED] - after[:, DESIRED], axis=1) <= NEAR
    np.testing.assert_array_equal(found["reward"], np.where(reached, 0.0, -1.0))
    np.testing.assert_array_equal(found["discount"] == 0, reached & (env == "Ending"))
    if env == "Walk":
        assert found["left"].max() == LENGTH
    else:
        assert (found["left"][reached] == 1).all(), "its last observation was kept"


@pytest.mark.integration
def test_demonstrations_are_relabeled_by_hindsight(tmp_path):
    places = f"runner.output_dir={tmp_path}", f"collect.out={tmp_path}/demos", "collect.episodes=3"
    collect(load_config("collect", [*SMALL[:2], "model=random", "launcher=inline", "collect.filter=all", *places]))
    words = [*SMALL, *QUIET, "algorithm=rlpd", f"algorithm.demonstrations=[{tmp_path}/demos]"]
    words += ["algorithm.learning_starts=1", "actor.global_batch_size=256"]
    run_plan = build_run_plan(load_config("train", [*words, f"runner.output_dir={tmp_path}"]), training=True)
    arena = Arena.create(run_plan.layout, run_plan.capacity)
    host = PolicyHost(build_policy_init(run_plan, arena, None))
    try:
        actor = host._learner
        assert isinstance(actor, SacLearner)
        assert actor._hindsight is not None
        assert actor._demonstrations is not None
        demos = actor._demonstrations
        assert demos["left"][demos.starts].max() == LENGTH - 1  # nobody saw what came of the last action
        found = actor._hindsight.relabel(demos.transitions(demos.starts), np.random.default_rng(0))
        seen: Any = actor._get_observations(found, found.indices)
        np.testing.assert_array_equal(seen.state[found.relabeled, DESIRED], found.goal)
        then: Any = actor._get_observations(found, found.after)
        np.testing.assert_array_equal(then.state[found.relabeled, DESIRED], found.goal)
        kept = np.setdiff1d(np.arange(len(found.indices)), found.relabeled)
        np.testing.assert_array_equal(seen.state[kept], demos["observed_state"][found.indices[kept]])
        # A training step: the critic error tells that only one in five keeps its reward of 1000.
        demos["reward"][:] = 1000.0
        own = arena.allocate_all(2)
        with arena.write_all(own) as records:
            for field in (Record.observed_state, Record.tokens, Record.terminated, Record.truncated, Record.advantage):
                arena[field][records] = 0
            arena[Record.valid][records] = True
            arena[Record.truncated][records[:1]] = True
        parts = actor.update(UpdateRequest(step=0, record_refs=own[:1], episode=[0], finals=((0, int(own[1])),)))
        result = []
        while not result:
            try:
                next(parts)
            except StopIteration as end:
                result = [end.value["value_loss"]]
        # Ten critics with half the squared error; demonstrations are half of a batch, and one in five is unchanged.
        assert result == pytest.approx([10 * 0.5 * 0.5 * 0.2 * 1000.0**2], rel=0.2)
    finally:
        host.close()
        arena.close()
