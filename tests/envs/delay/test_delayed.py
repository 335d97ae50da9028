from dataclasses import replace

import numpy as np
import pytest
from doubles import ScriptedBatch, ScriptedSims, steps_of

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.delay import DelayedEnv, Timing, with_delay, without_committed
from embodyrl.envs.reward import RewardStep, StepRewardSettings
from embodyrl.errors import ConfigError, EnvError
from embodyrl.types import EpisodeStart, ExpertSpec, FloatArray


def make(*scripts, low=0, high=0, overlap, observed=False, slots=1):
    sims = ScriptedSims(scripts or (steps_of([0.0]),))
    inner = ChunkedEnv(sims, slots, use_rel_reward=False, reward_coef=1.0)
    return sims, DelayedEnv(inner, Timing(low=low, high=high, overlap=overlap, observed=observed), slots)


def start(reset_id=0, *, limit=100, seed=0):
    return EpisodeStart(reset_id=reset_id, seed=seed, max_episode_steps=limit)


def chunk(number: int, length: int = 8) -> FloatArray:
    """Return chunk `number`, whose action i is 100 * number + i."""
    actions = np.zeros((1, length, 2), np.float32)
    actions[0, :, 0] = 100 * number + np.arange(length)
    return actions


def executed(sims) -> list[float]:
    return [entry[2] for entry in sims.log if entry[0] == "step"]


def seen(env, slot=0):
    images = np.zeros((1, 1, 4, 6, 3), np.uint8)
    state = np.zeros((1, env.spec.state_dim), np.float32)
    env.observe([slot], images, state)
    assert (images == state[0, 1]).all(), "image and state of one step"
    return state[0]


@pytest.mark.parametrize(
    ("delay", "overlap", "table"),
    [
        # chunk, action of each tick; a chunk has 8 actions and the policy acts every 8 - overlap ticks
        (2, 4, [0, 1, 2, 3, 4, 5, 102, 103, 104, 105, 202, 203, 204, 205]),
        (0, 4, [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]),
        (4, 4, [0, 1, 2, 3, 4, 5, 6, 7, 104, 105, 106, 107, 204, 205, 206, 207]),
        (1, 6, [0, 1, 2, 101, 102, 201, 202]),
        (3, 3, [0, 1, 2, 3, 4, 5, 6, 7, 103, 104, 105, 106, 107, 203, 204, 205, 206, 207]),
    ],
)
def test_executed_actions_match_the_documented_table(delay, overlap, table):
    sims, env = make(low=delay, high=delay, overlap=overlap)
    env.reset([0], [start()])
    observed = [int(seen(env)[1])]
    for number in range(3):
        env.step_chunk([0], chunk(number))
        observed.append(int(seen(env)[1]))
    assert executed(sims) == table
    period = 8 - overlap
    assert observed == [0, period, 2 * period, 3 * period], "every observation is the delay old"


def test_only_actions_of_the_current_chunk_are_valid_and_rewarded():
    script = steps_of(np.arange(100.0))
    _, env = make(script, low=2, high=2, overlap=4)
    env.reset([0], [start()])
    first, second = env.step_chunk([0], chunk(0)), env.step_chunk([0], chunk(1))
    assert first.valid.tolist() == [[True] * 6 + [False] * 2]
    assert second.valid.tolist() == [[False] * 2 + [True] * 4 + [False] * 2]
    assert first.reward.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0]]
    assert second.reward.tolist() == [[0, 0, 6, 7, 8, 9, 0, 0]]


def test_episode_end_during_the_delay_drops_the_remaining_actions():
    script = steps_of([0.0] * 20, success=[4], terminated=[4])
    sims, env = make(script, low=2, high=2, overlap=4)
    env.reset([0], [start()])
    result = env.step_chunk([0], chunk(0))
    assert result.terminated[0].tolist() == [False] * 4 + [True] + [False] * 3
    assert executed(sims) == [0, 1, 2, 3, 4]
    with pytest.raises(EnvError, match="ended"):
        env.step_chunk([0], chunk(1))
    env.reset([0], [start()])
    env.step_chunk([0], chunk(7))
    assert executed(sims)[5:] == [700, 701, 702, 703, 704], "the first chunk of an episode has no delay"


