"""Grippers between conventions, and padded batches."""

from __future__ import annotations

import numpy as np
from toy_runs import running_crew

from embodyrl.channels.layout import Record
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.rollout import Rollout
from embodyrl.specs import convert_gripper
from embodyrl.types import GripperConvention

POLICY = GripperConvention(open=1.0, closed=0.0)
LIBERO = GripperConvention(open=-1.0, closed=1.0, binary=True)


def converted(values, source, target):
    actions = np.full((len(values), 1, 3), 0.25, np.float32)
    actions[:, 0, -1] = values
    convert_gripper(actions, source, target)
    assert (actions[..., :2] == 0.25).all(), "other dimensions stay"
    return actions[:, 0, -1].tolist()


def test_a_binary_receiver_gets_its_open_or_its_closed():
    assert converted([1.0, 0.9, 0.51, 0.49, 0.0, -0.2], POLICY, LIBERO) == [-1, -1, -1, 1, 1, 1]


def test_a_continuous_receiver_gets_the_value_between():
    target = GripperConvention(open=0.08, closed=0.0)
    np.testing.assert_allclose(converted([1.0, 0.5, 0.0], POLICY, target), [0.08, 0.04, 0.0])


def test_without_a_convention_nothing_changes():
    assert converted([0.3], None, LIBERO) == converted([0.3], POLICY, None) == [np.float32(0.3)]


def test_there_and_back_again():
    there = np.array(converted([1.0, 0.0], POLICY, LIBERO), np.float32)
    assert converted(there, LIBERO, POLICY) == [1.0, 0.0]


def test_padding_to_a_fixed_batch_changes_nothing_but_rounding(tmp_path):
    seen = []
    for deterministic in ("true", "false"):
        with running_crew(tmp_path, f"runner.deterministic={deterministic}", "env.kwargs.echo=true") as stage:
            plan = train_episodes(stage.blueprint.cfg, stage.blueprint.env, 0, counts_chunk_steps=False)
            rollout = stage.workers.scheduler.collect(Rollout(plan))
            first = [e.records[0] for e in rollout.episodes]
            arena = stage.workers.arena
            seen.append((arena[Record.tokens][first].copy(), arena[Record.logprob][first].copy()))
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    np.testing.assert_allclose(seen[0][1], seen[1][1], atol=1e-5)


def test_every_chunk_draws_anew_and_its_gripper_speaks_the_simulators_convention(tmp_path):
    with running_crew(tmp_path, "env.kwargs.echo=true") as stage:
        plan = train_episodes(stage.blueprint.cfg, stage.blueprint.env, 0, counts_chunk_steps=False)
        rollout = stage.workers.scheduler.collect(Rollout(plan))
        arena, chunks = stage.workers.arena, [episode.records for episode in rollout.episodes]
        assert {len(records) for records in chunks} == {2}
        first, second = (arena[Record.tokens][[records[k] for records in chunks]] for k in (0, 1))
        assert (first == second).mean() < 0.2, "the same noise gives nearly the same 256 bins"
        gripper = arena[Record.action][np.concatenate(chunks)][..., -1]
        assert set(np.unique(gripper)) == {-1.0, 1.0}, "the policy speaks of 0 to 1, a binary receiver of two values"
