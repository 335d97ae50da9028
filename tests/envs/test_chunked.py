import math
from dataclasses import replace

import numpy as np
import pytest
from doubles import ScriptedBatch, ScriptedSims, steps_of

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.errors import EnvError
from embodyrl.types import EpisodeStart, ExpertSpec, ObservationOut


def make(*scripts, env_indices=1, relative=True, coef=1.0, **kwargs):
    sims = ScriptedSims(scripts, **kwargs)
    return sims, ChunkedEnv(sims, env_indices, use_rel_reward=relative, reward_coef=coef)


def start(reset_id=0, *, limit=100, ignore=False, seed=0):
    return EpisodeStart(reset_id=reset_id, seed=seed, max_episode_steps=limit, ignore_terminations=ignore)


def chunk(rows, length, first=0.0):
    actions = np.zeros((rows, length, 2), np.float32)
    actions[:, :, 0] = first + np.arange(length)
    return actions


def test_termination_inside_a_chunk_stops_the_env():
    sims, env = make(steps_of([0, 0, 1, 9], success=[2], terminated=[2]))
    env.reset([0], [start(seed=5)])
    result = env.step_chunk([0], chunk(1, 5))
    assert result.valid.tolist() == [[True, True, True, False, False]]
    assert result.terminated.tolist() == [[False, False, True, False, False]]
    assert not result.truncated.any()
    assert result.success.tolist() == [[False, False, True, False, False]]
    assert result.reward.tolist() == [[0, 0, 1, 0, 0]]
    assert result.done.tolist() == [True]
    assert sims.log == [("reset", 0, 0, 5), ("step", 0, 0.0), ("step", 0, 1.0), ("step", 0, 2.0)]


def test_the_time_limit_truncates_across_chunks():
    sims, env = make(steps_of([0.0]))
    env.reset([0], [start(limit=5)])
    first = env.step_chunk([0], chunk(1, 3))
    assert first.valid.all()
    assert not first.done.any()
    second = env.step_chunk([0], chunk(1, 3))
    assert second.valid.tolist() == [[True, True, False]]
    assert second.truncated.tolist() == [[False, True, False]]
    assert not second.terminated.any()
    assert sum(entry[0] == "step" for entry in sims.log) == 5


def test_success_at_the_last_allowed_step_is_terminated_not_truncated():
    _, env = make(steps_of([0, 0, 1], success=[2], terminated=[2]))
    env.reset([0], [start(limit=3)])
    result = env.step_chunk([0], chunk(1, 3))
    assert result.terminated.tolist() == [[False, False, True]]
    assert not result.truncated.any()


def test_episode_with_ignored_terminations_ends_at_the_limit_and_keeps_success():
    _, env = make(steps_of([0, 1, 0, 1, 1], success=[1, 3, 4], terminated=[1, 3, 4]))
    env.reset([0], [start(limit=5, ignore=True)])
    result = env.step_chunk([0], chunk(1, 8))
    assert result.valid.sum() == 5
    assert not result.terminated.any()
    assert result.truncated.tolist()[0] == [False, False, False, False, True, False, False, False]
    assert result.success.tolist()[0][:5] == [False, True, False, True, True]
    assert result.reward.tolist()[0][:5] == [0, 1, -1, 1, 0]


def test_parallel_envs_end_independently():
    """One environment ignores terminations, the other does not, in either order."""
    for ignoring in ((True, False), (False, True)):
        _, env = make(steps_of([0, 1, 1], success=[1, 2], terminated=[1, 2]), env_indices=2)
        env.reset([0, 1], [start(limit=3, ignore=ignores) for ignores in ignoring])
        result = env.step_chunk([0, 1], chunk(2, 4))
        assert result.valid.sum(axis=1).tolist() == [3 if ignores else 2 for ignores in ignoring]
        assert result.terminated.any(axis=1).tolist() == [not ignores for ignores in ignoring]
        assert result.truncated.any(axis=1).tolist() == [*ignoring]


