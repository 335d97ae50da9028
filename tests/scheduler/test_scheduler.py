"""Rollouts of the toy environment with the tiny policy in one process."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from toy_runs import Stage, running_crew

from embodyrl.channels.arena import get_record_indices
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import EnvRequest
from embodyrl.errors import WorkerError
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.rollout import Rollout, RolloutResult


def collect(stage: Stage, step: int = 0) -> RolloutResult:
    algorithm = stage.run_plan.algorithm
    assert algorithm is not None
    plan = train_episodes(
        stage.run_plan.cfg, stage.run_plan.env, step, counts_chunk_steps=algorithm.estimator.counts_chunk_steps
    )
    stage.workers.scheduler.publish(step)
    return stage.workers.scheduler.collect(Rollout(plan))


def assert_all_free(stage: Stage, rollout: RolloutResult) -> None:
    stage.workers.scheduler.release(rollout)
    assert stage.workers.arena.num_free == stage.workers.arena.capacity


def facts(rollout: RolloutResult) -> list[tuple]:
    return [
        (e.spec, e.length, e.terminated, e.truncated, e.cut, e.episode_return, e.valid.tolist(), e.instruction)
        for e in rollout.episodes
    ]


def test_episodes_return_in_plan_order_and_records_are_freed(tmp_path):
    with running_crew(tmp_path, "algorithm.rollout_epoch=3", "env.kwargs.tasks=3") as stage:
        for step in range(2):
            rollout = collect(stage, step)
            assert [e.spec.episode_id for e in rollout.episodes] == list(range(12))
            assert rollout.dropped == 0
            assert rollout.stats.env_steps == sum(e.length for e in rollout.episodes)
            held = get_record_indices(np.concatenate(list(rollout.record_refs.values()))).tolist()
            assert sorted(held) == sorted(r for e in rollout.episodes for r in e.records)
            assert len(set(held)) == len(held)
            assert stage.workers.arena.num_free == stage.workers.arena.capacity - len(held)
            assert (stage.workers.arena[Record.version][held] == step).all()
            assert {e.instruction for e in rollout.episodes} <= set(stage.run_plan.env.tasks)
            assert_all_free(stage, rollout)


def test_success_terminates_and_the_time_limit_truncates(tmp_path):
    with running_crew(tmp_path, "env.train.total_num_envs=16", "env.kwargs.goal=0.5") as stage:
        rollout = collect(stage)
    ends = {(e.terminated, e.truncated, e.success_once) for e in rollout.episodes}
    assert ends == {(True, False, True), (False, True, False)}
    for e in rollout.episodes:
        assert not e.cut
        assert e.length == (8 if e.truncated else int(np.flatnonzero(e.success[e.valid])[0]) + 1)
        assert not e.bootstrap_value.any()


def test_episodes_with_ignored_terminations_run_to_the_time_limit(tmp_path):
    words = ("env.train.total_num_envs=16", "env.kwargs.goal=0.5", "env.train.ignore_terminations=true")
    with running_crew(tmp_path, *words) as stage:
        rollout = collect(stage)
    assert {(e.terminated, e.truncated, e.length) for e in rollout.episodes} == {(False, True, 8)}
    assert len({e.success_once for e in rollout.episodes}) == 2


def test_rewards_stay_aligned_with_actions(tmp_path):
    words = ("env.kwargs.echo=true", "env.use_rel_reward=false", "algorithm.rollout_epoch=4", "env.kwargs.tasks=3")
    with running_crew(tmp_path, *words) as stage:
        rollout = collect(stage)
        for e in rollout.episodes:
            assert e.length == 8
            np.testing.assert_array_equal(e.reward, stage.workers.arena[Record.action][e.records][..., 0])


def test_episodes_are_independent_of_pipeline_stages(tmp_path):
    seen = []
    for stages in (1, 2, 4):
        words = (f"rollout.pipeline_stage_num={stages}", "runner.deterministic=true", "algorithm.rollout_epoch=2")
        with running_crew(tmp_path, *words, "env.kwargs.tasks=3", "env.kwargs.goal=0.7") as stage:
            rollout = collect(stage)
            logprob = [stage.workers.arena[Record.logprob][e.records].tolist() for e in rollout.episodes]
            seen.append((facts(rollout), logprob))
    assert seen[0] == seen[1] == seen[2]
    assert any(e[1] < 8 for e in seen[0][0]), "some episode must end early, or this shows nothing"


def test_episode_results_are_schedule_independent(tmp_path):
    """Also with timing-dependent assignment of episodes to environments."""
    lists = []
    for stages, num_envs in ((1, 4), (2, 4), (4, 4), (2, 8)):
        words = (f"rollout.pipeline_stage_num={stages}", f"env.train.total_num_envs={num_envs}", "env.kwargs.tasks=3")
        with running_crew(tmp_path, *words, f"algorithm.rollout_epoch={16 // num_envs}") as stage:
            lists.append([e.spec for e in collect(stage).episodes])
    assert len(lists[0]) == 16
    assert lists[0] == lists[1] == lists[2] == lists[3]


def test_rollout_duration_includes_the_time_before_other_rollouts_finish(tmp_path):
    with running_crew(tmp_path, "algorithm.max_staleness=1") as stage:
        cfg, env, rollouts = stage.run_plan.cfg, stage.run_plan.env, stage.workers.scheduler
        rollouts.publish(0)
        first, second = (
            rollouts.open(Rollout(train_episodes(cfg, env, s, counts_chunk_steps=False))) for s in range(2)
        )
        assert rollouts.finish(first).stats.span_s > 0
        began = time.perf_counter()
        rollouts.run_until(lambda: second.done)
        alone = time.perf_counter() - began
        tally = rollouts.finish(second).stats
        assert tally.env_steps > 0
        assert tally.span_s >= alone + tally.wall_s


PPO = ("algorithm=ppo", "env.train.max_steps_per_rollout_epoch=12")


def test_step_quota_interrupts_episodes_and_bootstraps(tmp_path):
    with running_crew(tmp_path, *PPO, "env.kwargs.goal=0.5", "env.train.total_num_envs=8") as stage:
        rollout = collect(stage)
        chunks = sum(len(e.records) for e in rollout.episodes)
        assert chunks == 8 * 3, "each environment runs exactly its quota"
        before: Counter[int] = Counter()
        for e in rollout.episodes:
            env_index = e.spec.episode_id // 3  # at most three episodes in three chunks
            assert e.counted == (3 - before[env_index] >= 2), "an episode of 8 steps takes two chunks"
            before[env_index] += len(e.records)
        cut = [e for e in rollout.episodes if e.cut]
        assert cut, "12 steps do not divide into episodes of 8"
        by_end = {(e.terminated, e.truncated): e for e in rollout.episodes if not e.cut}
        assert set(by_end) == {(True, False), (False, True)}
        for e in rollout.episodes:
            assert e.value.shape == (len(e.records), 1)
            assert (e.final_record >= 0) == (not e.terminated)
            if e.terminated:
                assert not e.bootstrap_value.any()
            else:
                assert e.truncated
                assert e.bootstrap_value == stage.workers.arena[Record.value][e.final_record]
        values = {float(e.bootstrap_value[0]) for e in rollout.episodes if not e.terminated}
        assert len(values) > 1, "values of different observations differ"
        assert_all_free(stage, rollout)


def test_limit_of_loaded_tasks_is_never_exceeded(tmp_path):
    words = ("env.kwargs.tasks=3", "env.kwargs.task_limit=1", "env.train.total_num_envs=6", "algorithm.rollout_epoch=2")
    with running_crew(tmp_path, *words) as stage:
        running: dict[int, int] = {}
        together: list[set[int]] = []
        num_envs = stage.workers.scheduler._envs.each

        def look(_):
            running.clear()
            running.update({s.index: s.episode.task_id for s in num_envs if s.episode is not None})
            together.append(set(running.values()))

        plan = train_episodes(stage.run_plan.cfg, stage.run_plan.env, 0, counts_chunk_steps=False)
        rollout = stage.workers.scheduler.collect(Rollout(plan, on_episode=look))
        assert [e.spec.episode_id for e in rollout.episodes] == list(range(12))
        assert len({e.spec.task_id for e in rollout.episodes}) > 1
        assert all(len(tasks) <= 1 for tasks in together)


PLAIN = ("runner.deterministic=true", "algorithm.rollout_epoch=4", "env.use_rel_reward=false", "env.kwargs.echo=true")


@pytest.mark.parametrize(
    ("where", "words"),
    [("step", ()), ("reset", ()), ("observe", ()), ("step", PPO)],
    ids=["step", "reset", "observe", "quota"],
)
def test_crashed_episodes_are_repeated_exactly(tmp_path, where, words):
    """Inline, so that the crash is always at the same call. All episodes equal those of a run without a crash."""
    words = PLAIN + words
    fault = ("env.kwargs.fault=raise", f"env.kwargs.where={where}", "env.kwargs.at=14", f"env.kwargs.once={tmp_path}/m")
    with running_crew(tmp_path, *words) as stage:
        golden = collect(stage)
        whole = facts(golden)
    with running_crew(tmp_path, *words, *fault) as stage:
        rollout = collect(stage)
        assert stage.workers.supervisor.restarts == 1
        assert "the toy broke" in stage.said[0]
        assert "env_0" in stage.said[0]
        assert rollout.dropped == 0
        assert facts(rollout) == whole
        assert rollout.stats.env_steps == golden.stats.env_steps
        for e in rollout.episodes:
            np.testing.assert_array_equal(e.reward, stage.workers.arena[Record.action][e.records][..., 0])
        assert_all_free(stage, rollout)


def test_crashed_episodes_of_overlapping_steps_are_repeated(tmp_path):
    fault = ("env.kwargs.fault=raise", "env.kwargs.at=14", f"env.kwargs.once={tmp_path}/m")
    with running_crew(tmp_path, "algorithm.max_staleness=1", *fault) as stage:
        plans = [train_episodes(stage.run_plan.cfg, stage.run_plan.env, s, counts_chunk_steps=False) for s in range(2)]
        stage.workers.scheduler.publish(0)
        for rollout in [stage.workers.scheduler.open(Rollout(plan)) for plan in plans]:
            result = stage.workers.scheduler.finish(rollout)
            assert [e.spec for e in result.episodes] == list(rollout.plan.episodes)
            stage.workers.scheduler.release(result)
        assert stage.workers.supervisor.restarts == 1
        assert stage.workers.arena.num_free == stage.workers.arena.capacity


def test_restarts_are_limited(tmp_path):
    words = ("env.kwargs.fault=raise", "env.kwargs.at=3", "faults.max_restarts_per_worker=1")
    words += ("algorithm.rollout_epoch=4",)
    with running_crew(tmp_path, *words) as stage, pytest.raises(WorkerError, match=r"env_0 .*restarted 1 times"):
        collect(stage)


def test_on_env_crash_fail_ends_the_run_at_the_first_death(tmp_path):
    words = ("env.kwargs.fault=raise", "env.kwargs.at=3", "faults.on_env_crash=fail")
    with running_crew(tmp_path, *words) as stage, pytest.raises(WorkerError, match=r"env_0 .*the toy broke"):
        collect(stage)


def test_deadlines_grow_with_the_number_of_envs(tmp_path, monkeypatch):
    """Environments may run in sequence: fails if many environments have the deadline of one environment."""
    with running_crew(
        tmp_path, "faults.step_timeout_s=7", "env.kwargs.goal=99", "rollout.pipeline_stage_num=2"
    ) as stage:
        supervisor, given = stage.workers.supervisor, []
        send = supervisor.send

        def noted(worker, request, *, timeout_s):
            if isinstance(request, EnvRequest):
                given.append((len(request.env_indices) + len(request.resets), timeout_s))
            send(worker, request, timeout_s=timeout_s)

        monkeypatch.setattr(supervisor, "send", noted)
        collect(stage)
    assert {count for count, _ in given} == {2}
    assert all(limit == 7 * count for count, limit in given)
