"""Warnings about falling success, entropy collapse and reward hacking; runs that learn give no warning."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embodyrl.commands.collapse import WINDOW, CollapseCheck

STEPS = 4 * WINDOW


def warnings(row: Callable[[float], dict[str, float]], *, text: bool = True) -> list[str]:
    """Return the warnings of a run; `row` returns the metrics at a fraction of the run."""
    check = CollapseCheck(rewards=["right", "format"], text=text)
    return [line for step in range(STEPS) for line in check.check(step + 1, row(step / (STEPS - 1)))]


def healthy(share: float) -> dict[str, float]:
    return {
        "train/return": share,
        "train/success_once": share,
        "train/episodes": 64,
        "train/reward_right": share,
        "train/reward_format": 0.5 + share / 2,
        "train/episode_len": 12 - 4 * share,
        "train/cut_off": 0.9 - 0.8 * share,
        "actor/entropy": 2.0 - 1.9 * share,
    }


def test_run_that_learns_gives_no_warning():
    assert warnings(healthy) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda s: {"train/reward_format": 0.8 - 0.8 * s}, "possible reward hacking, format: the return rises"),
        (lambda s: {"train/reward_right": 0.8 - 0.8 * s}, "possible reward hacking, right: the return rises"),
        (lambda s: {"train/episode_len": 100 - 95 * s}, "possible reward hacking, length: the return rises"),
        (lambda s: {"train/cut_off": s}, "possible reward hacking, cut off: the return rises"),
        (lambda s: {"train/success_once": 0.3 - 0.25 * s, "actor/kl": 0.02}, "KL per step: 0.02 in the first steps"),
        (lambda s: {"actor/entropy": 2.0 * 0.001**s, "train/success_once": 0.3}, "entropy collapse: "),
    ],
)
def test_collapse_of_a_training_metric_gives_one_warning(changed, said):
    (line,) = warnings(lambda share: healthy(share) | changed(share))
    assert said in line
    assert line.startswith("warning: step ")


def test_low_entropy_of_a_solved_task_gives_no_warning():
    assert warnings(lambda share: healthy(share) | {"actor/entropy": 2.0 * 0.001**share, "train/success_once": 1}) == []


@pytest.mark.parametrize("changed", [{"train/episodes": 4}, {"train/success_once": 0.2}])
def test_success_within_its_noise_gives_no_warning(changed):
    falling = healthy(0) | {"train/return": 0}
    assert warnings(lambda share: falling | {"train/success_once": 0.3 - 0.25 * share} | changed) == []


def test_falling_reward_gives_no_hacking_warning():
    falling = {"train/reward_format": 0.8, "train/return": 0.5}
    assert warnings(lambda share: healthy(share) | {name: value * (1 - share) for name, value in falling.items()}) == []


def test_shorter_episodes_of_a_robot_give_no_warning():
    assert warnings(lambda share: healthy(share) | {"train/episode_len": 100 - 95 * share}, text=False) == []


def test_steps_without_finished_episodes_are_skipped():
    check = CollapseCheck(rewards=[], text=True)
    assert check.check(1, {"env/steps": 3.0}) == []
