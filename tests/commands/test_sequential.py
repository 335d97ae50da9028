"""The sequential test of two policies: false positives and power by simulation, and real evaluations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_runs import toy_config, toy_words, train_toy

from embodyrl.cli.main import main
from embodyrl.commands.sequential import _compute_differences, count_planned_episodes, log_e_value, run_test
from embodyrl.monitor.history import EpisodeRow
from embodyrl.plan.episodes import eval_episodes
from embodyrl.types import ActionSpec, EnvSpec, PolicySpec

STATISTICS = Path(__file__).parents[2] / "docs" / "results" / "statistics.md"
CASES = {
    "0.5, 0.5": (0.5, 0.5, 200),
    "0.9, 0.9": (0.9, 0.9, 1000),
    "0.5, 0.7": (0.5, 0.7, 200),
    "0.4, 0.8": (0.4, 0.8, 200),
    "0.8, 0.9": (0.8, 0.9, 500),
}
"""Success rates of both policies and maximum number of episodes."""


def simulated(case: str, times: int) -> tuple[float, float]:
    """Return the fraction of tests that report a difference, and the mean number of episodes."""
    first, second, most = CASES[case]
    rng = np.random.default_rng(7)
    verdicts = []
    for _ in range(times):
        outcomes = (rng.random(most) < second).astype(int) - (rng.random(most) < first).astype(int)
        verdicts.append(run_test(outcomes.tolist()))
    return float(np.mean([v.is_decided for v in verdicts])), float(np.mean([v.pairs for v in verdicts]))


def test_e_value_is_a_martingale_under_the_null_hypothesis() -> None:
    for wins, losses in ((0, 0), (3, 1), (10, 7)):
        following = [math.exp(log_e_value(wins + 1, losses)), math.exp(log_e_value(wins, losses + 1))]
        assert sum(following) / 2 == pytest.approx(math.exp(log_e_value(wins, losses)))


@pytest.mark.parametrize("case", ["0.5, 0.5", "0.9, 0.9"])
def test_false_positive_rate_over_all_interim_tests_is_at_most_5_percent(case: str) -> None:
    assert 0.005 < simulated(case, 2000)[0] <= 0.05


def test_pairs_have_the_same_state_and_seed() -> None:
    """Two seeds of one state with different outcomes, in any order; a row without partner is left out."""

    def row(state: int, seed: int, won: bool) -> EpisodeRow:
        common = {"task_id": 0, "task": "t", "steps": 3, "terminated": True, "truncated": False, "seconds": 0.1}
        own: dict[str, Any] = {"episode": seed, "reset_id": state, "seed": seed, "success_once": won}
        return EpisodeRow(**common, **own, success_at_end=won, episode_return=float(won), video=None)

    first = [row(0, 1, True), row(0, 2, False), row(1, 1, False), row(2, 1, True)]
    second = [row(1, 1, True), row(0, 2, False), row(0, 1, True), row(3, 1, True)]
    assert _compute_differences(first, second) == [1, 0, 0]


def test_success_rates_that_vary_by_state_cause_no_false_positives() -> None:
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(1000):
        chance = rng.beta(0.3, 0.3, 300)
        alarms += run_test(((rng.random(300) < chance) * 1 - (rng.random(300) < chance) * 1).tolist()).is_decided
    assert alarms <= 50


def test_large_differences_are_found_with_few_episodes() -> None:
    power, episodes = simulated("0.4, 0.8", 500)
    assert power > 0.99
    assert episodes < 60


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_documented_power_matches_the_simulation(case: str) -> None:
    found, episodes = simulated(case, 4000)
    assert f"| {case} | {CASES[case][2]} | {100 * found:.1f} % | {episodes:.0f} |" in STATISTICS.read_text()


def test_last_interim_test_includes_all_states_of_unequal_tasks(tmp_path: Path) -> None:
    env = EnvSpec(name="toy", action=ActionSpec(dim=1), tasks=("reach", "lift"), states_per_task=(2, 5))
    cfg = toy_config(tmp_path, "eval.episodes=12", command="eval")
    policy = PolicySpec(name="greedy", num_action_chunks=1, action_dim=1, tokens_per_chunk=1, is_stochastic=False)
    plan = eval_episodes(cfg, env, policy)
    needed = count_planned_episodes(plan)
    again = eval_episodes(cfg.updated({"eval.episodes": needed}), env, policy)
    assert (plan.num_episodes, needed) == (7, 10)
    assert [*again.episodes] == [*plan.episodes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A trained and an untrained policy."""
    folder = tmp_path_factory.mktemp("policies")
    words = ("env.kwargs.goal=0.9", "actor.optim.lr=3e-3", "runner.save_interval=30", "env.train.total_num_envs=16")
    untrained = train_toy(folder, *words, "runner.max_steps=1", name="untrained")
    return str(untrained), str(train_toy(folder, *words, "runner.max_steps=5", name="trained"))


def nameless(folder: Path, *more: str) -> list[str]:
    """Return the arguments of an evaluation without the name of the run."""
    words = toy_words(folder, "launcher=inline", "runner.logger.backends=[]", *more, command="eval")
    return [word for word in words if not word.startswith("runner.experiment_name=")]


def compared(folder: Path, runs: tuple[str, str], capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    words = nameless(folder, *more)
    assert main(["eval", "--until-significant", *runs, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.integration
def test_comparison_of_equal_policies_runs_all_episodes(
    tmp_path: Path, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(
        tmp_path, (runs[0], runs[0]), capsys, "env.kwargs.goal=0.9", "eval.episodes=8", "env.kwargs.tasks=2"
    )
    assert (found["only_first"], found["only_second"], found["p"]) == (0, 0, 1.0)
    assert (found["pairs"], found["most"], len(set(found["folders"]))) == (8, 8, 2)


@pytest.mark.integration
def test_too_few_episodes_for_a_decision_are_rejected(
    tmp_path: Path, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [run_test([1] * count).is_decided for count in (7, 8)] == [False, True]
    assert (
        main(["eval", "--until-significant", *runs, *nameless(tmp_path, "env.kwargs.tasks=2", "eval.episodes=7")]) == 2
    )
    assert "7 initial states are too few for a significant difference. At least 8" in capsys.readouterr().err


@pytest.mark.integration
def test_repeated_states_are_rejected(
    tmp_path: Path, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = nameless(tmp_path, "env.kwargs.tasks=2", "eval.sampling_params.do_sample=true", "eval.samples=4")
    assert main(["eval", "--until-significant", *runs, *words]) == 2
    assert "initial states, so pairs are not independent" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("word", ["ckpt=other", "runner.experiment_name=one", "runner.on_existing=resume", "third"])
def test_until_significant_rejects_keys_of_a_single_run(
    runs: tuple[str, str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both evaluations would use one folder, or one of the runs would be ignored."""
    assert main(["eval", "--until-significant", *runs, word]) == 2
    assert f"remove {word}." in capsys.readouterr().err


@pytest.mark.integration
def test_different_horizons_are_rejected(
    tmp_path: Path, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    short = train_toy(tmp_path, "runner.max_steps=1", "env.eval.max_episode_steps=3", name="short")
    assert main(["eval", "--until-significant", runs[0], str(short), "launcher=inline", "trust=true"]) == 2
    assert "different initial states, horizons" in capsys.readouterr().err
