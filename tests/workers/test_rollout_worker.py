"""Gripper conversion and padded batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
from text_runs import text_config
from toy_runs import running_crew

from embodyrl.channels.arena import read_observation
from embodyrl.channels.layout import Record, decode_instruction
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.rollout import Rollout
from embodyrl.scheduler.start import build_policy_init
from embodyrl.specs import convert_gripper
from embodyrl.types import GripperConvention
from embodyrl.workers.building import build_policy

POLICY = GripperConvention(open=1.0, closed=0.0)
LIBERO = GripperConvention(open=-1.0, closed=1.0, binary=True)


def converted(values, source, target):
    actions = np.full((len(values), 1, 3), 0.25, np.float32)
    actions[:, 0, -1] = values
    convert_gripper(actions, source, target)
    assert (actions[..., :2] == 0.25).all(), "other dimensions stay"
    return actions[:, 0, -1].tolist()


def test_binary_gripper_receives_open_or_closed_values():
    assert converted([1.0, 0.9, 0.51, 0.49, 0.0, -0.2], POLICY, LIBERO) == [-1, -1, -1, 1, 1, 1]


def test_continuous_gripper_is_interpolated():
    target = GripperConvention(open=0.08, closed=0.0)
    np.testing.assert_allclose(converted([1.0, 0.5, 0.0], POLICY, target), [0.08, 0.04, 0.0])


def test_actions_without_gripper_convention_are_unchanged():
    assert converted([0.3], None, LIBERO) == converted([0.3], POLICY, None) == [np.float32(0.3)]


def test_gripper_index_is_configurable():
    actions = np.array([[[1.0, 0.2, 0.3]], [[0.0, 0.2, 0.3]]], np.float32)
    convert_gripper(actions, GripperConvention(open=1.0, closed=0.0, index=0), LIBERO)
    assert actions[:, 0, 2].tolist() == [-1.0, 1.0]


def test_gripper_conversion_round_trips():
    there = np.array(converted([1.0, 0.0], POLICY, LIBERO), np.float32)
    assert converted(there, LIBERO, POLICY) == [1.0, 0.0]


def test_batch_padding_changes_results_by_rounding_only(tmp_path):
    seen = []
    for deterministic in ("true", "false"):
        with running_crew(tmp_path, f"runner.deterministic={deterministic}", "env.kwargs.echo=true") as stage:
            plan = train_episodes(stage.run_plan.cfg, stage.run_plan.env, 0, counts_chunk_steps=False)
            rollout = stage.workers.scheduler.collect(Rollout(plan))
            first = [e.records[0] for e in rollout.episodes]
            arena = stage.workers.arena
            seen.append((arena[Record.action][first].copy(), arena[Record.logprob][first].copy()))
    np.testing.assert_allclose(seen[0][0], seen[1][0], atol=1e-5)
    np.testing.assert_allclose(seen[0][1], seen[1][1], atol=1e-5)


def test_each_chunk_uses_new_noise_and_the_gripper_convention_of_the_simulator(tmp_path):
    with running_crew(tmp_path, "env.kwargs.echo=true") as stage:
        plan = train_episodes(stage.run_plan.cfg, stage.run_plan.env, 0, counts_chunk_steps=False)
        rollout = stage.workers.scheduler.collect(Rollout(plan))
        arena, chunks = stage.workers.arena, [episode.records for episode in rollout.episodes]
        assert {len(records) for records in chunks} == {2}
        first, second = (arena[Record.tokens][[records[k] for records in chunks]] for k in (0, 1))
        assert (first == second).mean() < 0.2, "the same noise gives nearly the same 256 bins"
        gripper = arena[Record.action][np.concatenate(chunks)][..., -1]
        assert set(np.unique(gripper)) == {-1.0, 1.0}, "the policy speaks of 0 to 1, a binary receiver of two values"


@pytest.mark.parametrize("deterministic", [False, True])
def test_reply_and_token_count_are_written_to_the_record_of_the_prompt(tmp_path, deterministic):
    """Also if the environments of a stage have the last rows of a fixed-size batch."""
    from embodyrl.policies.causal_lm.policy import CausalLMPolicy

    words = (f"runner.deterministic={deterministic}".lower(), "rollout.pipeline_stage_num=2", "rollout.logprobs=1")
    cfg = text_config(tmp_path, *words, "algorithm.group_size=2", task="length")
    with running_crew(tmp_path, cfg=cfg) as stage:
        plan = train_episodes(cfg, stage.run_plan.env, 0, counts_chunk_steps=False)
        rollout = stage.workers.scheduler.collect(Rollout(plan))
        arena, records = stage.workers.arena, np.concatenate([e.records for e in rollout.episodes])
        policy = build_policy(build_policy_init(stage.run_plan, arena, None))
        assert isinstance(policy, CausalLMPolicy)
        prompts, tokens = policy.reader(read_observation(arena, records)), arena[Record.tokens][records]
        said = (tokens >= 0).sum(1)
        costs = arena[Record.cost][records]
        assert costs.tolist() == [len(prompt) + count for prompt, count in zip(prompts, said.tolist(), strict=True)]
        assert len(set(costs.tolist())) > 2
        for record, own in zip(records, tokens, strict=True):
            words = policy.tokenizer.decode(own[own >= 0], skip_special_tokens=True)
            assert decode_instruction(arena[Record.reply][record]) == words
            probable = json.loads(decode_instruction(arena[Record.top][record]))
            assert [choices[0][0] for choices in probable] == [policy.tokenizer.decode([t]) for t in own[own >= 0]]
        np.testing.assert_array_equal(arena[Record.cut_off][records], policy._find_cut_off_replies(tokens))
        assert len({*arena[Record.cut_off][records].tolist()}) == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_final_values_are_written_to_their_records(tmp_path, deterministic):
    words = ("algorithm=ppo", "env.train.max_steps_per_rollout_epoch=12", "env.train.total_num_envs=8")
    with running_crew(tmp_path, *words, f"runner.deterministic={deterministic}".lower()) as stage:
        arena, policy = stage.workers.arena, build_policy(build_policy_init(stage.run_plan, stage.workers.arena, None))
        rollout = stage.workers.scheduler.collect(
            Rollout(train_episodes(stage.run_plan.cfg, stage.run_plan.env, 0, counts_chunk_steps=True))
        )
        finals = np.array([e.final_record for e in rollout.episodes if e.final_record >= 0])
        assert len(finals) >= 8
        expected = policy.values(read_observation(arena, finals))
        assert len(set(expected[:, 0].tolist())) > 4
        np.testing.assert_allclose(arena[Record.value][finals], expected, atol=1e-5)
