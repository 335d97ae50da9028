"""Training rollouts: early resets, bounded staleness and refilled groups."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
from toy_runs import Stage, rows, running_crew, toy_config, train_toy

from embodyrl.algorithms.protocol import EstimatorInputs
from embodyrl.channels.arena import get_record_indices
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.commands.metrics import rollout_metrics
from embodyrl.commands.train import StepRollouts, train
from embodyrl.envs.reward import RewardStep
from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.episodes import greedy_episodes, train_episodes
from embodyrl.scheduler.env_states import Phase
from embodyrl.scheduler.event_loop import Actors
from embodyrl.scheduler.rollout import Rollout, RolloutResult
from embodyrl.types import RewardSpec


def sampler_of(stage: Stage) -> StepRollouts:
    assert stage.run_plan.algorithm is not None
    return StepRollouts(stage.run_plan, stage.workers, stage.run_plan.algorithm)


def collect(stage: Stage, sampler: StepRollouts, step: int) -> RolloutResult:
    stage.workers.scheduler.publish(step)
    return sampler.collect(step, lambda done, total: None)


def planned(stage: Stage, step: int) -> list:
    plan = train_episodes(stage.run_plan.cfg, stage.run_plan.env, step, counts_chunk_steps=False)
    return sorted(plan.episodes, key=lambda e: e.episode_id)


MIXED = ("env.kwargs.goal=0.7", "env.train.max_episode_steps=16", "runner.max_steps=6")
"""Some episodes end with their first chunk, others run all four."""


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_chunks_respect_max_staleness(tmp_path, lag):
    with running_crew(tmp_path, *MIXED, f"algorithm.max_staleness={lag}") as stage:
        sampler = sampler_of(stage)
        ages: set[int] = set()
        carried = 0
        for step in range(5):
            rollout = collect(stage, sampler, step)
            assert [e.spec for e in rollout.episodes] == planned(stage, step), "the list of a step is always the same"
            versions = [stage.workers.arena[Record.version][e.records] for e in rollout.episodes]
            ages |= {int(step - v) for one in versions for v in one}
            assert all((np.diff(v) >= 0).all() for v in versions)
            carried += sum(len(set(v.tolist())) > 1 for v in versions)
            stage.workers.scheduler.release(rollout)
        assert ages == {0} if lag == 0 else 0 < max(ages) <= lag
        assert (carried > 0) == (lag > 0), "with a lag some episodes run on while weights change"


def test_next_rollout_resets_early_and_uses_new_weights(tmp_path):
    with running_crew(tmp_path, "runner.max_steps=3") as stage:
        sampler, env_indices = sampler_of(stage), stage.workers.scheduler._envs
        first = collect(stage, sampler, 0)
        sampler.queue_next(1)
        stage.workers.scheduler.run_until(lambda: not stage.workers.scheduler._stages.busy)
        assert set(env_indices.phase.tolist()) == {Phase.READY}, "reset, and waiting for version 1"
        stage.workers.scheduler.release(first)
        second = collect(stage, sampler, 1)
        assert [e.spec for e in second.episodes] == planned(stage, 1)
        for e in second.episodes:
            assert (stage.workers.arena[Record.version][e.records] == 1).all()


def test_filtered_groups_are_refilled_up_to_a_limit(tmp_path):
    words = ("env.kwargs.goal=0.7", "env.train.total_num_envs=8", "algorithm.filter_rewards=[0.4,0.6]")
    with running_crew(tmp_path, *words, "algorithm.filter_refills=3", "runner.deterministic=true") as stage:
        algorithm = stage.run_plan.algorithm
        assert algorithm is not None
        rollout = collect(stage, sampler_of(stage), 0)
        assert rollout.refills > 0, "some of the four groups must be filtered, or this shows nothing"
        every = rollout.episodes + rollout.filtered
        groups = [e.spec.group_id for e in every]
        assert len(set(groups)) == 4 + rollout.refills
        assert all(groups.count(g) == 2 for g in groups)
        assert len({e.spec.noise_seed for e in every}) == len(every)
        kept = {rollout.episodes[i].spec.group_id for i in algorithm.select(rollout.episodes)}
        assert kept - set(range(4)), "a further group has a signal"
        batch = algorithm.prepare(rollout.episodes, EstimatorInputs())
        held = set(get_record_indices(np.concatenate(list(rollout.record_refs.values()))).tolist())
        assert set(batch.records.tolist()) <= held
        stage.workers.scheduler.release(rollout)
        assert stage.workers.arena.num_free == stage.workers.arena.capacity


def test_refills_use_the_outcomes_of_the_curriculum(tmp_path):
    """One of two tasks is solved always, so most refills are of the other."""
    words = (
        "env.kwargs.tasks=2",
        "env.kwargs.goal=99",
        "algorithm.filter_rewards=[0.1,0.9]",
        "env.train.total_num_envs=16",
    )
    with running_crew(tmp_path, *words, "algorithm.filter_refills=1", "algorithm.curriculum=1") as stage:
        assert stage.run_plan.algorithm is not None
        stage.run_plan.algorithm.task_outcomes |= {"0": [500.0, 500.0], "1": [50.0, 100.0]}
        rollout = collect(stage, sampler_of(stage), 0)
        assert rollout.refills == 8
        assert {e.spec.task_id for e in rollout.episodes} == {1}
        stage.workers.scheduler.release(rollout)


def test_states_of_steps_are_hashes_of_their_own_observations(tmp_path):
    """Two copies of one observation are one state of GiGPO; all others differ."""
    with running_crew(tmp_path, "algorithm=gigpo", "env.kwargs.goal=99", "runner.deterministic=true") as stage:
        algorithm, arena = stage.run_plan.algorithm, stage.workers.arena
        assert algorithm is not None
        rollout = collect(stage, sampler_of(stage), 0)
        own, other = (episode.records for episode in rollout.episodes[:2])
        for field in OBSERVATION:
            arena[field][other[1]] = arena[field][own[1]]
        states = Actors(stage.workers.scheduler, arena, algorithm, stage.run_plan).score(rollout).states
        assert [len(one) for one in states] == [len(e.records) for e in rollout.episodes]
        assert states[0][1] == states[1][1]
        assert len({*states[0].tolist()}) == len(own) > 1
        stage.workers.scheduler.release(rollout)


def test_episodes_lost_in_refills_are_counted(tmp_path):
    """Both refill groups crash their worker; the planned groups have other initial states."""
    words = ("env.kwargs.goal=99", "algorithm.filter_rewards=[0.1,0.9]", "algorithm.filter_refills=1")
    fault = ("env.kwargs.fault=differ", "env.kwargs.state=3", "faults.max_restarts_per_worker=2", "seed=33")
    with running_crew(tmp_path, *words, *fault) as stage:
        assert 3 not in {e.reset_id for e in planned(stage, 0)}
        rollout = collect(stage, sampler_of(stage), 0)
        assert rollout.refills == 2
        assert rollout.dropped == 4 - len(rollout.episodes) > 0
        assert len(rollout.filtered) == 4


def failing_reward(step: RewardStep) -> float:
    raise RuntimeError("no reward today")


def test_reward_errors_are_counted_in_refills(tmp_path):
    """One error for each of the eight episodes in four environments."""
    words = ("reward.path=test_step_rollouts:failing_reward", "env.kwargs.goal=99", "~env.use_rel_reward")
    with running_crew(tmp_path, *words, "algorithm.filter_rewards=[0.1,0.9]", "algorithm.filter_refills=1") as stage:
        rollout = collect(stage, sampler_of(stage), 0)
        assert (len(rollout.filtered), len(rollout.episodes)) == (4, 4)
        assert len(rollout.reward_errors) == 8
        assert all("no reward today" in why for why in rollout.reward_errors)


def test_remax_baseline_is_the_greedy_episode_of_the_group(tmp_path):
    """Repeated with other noise the episode is the same; episodes of one group share it."""
    words = ("algorithm=remax", "algorithm.group_size=2", "runner.deterministic=true", "env.kwargs.goal=99")
    with running_crew(tmp_path, *words) as stage:
        cfg, algorithm, scheduler = stage.run_plan.cfg, stage.run_plan.algorithm, stage.workers.scheduler
        rollout = collect(stage, sampler_of(stage), 0)
        plan = greedy_episodes(cfg, train_episodes(cfg, stage.run_plan.env, 0, counts_chunk_steps=False))
        queues = tuple(tuple(replace(e, noise_seed=e.noise_seed + 1) for e in q) for q in plan.waves[0].queues)
        other = replace(plan, waves=(replace(plan.waves[0], queues=queues),))
        again = scheduler.collect(Rollout(other, greedy=True, keep=False))
        assert len(again.episodes) == 2
        for e in again.episodes:
            np.testing.assert_array_equal(e.action, rollout.greedy[e.spec.group_id].action)
        assert algorithm is not None
        found = Actors(scheduler, stage.workers.arena, algorithm, stage.run_plan).score(rollout).greedy
        assert [e.spec.group_id for e in found] == [e.spec.group_id for e in rollout.episodes] == [0, 0, 1, 1]


def test_filtering_all_groups_keeps_the_weights(tmp_path):
    words = ("env.kwargs.goal=99", "algorithm.filter_rewards=[0.1,0.9]", "algorithm.filter_refills=2")
    for row in rows(train_toy(tmp_path, *words)):
        assert row["train/groups_refilled"] == 4, "two rounds of two groups"
        assert (row["train/episodes"], row["env/steps"]) == (12, 12 * 8), "what was played for them counts"
        assert row["train/groups_filtered"] == 1
        assert row["actor/optimizer_steps"] == 0


def test_asynchronous_run_trains_on_stale_rollouts(tmp_path):
    words = (*MIXED, "algorithm.max_staleness=1", "actor.micro_batch_size=2", "runner.val_check_interval=3")
    logged = rows(train_toy(tmp_path, *words, "eval.episodes=2"))
    assert [row["step"] for row in logged] == list(range(7))
    ages = {name for row in logged for name in row if name.startswith("rollout/staleness/")}
    assert ages == {"rollout/staleness/0", "rollout/staleness/1"}


def test_asynchronous_deterministic_run_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"max_staleness=1.*deterministic=true is impossible"):
        toy_config(tmp_path, "algorithm.max_staleness=1", "runner.deterministic=true")


CONTINUED = (
    *("env=gym", "env.id=Pendulum-v1", "model=mlp", "algorithm=ppo", "launcher=inline", "runner.max_steps=9"),
    *("env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=90", "runner.val_check_interval=-1"),
)


@pytest.mark.parametrize("ahead", [False, True])
def test_unfinished_episode_continues_in_the_next_step(tmp_path, ahead):
    """Pendulum's 200 steps are 90 + 90 + 20; the next episode has 70 steps of the third training step."""
    with running_crew(tmp_path, cfg=load_config("train", CONTINUED)) as stage:
        sampler, arena = sampler_of(stage), stage.workers.arena
        seen, pieces = {}, []
        for step in range(3):
            rollout = collect(stage, sampler, step)
            for env_index, episode in enumerate(e for e in rollout.episodes if e.earlier is not None):
                np.testing.assert_array_equal(
                    arena[Record.observed_state][episode.records[0]], seen[step - 1, env_index]
                )
            for env_index, episode in enumerate(e for e in rollout.episodes if e.cut):
                seen[step, env_index] = arena[Record.observed_state][episode.final_record].copy()
            if ahead:
                sampler.queue_next(step + 1)
            pieces.append(sorted((e.length, e.summary.length, e.cut) for e in rollout.episodes))
            wholes = [e for e in rollout.episodes if not e.cut]
            stage.workers.scheduler.release(rollout)
        assert pieces == [
            [(90, 90, True)] * 2,
            [(90, 180, True)] * 2,
            [(20, 200, False)] * 2 + [(70, 70, True)] * 2,
        ]
        env = replace(stage.run_plan.env, reward=RewardSpec(reports_success=False, factor=2.0))
        metrics = rollout_metrics(rollout, env, num_workers=1, restarts=0)
        assert metrics["train/episodes"] == 2
        assert metrics["train/episode_len"] == 200
        assert metrics["train/return"] == pytest.approx(np.mean([e.summary.episode_return for e in wholes]) / 2)