def test_relative_rewards_telescope_over_chunks_of_an_episode():
    rewards = [0.5, 0.25, 2.0, -1.0, 3.0, 0.75]
    _, env = make(steps_of(rewards), coef=2.0)
    for _ in range(2):
        env.reset([0], [start(limit=6)])
        parts = [env.step_chunk([0], chunk(1, 2)).reward for _ in range(3)]
        got = np.concatenate(parts, axis=1)[0]
        assert got.tolist() == [1.0, -0.5, 3.5, -6.0, 8.0, -4.5]
        assert got.sum() == 2.0 * rewards[-1]


def test_absolute_rewards_are_only_scaled():
    _, env = make(steps_of([0.5, 0.5, 1.0]), relative=False, coef=4.0)
    env.reset([0], [start()])
    assert env.step_chunk([0], chunk(1, 3)).reward.tolist() == [[2.0, 2.0, 4.0]]


def test_after_step_is_called_for_executed_steps_only():
    _, env = make(steps_of([1.0], terminated=[0]), steps_of([0.0, 2.0], success=[0]), env_indices=3)
    env.reset([2, 0], [start(0), start(1, limit=2)])
    seen = []
    result = env.step_chunk([2, 0], chunk(2, 3), after_step=lambda *told: seen.append(told))
    assert seen == [(2, False), (0, True), (0, False)], "whether the goal holds after the step, not whether it is over"
    assert result.reward.tolist() == [[1, 0, 0], [0, 2, 0]]
    assert result.terminated[:, 0].tolist() == [True, False]
    assert result.truncated[:, 1].tolist() == [False, True]
    assert (env.instruction(2), env.instruction(0)) == ("do thing 0", "do thing 1")


def test_observation_is_written_into_the_provided_arrays():
    _, env = make(steps_of([0.0]), steps_of([0.0]), env_indices=2)
    env.reset([0, 1], [start(0), start(1)])
    env.step_chunk([1], chunk(1, 3))
    images, state = np.full((2, 1, 4, 6, 3), 99, np.uint8), np.zeros((2, 2), np.float32)
    env.observe([1, 0], images, state)
    assert (images[0] == 3).all()
    assert (images[1] == 0).all()
    assert state.tolist() == [[1, 3], [0, 0]]
    assert (env.render(1) == 3).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_error_names_env_task_and_value(bad):
    _, env = make(steps_of([0.0]), steps_of([0.0, bad]), env_indices=4)
    env.reset([3], [start(1)])
    with pytest.raises(
        EnvError, match=rf"environment 3, task 1 \('do thing 1'\).*step 1.*reward {bad}, expected a finite"
    ):
        env.step_chunk([3], chunk(1, 4))


@pytest.mark.parametrize("shape", [(1, 3, 7), (2, 3, 2), (3, 2), (1, 0, 2)])
def test_wrong_action_shape_is_rejected_before_stepping(shape):
    sims, env = make(steps_of([0.0]))
    env.reset([0], [start()])
    with pytest.raises(EnvError, match=r"environments \[0\] on tasks \[0\].*expected \(1, K >= 1, 2\)"):
        env.step_chunk([0], np.zeros(shape, np.float32))
    assert len(sims.log) == 1


def test_non_finite_action_is_rejected_before_stepping():
    sims, env = make(steps_of([0.0]), env_indices=2)
    env.reset([0, 1], [start(), start()])
    actions = chunk(2, 3)
    actions[1, 2, 1] = np.nan
    with pytest.raises(EnvError, match=r"environment 1.*action 2 of the chunk is nan in dimension 1"):
        env.step_chunk([0, 1], actions)
    assert len(sims.log) == 2


def test_calls_in_the_wrong_order_raise_errors():
    sims, env = make(steps_of([1.0], terminated=[0]), env_indices=2)
    for call in (lambda: env.step_chunk([0], chunk(1, 1)), lambda: env.render(0), lambda: env.instruction(0)):
        with pytest.raises(EnvError, match="environment 0: there is no episode; call reset"):
            call()
    env.reset([0, 1], [start(), start()])
    env.step_chunk([0], chunk(1, 1))
    with pytest.raises(EnvError, match=r"environment 0.*the episode has ended"):
        env.step_chunk([1, 0], chunk(2, 1))
    assert [entry for entry in sims.log if entry[:2] == ("step", 1)] == []
    env.reset([0], [start()])
    assert env.step_chunk([0], chunk(1, 1)).done.all()


