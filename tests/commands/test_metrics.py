"""Metrics of a training run and of one rollout."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from toy_runs import rows, train_toy

from embodyrl.commands.metrics import rollout_metrics
from embodyrl.scheduler.rollout import RolloutResult, RolloutStats
from embodyrl.types import (
    ActionKind,
    ActionSpec,
    EarlierPart,
    EnvSpec,
    Episode,
    EpisodeSpec,
    RewardSpec,
    SimulatorSpec,
)

ENV = EnvSpec(name="toy", action=ActionSpec(dim=1), tasks=("reach", "lift"), states_per_task=(5, 5))

EVERY_ROW = {
    *("train/success_once", "train/return", "train/episode_len", "train/groups_without_signal"),
    *("actor/loss", "actor/grad_norm", "actor/optimizer_steps"),
    *("env/steps_per_s", "env/restarts", "env/dropped_episodes"),
    *("time/step", "time/rollout", "time/update", "time/infer", "time/simulate", "time/render", "time/reset"),
}
EVERY_UPDATE = {
    *("actor/policy_loss", "actor/kl", "actor/entropy", "actor/ratio", "actor/clip_fraction", "actor/lr"),
    "actor/logprob_gap",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    words = ("runner.val_check_interval=1", "eval.episodes=2", "env.kwargs.goal=0.5", "runner.max_steps=3")
    return train_toy(tmp_path_factory.mktemp("metrics"), *words)


def test_every_training_row_has_the_documented_keys(run):
    trained = rows(run)[1:]
    assert [row["step"] for row in trained] == [1, 2, 3]
    for row in trained:
        assert set(row) >= EVERY_ROW
        assert None not in row.values()
        assert (set(row) >= EVERY_UPDATE) == (row["actor/optimizer_steps"] > 0)


def test_row_of_step_zero_contains_only_the_first_validation(run):
    first = rows(run)[0]
    assert first["step"] == 0
    assert {key.partition("/")[0] for key in first} == {"step", "eval"}
    assert [row["eval/episodes"] for row in rows(run)] == [2.0] * 4


def test_episode_and_step_counts_are_consistent(run):
    for row in rows(run)[1:]:
        assert row["train/episodes"] == 4
        assert row["env/steps"] == row["train/episodes"] * row["train/episode_len"]
        assert row["train/return"] == row["train/success_once"], "the relative reward of a success is 1"
        assert (row["env/restarts"], row["env/dropped_episodes"]) == (0, 0)
        assert row["actor/optimizer_steps"] in (0, 1)


def test_first_epoch_over_new_data_has_ratio_one(run):
    updated = [row for row in rows(run)[1:] if row["actor/optimizer_steps"]]
    assert updated
    for row in updated:
        assert row["actor/ratio"] == pytest.approx(1, abs=1e-5)
        assert row["actor/logprob_gap"] < 1e-5
        assert row["actor/clip_fraction"] == 0
        assert 0 < row["actor/entropy"] < 5.546, "ln 256 bounds the entropy of an action token"


def test_phase_times_do_not_exceed_the_step_time(run):
    for row in rows(run)[1:]:
        assert row["time/rollout"] + row["time/update"] <= row["time/step"]
        assert row["time/simulate"] + row["time/render"] + row["time/reset"] <= row["time/rollout"]


def test_value_loss_is_logged_with_a_value_head(tmp_path):
    row = rows(train_toy(tmp_path, "algorithm=ppo", "runner.max_steps=1", "actor.global_batch_size=8"))[-1]
    assert set(row) >= EVERY_ROW | EVERY_UPDATE | {"actor/value_loss"}


def test_rows_are_strict_json(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert all("step" in json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert len(lines) >= 2


def episode(*, steps: int, success: bool, cut: bool = False, counted: bool = True) -> Episode:
    """Return an episode with one action per chunk; the last action may succeed."""
    column = np.zeros((steps, 1), np.float32)
    won = column.astype(bool)
    won[-1] = success
    return Episode(
        spec=EpisodeSpec(episode_id=0, reset_id=0, task_id=0, group_id=0, member=0, seed=0, noise_seed=0),
        records=np.arange(steps),
        reward=won.astype(np.float32),
        valid=np.ones_like(won),
        success=won,
        value=column,
        bootstrap_value=column[0],
        terminated=success,
        truncated=not success,
        cut=cut,
        counted=counted,
    )


def test_success_rate_is_not_biased_towards_short_episodes():
    """Four environments, episodes of at most ten steps: two fail, two succeed at once and repeat."""
    failed = [episode(steps=10, success=False) for _ in range(2)]
    won = [episode(steps=1, success=True, counted=i % 9 == 0) for i in range(18)]
    cut = [episode(steps=1, success=False, cut=True, counted=False) for _ in range(2)]

    def counted(episodes: list[Episode]) -> tuple[float, float]:
        metrics = rollout_metrics(RolloutResult(episodes=episodes), ENV, num_workers=1, restarts=0)
        return metrics["train/success_once"], metrics["train/episodes"]

    assert counted([*failed, *won, *cut]) == (0.5, 4)
    assert counted([replace(e, counted=False) for e in [*failed, *won, *cut]]) == (0.9, 20), "all that can be known"
    assert counted(cut) == (0, 2)


def test_overlapped_rollout_time_counts_only_while_waiting():
    tally = RolloutStats(wall_s=1.0, span_s=61.0, inference_s=61.0, sim_s=30.5)
    metrics = rollout_metrics(RolloutResult(stats=tally), ENV, num_workers=1, restarts=0)
    assert metrics["time/infer"] == pytest.approx(1.0)
    assert metrics["time/simulate"] == pytest.approx(0.5)


def test_step_metrics_match_hand_computed_values():
    """Two counted episodes, one filtered and one cut; rewards were multiplied by 4 for learning."""
    won, lost = episode(steps=2, success=True), episode(steps=6, success=False)
    lost = replace(lost, spec=replace(lost.spec, task_id=1, reset_id=7))
    components = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    held = replace(won, reward=won.reward * 4, components=components)
    failed = replace(lost, components=np.zeros((6, 2), np.float32))
    # A filtered group is a group that was played: success must not lose the ones that were all alike.
    alike = replace(held, spec=replace(held.spec, reset_id=3))
    tally = RolloutStats(
        env_steps=100,
        wall_s=2.0,
        span_s=4.0,
        sim_s=12.0,
        render_s=8.0,
        reset_s=4.0,
        inference_s=3.0,
        num_inferences=5,
        num_observations=20,
    )
    result = RolloutResult(
        episodes=[held, failed, episode(steps=3, success=True, cut=True, counted=False)],
        filtered=[alike],
        refills=2,
        dropped=1,
        greedy={0: replace(held, reward=held.reward * 2)},
        stats=tally,
    )
    metrics = rollout_metrics(
        result, replace(ENV, reward=RewardSpec(components=("reach", "lift"), factor=4.0)), num_workers=2, restarts=3
    )
    assert metrics == pytest.approx(
        {
            "train/episodes": 3,
            "train/groups_refilled": 2,
            "train/return": 2 / 3,
            "train/episode_len": 10 / 3,
            "train/episode_len_min": 2,
            "train/episode_len_max": 6,
            "train/success_once": 2 / 3,
            "train/success_at_end": 2 / 3,
            "train/effective_episodes": 3,
            "train/task_0/success_once": 1,
            "train/task_1/success_once": 0,
            "train/greedy_return": 2,
            "train/reward_reach": 8 / 3,
            "train/reward_lift": 4,
            "env/steps_per_s": 25,
            "env/steps": 100,
            "env/restarts": 3,
            "env/dropped_episodes": 1,
            "rollout/infer_batch_size": 4,
            "time/rollout": 2,
            "time/simulate": 3,
            "time/render": 2,
            "time/reset": 1,
            "time/infer": 1.5,
        }
    )


def test_turn_limit_of_a_game_is_not_reported_as_truncated_replies():
    text = replace(ENV, action=ActionSpec(dim=1, kind=ActionKind.text))
    result = RolloutResult(episodes=[episode(steps=3, success=False), episode(steps=2, success=True)])
    assert rollout_metrics(result, text, num_workers=1, restarts=0)["train/cut_off"] == 0.5
    game = replace(text, simulator=SimulatorSpec(may_truncate=True))
    assert "train/cut_off" not in rollout_metrics(result, game, num_workers=1, restarts=0)


def test_lost_success_does_not_count_as_success_at_end():
    taken = episode(steps=3, success=True)
    taken = replace(taken, success=np.array([[False], [True], [False]]))
    metrics = rollout_metrics(RolloutResult(episodes=[taken]), ENV, num_workers=1, restarts=0)
    assert (metrics["train/success_once"], metrics["train/success_at_end"]) == (1, 0)


def test_success_metrics_are_absent_without_success_signal():
    failed = RolloutResult(episodes=[episode(steps=3, success=False)])
    metrics = rollout_metrics(failed, replace(ENV, reward=RewardSpec(reports_success=False)), num_workers=1, restarts=0)
    assert not [name for name in metrics if "success" in name]


def test_continued_episode_counts_as_one_episode():
    """The previous step ran four steps with return 3; this step continues the episode for two steps until success."""
    spec = EpisodeSpec(episode_id=9, reset_id=2, task_id=0, group_id=0, member=0, seed=0, noise_seed=0)
    taken = replace(episode(steps=2, success=True), earlier=EarlierPart(spec, 4, 3.0, False))
    metrics = rollout_metrics(RolloutResult(episodes=[taken]), ENV, num_workers=1, restarts=0)
    assert (metrics["train/episode_len"], metrics["train/return"], metrics["train/success_once"]) == (6, 4, 1)


def test_earlier_success_counts_for_a_continued_episode():
    spec = EpisodeSpec(episode_id=9, reset_id=2, task_id=0, group_id=0, member=0, seed=0, noise_seed=0)
    taken = replace(episode(steps=2, success=False), earlier=EarlierPart(spec, 4, 3.0, True))
    metrics = rollout_metrics(RolloutResult(episodes=[taken], continues=True), ENV, num_workers=1, restarts=0)
    assert (metrics["train/success_once"], metrics["train/success_at_end"]) == (1, 0)


def test_reward_components_cover_the_whole_continued_episode():
    """Fails if only the last part of a continued episode is counted."""
    first = replace(episode(steps=4, success=False), components=np.array([[1.0, 0.0], [2.0, 0.5]], np.float32))
    last = replace(episode(steps=2, success=True), components=np.array([[4.0, 0.0]], np.float32), earlier=first.summary)
    collection = RolloutResult(episodes=[last], continues=True)
    metrics = rollout_metrics(
        collection, replace(ENV, reward=RewardSpec(components=("near", "errors"))), num_workers=1, restarts=0
    )
    assert (metrics["train/reward_near"], metrics["train/reward_errors"]) == (7.0, 0.5)
    assert metrics["train/return"] == first.episode_return + last.episode_return