def test_a_continued_episode_keeps_its_task(tmp_path):
    """Success counts for the task of the running episode, not for the planned task of the environment."""
    words = ("algorithm=ppo", "env.kwargs.tasks=3", "env.kwargs.goal=99", "env.train.max_episode_steps=16")
    quota = ("env.train.max_steps_per_rollout_epoch=12", "env.train.continue_episodes=true", "runner.max_steps=4")
    with running_crew(tmp_path, *words, *quota, "env.train.total_num_envs=8") as stage:
        env, sampler = stage.run_plan.env, sampler_of(stage)
        continued = 0
        for step in range(3):
            rollout = collect(stage, sampler, step)
            for e in rollout.episodes:
                assert e.spec.task_id == env.task_of(e.spec.reset_id)[0]
                assert e.instruction == env.tasks[e.spec.task_id]
                continued += e.earlier is not None
            stage.workers.scheduler.release(rollout)
        assert continued == 16


@pytest.mark.parametrize("lockstep", [False, True])
def test_cut_episodes_end_if_a_lockstep_simulator_steps_without_them(tmp_path, lockstep):
    """Between training steps, other episodes run in some environments; the rest wait, one already continued."""
    words = ("algorithm=ppo", "env.train.max_steps_per_rollout_epoch=4", "rollout.pipeline_stage_num=1")
    long = ("env.kwargs.goal=99", "env.train.max_episode_steps=32")
    cfg = toy_config(tmp_path, *words, *long, f"env.kwargs.lockstep={lockstep}".lower())
    with running_crew(tmp_path, cfg=cfg.updated({"env.train.continue_episodes": True})) as stage:
        sampler, scheduler = sampler_of(stage), stage.workers.scheduler
        plans = [train_episodes(stage.run_plan.cfg, stage.run_plan.env, n, counts_chunk_steps=True) for n in range(4)]
        for step in range(2):
            rollout = collect(stage, sampler, step)
            assert [e.earlier is not None for e in rollout.episodes] == [step == 1] * 4
            scheduler.release(rollout)
        early = scheduler.open(Rollout(replace(plans[2], num_envs=1), min_version=2, continues=True))
        other = replace(greedy_episodes(stage.run_plan.cfg, plans[3]), num_envs=2)
        other = other.exclude({e.episode_id for e in list(other.episodes)[1:]})
        scheduler.collect(Rollout(other, keep=False))
        scheduler.publish(2)
        scheduler.release(scheduler.finish(early))
        assert [e.earlier is not None for e in early.out.episodes] == [not lockstep]
        last = scheduler.collect(Rollout(plans[3], continues=True))
        assert [e.earlier is not None for e in last.episodes] == [True, False, not lockstep, not lockstep]