def test_invalid_reset_arguments_are_rejected():
    _, env = make(steps_of([0.0]))
    with pytest.raises(EnvError, match=r"reset id 1 is outside 0\.\.0"):
        env.reset([0], [start(1)])
    with pytest.raises(EnvError, match="max_episode_steps is 0"):
        env.reset([0], [start(limit=0)])


def test_close_closes_all_simulators():
    sims, env = make(steps_of([0.0]))
    env.close()
    assert sims.closed


def sight(env, env_index):
    out = ObservationOut(images=np.zeros((1, 4, 6, 3), np.uint8), state=np.zeros(2, np.float32))
    env.observe([env_index], out.images[None], out.state[None])
    assert (out.images == out.state[1]).all()
    return out.state.tolist()


def test_lockstep_truncation_keeps_the_final_observation():
    sims = ScriptedBatch([steps_of([0.0] * 9, success=[0])] * 4)
    env = ChunkedEnv(sims, 3, use_rel_reward=False, reward_coef=1.0)
    env.reset([0, 1], [start(0, limit=2), start(1)])
    told = []
    result = env.step_chunk([0, 1], chunk(2, 5), after_step=lambda *step: told.append(step))
    assert told == [(0, True), (1, True), (0, False), *[(1, False)] * 4]
    assert result.truncated[:, 1].tolist() == [True, False]
    assert sight(env, 0) == [0, 2], "not where the batch has moved it since"
    assert sight(env, 1) == [1, 5]
    env.reset([0, 2], [start(2), start(3)])
    assert sight(env, 0) == [2, 0]
    env.step_chunk([1], chunk(1, 2))
    assert (sight(env, 0), sight(env, 1), sight(env, 2)) == ([2, 0], [1, 7], [3, 0]), "who waits begins again"
    assert [entry[1] for entry in sims.log if entry[0] == "begin"] == [{0: 0, 1: 1}, {0: 2, 2: 3}, {0: 2, 2: 3}]


def test_lockstep_termination_renders_no_final_observation():
    sims = ScriptedBatch([steps_of([0.0, 1.0], terminated=[1]), steps_of([0.0])])
    env = ChunkedEnv(sims, 2, use_rel_reward=False, reward_coef=1.0)
    looked, observe = [], sims.observe
    sims.observe = lambda env_indices, *views: (looked.append(env_indices), observe(env_indices, *views))
    env.reset([0, 1], [start(0), start(1)])
    assert env.step_chunk([0, 1], chunk(2, 4)).terminated[0].tolist() == [False, True, False, False]
    assert looked == []


class Still(ScriptedSims):
    """Simulators whose expert does nothing."""

    def expert(self, env_index):
        return np.zeros(2, np.float32)


def test_expert_noise_depends_on_episode_and_step():
    """Fails if all steps of an episode have equal noise, or if the noise depends on environments and chunks."""
    sims = Still([steps_of([0.0] * 9)] * 2)
    sims.spec = replace(sims.spec, expert=ExpertSpec(tasks=(0, 1)))
    env = ChunkedEnv(sims, 2, use_rel_reward=False, reward_coef=1.0)

    def shaken(env_index, seed, chunks):
        env.reset([env_index], [start(env_index, seed=seed)])
        sims.log.clear()
        for length in chunks:
            assert not env.expert_chunk([env_index], length, noise=0.1)[0].any(), "what is kept is clean"
        return [value for _, _, value in sims.log]

    once = shaken(0, 5, [4])
    assert len(set(once)) == 4
    assert shaken(1, 5, [1, 3]) == once
    assert not set(shaken(0, 6, [4])) & set(once)


def test_expert_labels_do_not_step_the_environment():
    sims = Still([steps_of([0.0] * 9)])
    sims.spec = replace(sims.spec, expert=ExpertSpec(tasks=(0,)))
    env = ChunkedEnv(sims, 1, use_rel_reward=False, reward_coef=1.0)
    env.reset([0], [start()])
    clean, _ = env.expert_chunk([0], 3, noise=0.5, executed=chunk(1, 3, first=4.0))
    assert not clean.any()
    assert [value for _, _, value in sims.log[1:]] == [4.0, 5.0, 6.0], "as they are, without noise"
