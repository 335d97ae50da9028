import numpy as np
import pytest
from doubles import ScriptedBatch, ScriptedSims, steps_of

from embodyrl.envs.delay import DelayedEnv, check_delay
from embodyrl.envs.reward import RewardStep, StepRewardSettings
from embodyrl.errors import ConfigError, EnvError
from embodyrl.types import EpisodeStart, FloatArray


def make(*scripts, low=0, high, env_indices=1, reward=None):
    sims = ScriptedSims(scripts or (steps_of([0.0]),))
    return sims, DelayedEnv(sims, env_indices, delay=(low, high), use_rel_reward=False, reward_coef=1.0, reward=reward)


def start(reset_id=0, *, limit=100, seed=0):
    return EpisodeStart(reset_id=reset_id, seed=seed, max_episode_steps=limit)


def chunk(number: int, length: int = 8) -> FloatArray:
    """Return chunk `number`, whose action i is 100 * number + i."""
    actions = np.zeros((1, length, 2), np.float32)
    actions[0, :, 0] = 100 * number + np.arange(length)
    return actions


def executed(sims) -> list[float]:
    return [entry[2] for entry in sims.log if entry[0] == "step"]


def seen(env, env_index=0):
    images = np.zeros((1, 1, 4, 6, 3), np.uint8)
    state = np.zeros((1, env.spec.state_dim), np.float32)
    env.observe([env_index], images, state)
    assert (images == state[0, 1]).all(), "image and state of one step"
    return state[0]


def drawn(number: int, *, low: int = 0, high: int, seed: int = 0, reset_id: int = 0) -> int:
    """Return the delay of chunk `number` of an episode."""
    return int(np.random.default_rng([seed, reset_id, number]).integers(low, high + 1)) if number else 0


@pytest.mark.parametrize(
    ("delay", "table"),
    [
        # chunk, action of each tick; a chunk has 8 actions and the policy acts every 8 - delay ticks
        (1, [*range(8), *range(101, 108), *range(201, 208)]),
        (3, [*range(8), *range(103, 108), *range(203, 208)]),
        (4, [*range(8), *range(104, 108), *range(204, 208)]),
    ],
)
def test_executed_actions_match_the_documented_table(delay, table):
    sims, env = make(low=delay, high=delay)
    env.reset([0], [start()])
    observed = [int(seen(env)[1])]
    for number in range(3):
        env.step_chunk([0], chunk(number))
        observed.append(int(seen(env)[1]))
    assert executed(sims) == table
    period = 8 - delay
    assert observed == [0, period, 2 * period, 3 * period], "every observation is the delay old"


def test_only_actions_of_the_current_chunk_are_valid_and_rewarded():
    script = steps_of(np.arange(100.0))
    _, env = make(script, low=2, high=2)
    env.reset([0], [start()])
    first, second = env.step_chunk([0], chunk(0)), env.step_chunk([0], chunk(1))
    assert first.valid.tolist() == [[True] * 8]
    assert second.valid.tolist() == [[False] * 2 + [True] * 6]
    assert first.reward.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert second.reward.tolist() == [[0, 0, 8, 9, 10, 11, 12, 13]]


def test_episode_end_during_the_delay_drops_the_remaining_actions():
    script = steps_of([0.0] * 20, success=[6], terminated=[6])
    sims, env = make(script, low=2, high=2)
    env.reset([0], [start()])
    result = env.step_chunk([0], chunk(0))
    assert result.terminated[0].tolist() == [False] * 6 + [True, False]
    assert executed(sims) == [0, 1, 2, 3, 4, 5, 6]
    with pytest.raises(EnvError, match="ended"):
        env.step_chunk([0], chunk(1))
    env.reset([0], [start()])
    env.step_chunk([0], chunk(7))
    assert executed(sims)[7:] == [700, 701, 702, 703, 704, 705, 706], "the first chunk of an episode has no delay"


def test_the_time_limit_counts_all_executed_steps():
    _, env = make(low=2, high=2)
    env.reset([0], [start(limit=9)])
    first, second = env.step_chunk([0], chunk(0)), env.step_chunk([0], chunk(1))
    assert not first.done[0]
    assert second.truncated[0].tolist() == [False] * 2 + [True] + [False] * 5


