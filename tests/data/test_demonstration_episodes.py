"""Episode lists for collecting demonstrations."""

from __future__ import annotations

from toy_env import toy_spec
from toy_runs import TOY_COLLECT

from embodyrl.commands.collect import list_demonstration_episodes
from embodyrl.plan.config import load_config

ENV = toy_spec(3)  # reset ids 0..11, four per task


def test_demonstrations_use_only_states_of_the_split():
    words = ("env.kwargs.tasks=3", "collect.out=demos", "env.train.state_ids=[1,2]")
    plan = list_demonstration_episodes(
        load_config("collect", [*TOY_COLLECT, *words]), ENV, [(1, trial) for trial in range(8)]
    )
    assert {e.reset_id for e in plan.episodes} == {5, 6}


def test_demonstrations_reshuffle_states_on_each_pass():
    """Each pass over a task has another order, each trial its own seed and noise."""
    cfg = load_config("collect", [*TOY_COLLECT, "env.kwargs.tasks=3", "collect.out=demos"])
    plan = [*list_demonstration_episodes(cfg, ENV, [(task, trial) for task in (0, 1) for trial in range(24)]).episodes]
    laps = [[e.reset_id for e in plan[start : start + 4]] for start in range(0, 48, 4)]
    assert [sorted(lap) for lap in laps] == [[0, 1, 2, 3]] * 6 + [[4, 5, 6, 7]] * 6
    assert len({tuple(lap) for lap in laps[:6]}) > 1
    assert len({e.seed for e in plan}) == len({e.noise_seed for e in plan}) == 48
