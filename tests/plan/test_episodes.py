"""Episode plans of training and evaluation are pure functions of config and step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from text_runs import text_config
from toy_env import toy_spec
from toy_runs import toy_config

from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_context
from embodyrl.plan.episodes import EpisodeList, eval_episodes, greedy_episodes, refill_episodes, train_episodes
from embodyrl.plan.initial_states import select_reset_ids
from embodyrl.plan.schema import Config
from embodyrl.policies import POLICIES
from embodyrl.types import BenchmarkSpec, EnvSpec, EpisodeSpec, PolicySpec

ENV = toy_spec(3)  # reset ids 0..11, four per task
POLICY = PolicySpec(name="toy", num_action_chunks=4, action_dim=7, tokens_per_chunk=28)


@pytest.fixture
def config(tmp_path):
    def make(*overrides: str) -> Config:
        return toy_config(tmp_path, "env.kwargs.tasks=3", "runner.val_check_interval=2", *overrides)

    return make


def episodes_of(plan: EpisodeList) -> list[EpisodeSpec]:
    return list(plan.episodes)


def plan_of(cfg: Config, step: int = 0, *, counts_chunk_steps: bool = False) -> EpisodeList:
    return train_episodes(cfg, ENV, step, counts_chunk_steps=counts_chunk_steps)


def test_episode_plan_depends_on_seed_and_step_only(config):
    cfg = config("env.train.total_num_envs=8")
    assert plan_of(cfg, 5) == plan_of(config("env.train.total_num_envs=8"), 5)
    assert plan_of(cfg, 5) != plan_of(cfg, 6)
    assert plan_of(cfg, 5) != plan_of(config("env.train.total_num_envs=8", "seed=1"), 5)
    other_machine = config("env.train.total_num_envs=8", "rollout.pipeline_stage_num=1", "runner.max_steps=99")
    assert plan_of(cfg, 5) == plan_of(other_machine, 5)


def test_group_members_share_reset_id_and_seed_but_not_noise(config):
    episodes = episodes_of(plan_of(config("env.train.total_num_envs=8", "algorithm.group_size=4"), 3))
    assert [e.episode_id for e in episodes] == list(range(8))
    for group in (0, 1):
        members = [e for e in episodes if e.group_id == group]
        assert [e.member for e in members] == [0, 1, 2, 3]
        assert len({(e.reset_id, e.task_id, e.seed) for e in members}) == 1
    assert len({e.noise_seed for e in episodes}) == 8
    assert episodes[0].seed != episodes[4].seed


def test_noise_and_seeds_never_repeat_between_steps(config):
    cfg = config("env.train.total_num_envs=8")
    episodes = [e for step in range(50) for e in episodes_of(plan_of(cfg, step))]
    assert len({e.noise_seed for e in episodes}) == len(episodes)
    assert len({e.seed for e in episodes}) == len(episodes) // 2


def test_reset_ids_are_used_equally_often(config):
    """Five groups per step do not divide twelve ids: the stream continues in the next step."""
    cfg = config("env.train.total_num_envs=10")
    stream = [e.reset_id for step in range(24) for e in episodes_of(plan_of(cfg, step)) if e.member == 0]
    assert len(stream) == 120
    for start in range(0, 120, 12):
        assert sorted(stream[start : start + 12]) == list(range(12))
    assert stream[:12] != stream[12:24], "each pass has an order of its own"


def test_reset_ids_repeat_if_groups_outnumber_them(config):
    cfg = config("env.train.total_num_envs=40")
    drawn = Counter(e.reset_id for e in episodes_of(plan_of(cfg)) if e.member == 0)
    assert set(drawn) == set(range(12))
    assert max(drawn.values()) - min(drawn.values()) <= 1


def test_task_ids_select_reset_ids(config):
    cfg = config("env.train.task_ids=[2,0]", "env.train.total_num_envs=16")
    assert select_reset_ids(ENV, cfg.env.train) == [8, 9, 10, 11, 0, 1, 2, 3]
    assert {e.task_id for e in episodes_of(plan_of(cfg))} == {0, 2}
    with pytest.raises(ConfigError, match=r"\[3\].*tasks 0 to 2"):
        select_reset_ids(ENV, config("env.train.task_ids=[3]").env.train)


def test_auto_reset_plans_all_rollout_epochs_as_one_queue_per_env(config):
    refilled = plan_of(config("algorithm.rollout_epoch=3"))
    assert [len(wave.queues) for wave in refilled.waves] == [1]
    assert [e.episode_id for e in refilled.waves[0].queues[0]] == list(range(12))
    waves = plan_of(config("algorithm.rollout_epoch=3", "env.train.auto_reset=false")).waves
    assert [[e.episode_id for e in wave.queues[0]] for wave in waves] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert episodes_of(refilled) == [e for wave in waves for e in wave.queues[0]]


def test_deterministic_mode_assigns_episodes_to_fixed_envs(config):
    words = ("algorithm.rollout_epoch=3", "algorithm.group_size=4")
    dealt = plan_of(config(*words, "runner.deterministic=true"))
    assert [[e.episode_id for e in q] for q in dealt.waves[0].queues] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    shared = plan_of(config(*words))
    assert sorted(episodes_of(dealt), key=lambda e: e.episode_id) == episodes_of(shared)


def test_step_quota_never_runs_out_of_episodes(config):
    """A chunk may end an episode, so an environment needs as many episodes as it has chunk steps."""
    cfg = config("algorithm=ppo", "env.train.max_steps_per_rollout_epoch=18", "algorithm.rollout_epoch=2")
    plan = plan_of(cfg, counts_chunk_steps=True)
    assert [wave.quota_chunks for wave in plan.waves] == [5, 5]  # 18 env steps in chunks of 4
    for wave in plan.waves:
        assert [len(q) for q in wave.queues] == [5, 5, 5, 5]
        for queue in wave.queues:
            assert len({e.reset_id for e in queue}) == 1, "fixed reset ids: one per environment and epoch"
    ids = [e.episode_id for e in episodes_of(plan)]
    assert len(set(ids)) == len(ids) == 40


def test_step_quota_without_auto_reset_has_one_episode_per_env(config):
    cfg = config("algorithm=ppo", "env.train.auto_reset=false")
    assert [len(q) for q in plan_of(cfg, counts_chunk_steps=True).waves[0].queues] == [1, 1, 1, 1]


def test_random_reset_ids_vary_within_an_env(config):
    words = ("algorithm=ppo", "env.train.use_fixed_reset_state_ids=false", "algorithm.group_size=1")
    cfg = config(*words, "env.train.max_steps_per_rollout_epoch=64")
    queues = plan_of(cfg, counts_chunk_steps=True).waves[0].queues
    assert all(len({e.reset_id for e in queue}) > 4 for queue in queues)


def test_random_reset_ids_differ_in_every_step_and_epoch(config):
    words = ("algorithm=ppo", "env.train.use_fixed_reset_state_ids=false", "algorithm.group_size=1")
    cfg = config(*words, "env.train.max_steps_per_rollout_epoch=64", "algorithm.rollout_epoch=2")
    waves = [wave for step in range(3) for wave in plan_of(cfg, step, counts_chunk_steps=True).waves]
    assert len({tuple(e.reset_id for queue in wave.queues for e in queue) for wave in waves}) == 6


def test_continued_episodes_use_random_reset_ids(config):
    """An environment that continues an episode is in another state than planned for its step."""
    words = ("algorithm=ppo", "env.train.max_steps_per_rollout_epoch=64", "env.train.use_fixed_reset_state_ids=true")
    for continues in (True, False):
        cfg = config(*words, f"env.train.continue_episodes={continues}".lower())
        queues = plan_of(cfg, counts_chunk_steps=True).waves[0].queues
        assert all((len({e.reset_id for e in queue}) > 4) == continues for queue in queues)


def test_an_evaluation_covers_tasks_and_states_evenly(config):
    plan = eval_episodes(config("eval.episodes_per_task=6"), ENV, POLICY)
    episodes = episodes_of(plan)
    assert plan.num_envs == 2
    assert Counter(e.task_id for e in episodes) == {0: 6, 1: 6, 2: 6}
    for task in range(3):
        own = [e for e in episodes if e.task_id == task]
        assert [e.reset_id for e in own] == [*ENV.get_reset_ids(task), *ENV.get_reset_ids(task)][:6]
        assert [e.seed for e in own] == [e.seed for e in episodes[:6]], "trial n of each task has the same seed"
        assert len({e.seed for e in own}) == 6
    assert all(a.task_id <= b.task_id for a, b in pairwise(episodes)), "a worker loads one task after the other"


def test_total_evaluation_episodes_are_split_over_tasks(config):
    episodes = episodes_of(eval_episodes(config("eval.episodes=5", "env.eval.task_ids=[1,2]"), ENV, POLICY))
    assert Counter(e.task_id for e in episodes) == {1: 3, 2: 2}
    assert plan_slots(config("eval.episodes=1")) == 1


def test_evaluation_samples_share_initial_states_but_not_noise(config):
    words = ("eval.episodes_per_task=2", "eval.sampling_params.do_sample=true")
    once = episodes_of(eval_episodes(config(*words), ENV, POLICY))
    thrice = episodes_of(eval_episodes(config(*words, "eval.samples=3"), ENV, POLICY))
    starts = Counter((e.task_id, e.reset_id, e.seed) for e in thrice)
    assert set(starts) == {(e.task_id, e.reset_id, e.seed) for e in once}
    assert set(starts.values()) == {3}
    assert len({e.noise_seed for e in thrice}) == len({e.episode_id for e in thrice}) == 3 * len(once)
    assert {e.episode_id: e for e in once}.items() <= {e.episode_id: e for e in thrice}.items()


def plan_slots(cfg: Config) -> int:
    return eval_episodes(cfg, ENV, POLICY).num_envs


def test_evaluations_with_other_seeds_use_the_same_initial_states(config):
    def starts(cfg):
        return [(e.episode_id, e.reset_id, e.seed) for e in episodes_of(eval_episodes(cfg, ENV, POLICY))]

    assert starts(config()) == starts(config("seed=7"))


def eval_starts(cfg: Config, env: EnvSpec, policy: PolicySpec = POLICY) -> list[tuple[int, int]]:
    return [(e.reset_id, e.seed) for e in episodes_of(eval_episodes(cfg, env, policy))]


def test_evaluation_never_repeats_an_identical_episode(config):
    """If the reset id determines the episode and the policy is deterministic, a repetition is identical."""
    fixed = replace(ENV, seeded_tasks=(1,))
    greedy = config("eval.episodes_per_task=6")
    starts = eval_starts(greedy, fixed)
    assert Counter(reset_id // 4 for reset_id, _ in starts) == {0: 4, 1: 6, 2: 4}
    assert [reset_id for reset_id, _ in starts if reset_id < 4] == [0, 1, 2, 3]
    assert len(eval_starts(config("eval.episodes=50", "env.eval.state_ids=[1,2]", "env.eval.task_ids=[0]"), fixed)) == 2
    sampled = config("eval.episodes_per_task=6", "eval.sampling_params.do_sample=true")
    assert len(eval_starts(sampled, fixed)) == 18
    assert len(eval_starts(sampled, fixed, replace(POLICY, is_stochastic=False))) == 14, "L1 regression does not sample"
    expert = replace(POLICY, scripted=True)
    assert len(eval_starts(greedy, fixed, expert)) == 18, "its actions are disturbed"
    assert len(eval_starts(sampled, fixed, replace(expert, is_stochastic=False))) == 14


def test_noise_is_planned_for_stochastic_policies_only():
    for words, takes in (
        (["model=scripted"], False),
        (["model=scripted", "model.expert_noise=0.1"], True),
        (["model=random"], True),
        (["model=openvla_oft_tiny"], True),
        (["model=openvla_oft_tiny", "model.action_head=l1"], True),
    ):
        cfg = load_config("eval", ["env=tabletop", *words])
        env = ENVS.get("tabletop").spec(cfg.env, EnvContext())
        assert POLICIES.get(cfg.model.model_type).spec(cfg.model, env, 0).is_stochastic == takes, words


def suites_env() -> EnvSpec:
    """Two tasks, in the own suite and on two axes each."""
    return replace(
        toy_spec(3), tasks=tuple("abcdef"), states_per_task=(4,) * 6, benchmark=BenchmarkSpec(suites=tuple("xxyyzz"))
    )


def test_training_uses_the_main_suite_and_evaluation_all_suites(config):
    env = suites_env()
    assert {e.task_id for e in train_episodes(config(), env, 0, counts_chunk_steps=False).episodes} <= {0, 1}
    assert {*select_reset_ids(env, config().env.train)} == set(range(8))
    plan = episodes_of(eval_episodes(config("eval.episodes_per_task=2"), env, POLICY))
    assert Counter(e.task_id for e in plan) == dict.fromkeys(range(6), 2)
    chosen = episodes_of(eval_episodes(config("env.eval.task_ids=[1]", "eval.episodes_per_task=3"), env, POLICY))
    assert Counter(e.task_id for e in chosen) == dict.fromkeys((1, 3, 5), 3)
    assert {e.seed for e in chosen if e.task_id == 1} == {e.seed for e in chosen if e.task_id == 5}
    with pytest.raises(ConfigError, match=r"env\.eval\.task_ids: \[2\] do not exist: env 'toy' has tasks 0 to 1"):
        select_reset_ids(env, config("env.eval.task_ids=[2]").env.eval)


def test_tasks_are_sampled_by_weight_and_success_variance(config):
    """Twelve groups per step: by weight alone, then half of them by success variance."""
    words = ("env.train.total_num_envs=48", "algorithm.group_size=4")

    def groups(cfg: Config, step: int = 0, seen: dict | None = None) -> Counter[int]:
        episodes = train_episodes(cfg, ENV, step, counts_chunk_steps=False, outcomes=seen).episodes
        return Counter(e.task_id for e in episodes if e.member == 0)

    weighted = config(*words, "env.train.task_weights=[1, 2, 3]")
    assert groups(weighted) == {0: 2, 1: 4, 2: 6}
    open_ones = config(*words, "algorithm.curriculum=1")
    seen = {"0": [0.0, 14.0], "1": [7.0, 14.0], "2": [14.0, 14.0]}
    assert groups(open_ones) == {0: 4, 1: 4, 2: 4}
    assert groups(open_ones, 3, seen)[1] >= 8
    half = groups(config(*words, "algorithm.curriculum=0.5"), 3, seen)
    assert 6 <= half[1] <= 7
    assert min(half[0], half[2]) >= 2
    assert groups(open_ones, 3, seen) == groups(open_ones, 3, seen)


@pytest.mark.parametrize("share", [0.5, 1])
def test_a_curriculum_multiplies_the_weights_of_tasks(config, share):
    """Tasks with equal outcomes are sampled by weight; task 1 with the higher variance is sampled more often."""
    words = ("env.train.total_num_envs=48", "algorithm.group_size=4", "env.train.task_weights=[1, 2, 3]")
    cfg = config(*words, f"algorithm.curriculum={share}")

    def drawn(seen: dict | None) -> list[int]:
        found = [e.task_id for e in train_episodes(cfg, ENV, 0, counts_chunk_steps=False, outcomes=seen).episodes]
        return [found[::4].count(task) for task in range(3)]

    assert drawn(None) == [2, 4, 6]
    assert drawn({str(task): [1.0, 9.0] for task in range(3)}) == [2, 4, 6]
    assert drawn({"0": [0.0, 98.0], "1": [49.0, 98.0], "2": [98.0, 98.0]})[1] >= 7


def test_refill_groups_are_sampled_by_the_same_weights(config):
    cfg = config("env.train.total_num_envs=48", "algorithm.group_size=4", "env.train.task_weights=[1, 2, 3]")
    first, again = (list(refill_episodes(cfg, ENV, 0, attempt, 6).episodes) for attempt in (0, 1))
    for episodes in (first, again):
        assert Counter(e.task_id for e in episodes) == {0: 4, 1: 8, 2: 12}
        assert all(len({e.reset_id for e in episodes if e.group_id == g}) == 1 for g in {e.group_id for e in episodes})
    assert [e.reset_id for e in first] != [e.reset_id for e in again]
    wide = config("env.train.total_num_envs=48", "algorithm.group_size=4", "algorithm.curriculum=1")
    seen = {"0": [0.0, 30.0], "1": [15.0, 30.0], "2": [30.0, 30.0]}
    drawn = Counter(e.task_id for e in refill_episodes(wide, ENV, 0, 0, 6, outcomes=seen).episodes)
    assert drawn[1] >= 16


def test_curriculum_of_one_task_samples_reset_ids(config):
    cfg = config(
        "env.train.total_num_envs=16", "algorithm.group_size=4", "env.train.task_ids=[1]", "algorithm.curriculum=1"
    )
    seen = {"4": [0.0, 30.0], "5": [15.0, 30.0], "6": [0.0, 30.0], "7": [30.0, 30.0]}
    drawn = [
        e.reset_id
        for s in range(5)
        for e in train_episodes(cfg, ENV, s, counts_chunk_steps=False, outcomes=seen).episodes
    ]
    assert drawn.count(5) > len(drawn) / 2
    assert {*drawn} <= {4, 5, 6, 7}


def test_refill_groups_differ_between_steps_and_never_repeat(config):
    cfg = config("env.train.total_num_envs=8", "algorithm.group_size=4")
    plans = {(s, a): [*refill_episodes(cfg, ENV, s, a, 2).episodes] for s in range(6) for a in range(2)}
    starts = {place: tuple(e.reset_id for e in plan if e.member == 0) for place, plan in plans.items()}
    assert len({starts[step, 0] for step in range(6)}) > 3
    assert any(starts[step, 0] != starts[step, 1] for step in range(6))
    for step in range(6):
        own = [*plan_of(cfg, step).episodes, *plans[step, 0], *plans[step, 1]]
        assert len({e.episode_id for e in own}) == len({e.noise_seed for e in own}) == 3 * 8
    assert len({e.noise_seed for plan in plans.values() for e in plan}) == 12 * 8


def test_greedy_baseline_has_one_episode_per_group(config):
    cfg = config("env.train.total_num_envs=8", "algorithm.group_size=4")
    found = greedy_episodes(cfg, plan_of(cfg)).episodes
    assert [e.group_id for e in found] == [0, 1]


def test_refill_rounds_share_no_episode_ids(config):
    """A first round of four groups, then two rounds of one."""
    cfg = config("env.train.total_num_envs=16", "algorithm.group_size=4")
    rounds = [plan_of(cfg), *(refill_episodes(cfg, ENV, 0, attempt, n) for attempt, n in enumerate((4, 1, 1)))]
    episodes = [e for plan in rounds for e in plan.episodes]
    assert len({e.episode_id for e in episodes}) == len({e.noise_seed for e in episodes}) == 16 + 16 + 4 + 4


@pytest.mark.parametrize("words", ["env.train.task_weights=[1, 2, 3]", "algorithm.curriculum=1"])
def test_weighted_tasks_and_refills_use_states_of_the_split(config, words):
    cfg = config("env.train.total_num_envs=48", "algorithm.group_size=4", "env.train.state_ids=[1,2]", words)
    first, refills = plan_of(cfg), refill_episodes(cfg, ENV, 0, 0, 12)
    for plan in (first, refills):
        assert {ENV.task_of(e.reset_id)[1] for e in plan.episodes} == {1, 2}


@pytest.mark.parametrize("shuffle", [True, False])
def test_unshuffled_text_rows_keep_their_order(tmp_path, shuffle):
    cfg = text_config(tmp_path, f"data.shuffle={shuffle}".lower(), "data.kwargs={rows: 40}")
    env = ENVS.get("text").spec(cfg.env, env_context(cfg))
    rows = [
        e.reset_id
        for step in range(3)
        for e in train_episodes(cfg, env, step, counts_chunk_steps=False).episodes
        if e.member == 0
    ]
    assert (rows == list(range(6))) == (not shuffle)


def test_train_and_eval_have_separate_step_limits(config):
    cfg = config("env.train.max_episode_steps=8", "env.eval.max_episode_steps=5", "env.eval.ignore_terminations=true")
    plans = plan_of(cfg), eval_episodes(cfg, ENV, POLICY)
    assert [(plan.max_episode_steps, plan.ignore_terminations) for plan in plans] == [(8, False), (5, True)]