def test_the_time_limit_counts_all_executed_steps():
    _, env = make(low=2, high=2, overlap=4)
    env.reset([0], [start(limit=7)])
    first, second = env.step_chunk([0], chunk(0)), env.step_chunk([0], chunk(1))
    assert not first.done[0]
    assert second.truncated[0].tolist() == [False] * 2 + [True] + [False] * 5


def test_slots_at_different_episode_steps_run_in_one_call():
    sims, env = make(low=2, high=2, overlap=4, slots=2)
    env.reset([0], [start()])
    env.step_chunk([0], chunk(0))
    env.reset([1], [start()])
    both = np.concatenate([chunk(1), chunk(0)])
    result = env.step_chunk([0, 1], both)
    assert result.valid.sum(1).tolist() == [4, 6]
    of_slot = {slot: [e[2] for e in sims.log if e[:2] == ("step", slot)] for slot in (0, 1)}
    assert of_slot == {0: [0, 1, 2, 3, 4, 5, 102, 103, 104, 105], 1: [0, 1, 2, 3, 4, 5]}


def test_committed_actions_are_the_rest_of_the_previous_chunk():
    _, env = make(low=2, high=2, overlap=4, observed=True)
    assert env.spec.state_dim == 2 + 2 + 4 * 2
    assert env.spec.own_state_dim == 2
    env.reset([0], [start()])
    assert seen(env)[2:].tolist() == [0.0] * 10, "no earlier chunk"
    env.step_chunk([0], chunk(0))
    state = seen(env)
    assert state[2:4].tolist() == [2, 4], "delay and number of actions left"
    assert state[4:].reshape(4, 2)[:, 0].tolist() == [4, 5, 6, 7]
    env.reset([0], [start()])
    assert seen(env)[2:].tolist() == [0.0] * 10


def test_random_delays_depend_on_the_episode_and_the_observed_delay_is_their_maximum():
    timing = Timing(low=0, high=3, overlap=4, observed=True)
    pairs = [timing.delays(5, 1, number) for number in range(40)]
    assert pairs == [timing.delays(5, 1, number) for number in range(40)]
    drawn, reported = zip(*pairs, strict=True)
    assert set(drawn[1:]) == {0, 1, 2, 3}
    assert drawn[0] == 0
    assert reported[1] == 3, "before the first measured delay: the largest"
    for number in range(2, 40):
        assert reported[number] == max(drawn[max(1, number - 10) : number])
    assert drawn != tuple(timing.delays(6, 1, number)[0] for number in range(40))