def test_envs_at_different_episode_steps_run_in_one_call():
    sims, env = make(low=2, high=2, env_indices=2)
    env.reset([0], [start()])
    env.step_chunk([0], chunk(0))
    env.reset([1], [start()])
    result = env.step_chunk([0, 1], np.concatenate([chunk(1), chunk(0)]))
    assert result.valid.sum(1).tolist() == [6, 8]
    of_slot = {env_index: [e[2] for e in sims.log if e[:2] == ("step", env_index)] for env_index in (0, 1)}
    assert of_slot == {0: [*range(8), *range(102, 108)], 1: [*range(8)]}


def test_random_delays_execute_each_env_step_once():
    sims, env = make(low=0, high=3)
    env.reset([0], [start(seed=3, limit=1000)])
    valid = [env.step_chunk([0], chunk(number)).valid[0] for number in range(30)]
    begins = [int(row.argmax()) for row in valid]
    assert begins == [drawn(number, high=3, seed=3) for number in range(30)]
    assert {*begins} == {0, 1, 2, 3}
    ticks = [100 * number + int(i) for number, row in enumerate(valid) for i in np.flatnonzero(row)]
    assert executed(sims) == ticks
    places = [5 * (tick // 100) + tick % 100 for tick in ticks]
    assert places == list(range(len(places))), "action i of chunk n is executed at step 5 n + i"


def test_random_delays_depend_on_the_initial_state():
    """Two environments with the same seed and other reset ids."""
    _, env = make(*[steps_of([0.0])] * 2, low=0, high=3, env_indices=2)
    env.reset([0, 1], [start(0, limit=1000), start(1, limit=1000)])
    begins = [env.step_chunk([0, 1], np.concatenate([chunk(n)] * 2)).valid.argmax(1).tolist() for n in range(12)]
    assert begins == [[drawn(n, high=3, reset_id=reset) for reset in (0, 1)] for n in range(12)]
    assert any(first != second for first, second in begins)


def test_chunks_too_short_for_the_delay_are_rejected():
    spec = ScriptedSims((steps_of([0.0]),)).spec
    check_delay(spec, 4, 8)
    with pytest.raises(ConfigError, match=r"model\.num_action_chunks to 10"):
        check_delay(spec, 5, 8)


def test_batched_simulators_are_rejected_with_a_delay():
    with pytest.raises(ConfigError, match="steps all parallel environments together"):
        check_delay(ScriptedBatch((steps_of([0.0]),)).spec, 1, 8)


def test_after_step_covers_the_env_steps_of_the_delay():
    _, env = make(low=2, high=2, env_indices=2)
    env.reset([0], [start()])
    executed: list[tuple[int, bool]] = []
    env.step_chunk([0], chunk(0), after_step=lambda *one: executed.append(one))
    assert [env_index for env_index, _ in executed] == [0] * 8


def test_observation_of_one_env_is_independent_of_other_envs():
    _, env = make(low=2, high=2, env_indices=2)
    env.reset([0, 1], [start(), start()])
    env.step_chunk([1], chunk(0))
    assert (seen(env, 0)[1], seen(env, 1)[1]) == (0, 6)


def near(step: RewardStep) -> dict[str, float]:
    return {"near": 1.0}


near.components = ("near",)  # type: ignore[attr-defined]


def never(step: RewardStep) -> float:
    raise RuntimeError("no reward today")


def test_reward_components_and_errors_cover_both_segments_of_a_delayed_chunk():
    for name in ("near", "never"):
        _, env = make(steps_of(np.zeros(9)), low=2, high=2, reward=StepRewardSettings(path=f"test_delayed:{name}"))
        env.reset([0], [start()])
        result = env.step_chunk([0], chunk(0))
        assert result.components[0, -1] == (8 if name == "never" else 0)
        assert bool(result.reward_errors) == (name == "never")
        assert name == "never" or result.components[0, 0] == 8