def test_restarted_worker_replaces_unfinished_episodes(tmp_path):
    """Two environments were already cut when the worker dies in the last chunk of the other two."""
    words = ("algorithm=ppo", "env.train.max_steps_per_rollout_epoch=12", "env.train.max_episode_steps=32")
    fault = ("env.kwargs.fault=raise", "env.kwargs.at=46", f"env.kwargs.once={tmp_path}/m", "env.kwargs.goal=99")
    continued = ("env.train.continue_episodes=true", "rollout.pipeline_stage_num=2")
    with running_crew(tmp_path, *words, *fault, *continued) as stage:
        sampler = sampler_of(stage)
        first = collect(stage, sampler, 0)
        assert [(e.length, e.cut) for e in first.episodes] == [(12, True)] * 4
        assert stage.workers.supervisor.restarts == 1
        stage.workers.scheduler.release(first)
        second = collect(stage, sampler, 1)
        assert sorted(e.earlier is not None for e in second.episodes) == [False, False, True, True]
        assert stage.workers.supervisor.restarts == 1


def test_inference_batches_have_one_temperature(tmp_path, monkeypatch):
    """Two rollouts share the environments; fails if actions are sampled at the other rollout's temperature."""
    with running_crew(tmp_path, "env.kwargs.goal=0.7", "algorithm.rollout_epoch=4") as stage:
        cfg, env, scheduler = stage.run_plan.cfg, stage.run_plan.env, stage.workers.scheduler
        plans = [train_episodes(cfg, env, step, counts_chunk_steps=False) for step in range(2)]
        temperature, asked = (
            {e.noise_seed: t for plan, t in zip(plans, (0.5, 2.0), strict=True) for e in plan.episodes},
            [],
        )
        submit = scheduler._policy.submit

        def noted(request, on_done):
            asked.append((request.temperature, {temperature[seed] for seed in request.noise_seeds}))
            submit(request, on_done)

        monkeypatch.setattr(scheduler._policy, "submit", noted)
        scheduler.publish(0)
        opened = [scheduler.open(Rollout(plan, temperature=t)) for plan, t in zip(plans, (0.5, 2.0), strict=True)]
        for rollout in opened:
            scheduler.release(scheduler.finish(rollout))
    assert {t for t, _ in asked} == {0.5, 2.0}
    assert all(own == {t} for t, own in asked)


def test_continue_episodes_without_effect_gives_a_warning(caplog):
    words = [word for word in CONTINUED if word != "algorithm=ppo" and "per_rollout_epoch" not in word]
    words += ["algorithm=grpo", "algorithm.group_size=2", "env.train.use_fixed_reset_state_ids=true"]
    cfg = load_config("train", [*words, "env.train.continue_episodes=true"])
    build_run_plan(cfg, training=True)
    assert "continue_episodes has no effect: steps end with their episodes" in caplog.text


def test_rollouts_of_earlier_steps_are_freed_without_the_garbage_collector(tmp_path):
    rollouts = []

    def count(*_: object) -> None:
        rollouts.append(sum(type(o) is Rollout for o in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        train(toy_config(tmp_path, "runner.max_steps=5"), on_step=count)
    finally:
        gc.enable()
    assert len(rollouts) == 5
    assert max(rollouts) <= 1, "only the rollout of the next step is in memory"