@pytest.mark.parametrize("observed", [False, True])
def test_random_delays_execute_each_env_step_once(observed):
    sims, env = make(low=0, high=3, overlap=4, observed=observed)
    env.reset([0], [start(seed=3, limit=1000)])
    valid = [env.step_chunk([0], chunk(number)).valid[0] for number in range(30)]
    begins = [int(row.argmax()) for row in valid]
    timing = Timing(low=0, high=3, overlap=4, observed=observed)
    expected = [timing.delays(3, 0, number) for number in range(30)]
    assert begins == [max(pair) if observed and number else pair[0] for number, pair in enumerate(expected)]
    ticks = [100 * number + int(i) for number, row in enumerate(valid) for i in np.flatnonzero(row)]
    assert executed(sims) == ticks
    places = [4 * (tick // 100) + tick % 100 for tick in ticks]
    assert places == list(range(len(places))), "action i of chunk n is executed at step 4 n + i"


@pytest.mark.parametrize(("overlap", "delay"), [(4, 5), (2, 3), (8, 0), (5, 4)])
def test_chunks_too_short_for_the_delay_are_refused(overlap, delay):
    sims, env = make(low=delay, high=delay, overlap=overlap)
    env.reset([0], [start()])
    with pytest.raises(EnvError, match="too short"):
        env.step_chunk([0], chunk(0))
    with pytest.raises(ConfigError, match=r"model\.num_action_chunks to"):
        with_delay(sims.spec, Timing(low=delay, high=delay, overlap=overlap, observed=False), 8)


def test_batched_simulators_are_refused_with_a_delay():
    spec = ScriptedBatch((steps_of([0.0]),)).spec
    with pytest.raises(ConfigError, match="can only step all its slots at once"):
        with_delay(spec, Timing(low=1, high=1, overlap=4, observed=False), 8)


def test_spec_with_delay_is_not_extended_again():
    spec = ScriptedSims((steps_of([0.0]),)).spec
    timing = Timing(low=1, high=1, overlap=4, observed=True)
    once = with_delay(spec, timing, 8)
    assert with_delay(once, timing, 8) == once
    assert without_committed(once) == replace(spec, committed=None)


def test_environment_with_a_delay_does_not_save_states():
    spec = ScriptedSims((steps_of([0.0]),)).spec
    saves = replace(spec, simulator=replace(spec.simulator, saves_state=True))
    assert not with_delay(saves, Timing(low=1, high=1, overlap=4, observed=False), 8).simulator.saves_state


def test_after_step_covers_the_env_steps_of_the_delay():
    _, env = make(low=2, high=2, overlap=4, slots=2)
    env.reset([0], [start()])
    executed: list[tuple[int, bool]] = []
    env.step_chunk([0], chunk(0), after_step=lambda *one: executed.append(one))
    assert [slot for slot, _ in executed] == [0] * 6


def test_observation_of_one_slot_is_independent_of_the_others():
    _, env = make(low=2, high=2, overlap=4, slots=2)
    env.reset([0, 1], [start(), start()])
    env.step_chunk([1], chunk(0))
    assert (seen(env, 0)[1], seen(env, 1)[1]) == (0, 4)


def near(step: RewardStep) -> dict[str, float]:
    return {"near": 1.0}


near.components = ("near",)  # type: ignore[attr-defined]


def never(step: RewardStep) -> float:
    raise RuntimeError("no reward today")


def test_reward_components_and_errors_cover_both_segments_of_a_delayed_chunk():
    sims = ScriptedSims([steps_of(np.zeros(9))])
    reward = StepRewardSettings(path="test_delayed:near")
    for path, name in ((reward, "parts"), (StepRewardSettings(path="test_delayed:never"), "errors")):
        inner = ChunkedEnv(sims, 1, use_rel_reward=False, reward_coef=1.0, reward=path)
        env = DelayedEnv(inner, Timing(low=2, high=2, overlap=4, observed=False), 1)
        env.reset([0], [start()])
        result = env.step_chunk([0], chunk(0))
        assert result.components[0, -1] == (6 if name == "errors" else 0)
        assert bool(result.reward_errors) == (name == "errors")
        assert name == "errors" or result.components[0, 0] == 6


def test_delayed_environment_forwards_solved_at_reset_and_expert_actions():
    sims = ScriptedSims([steps_of([0.0])])
    sims.spec = replace(sims.spec, expert=ExpertSpec(tasks=(0,)))
    sims.expert = lambda slot: np.zeros(2, np.float32)
    sims.solved = {0}
    inner = ChunkedEnv(sims, 1, use_rel_reward=False, reward_coef=1.0)
    env = DelayedEnv(inner, Timing(low=2, high=2, overlap=4, observed=False), 1)
    env.reset([0], [start()])
    assert env.solved_at_reset([0]) == [0]
    env.expert_chunk([0], 3, noise=0.0)
    assert seen(env)[1] == 3


def test_random_delays_depend_on_the_initial_state():
    """Two slots with the same seed and other reset ids."""
    timing = Timing(low=0, high=3, overlap=4, observed=False)
    _, env = make(*[steps_of([0.0])] * 2, low=0, high=3, overlap=4, slots=2)
    env.reset([0, 1], [start(0, limit=1000), start(1, limit=1000)])
    begins = [env.step_chunk([0, 1], np.concatenate([chunk(n)] * 2)).valid.argmax(1).tolist() for n in range(12)]
    assert begins == [[timing.delays(0, reset, n)[0] for reset in (0, 1)] for n in range(12)]
    assert any(first != second for first, second in begins)
