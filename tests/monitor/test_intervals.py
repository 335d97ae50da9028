import numpy as np
import pytest

from embodyrl.monitor.intervals import Mean, Rate, effective_episodes, student_t, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17, table I, method 3, no continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_matches_published_intervals(successes: int, n: int, low: float, high: float):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_symmetric_and_bounded():
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low), abs=1e-12)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 10)[0] == 0.0


def test_wilson_without_trials_is_zero_to_one():
    assert wilson(0, 0) == (0.0, 1.0)


def test_impossible_success_counts_are_rejected():
    with pytest.raises(ValueError, match="successes=3 must be between 0 and n=2"):
        wilson(3, 2)


def test_interval_with_one_episode_per_state_matches_wilson():
    rate = Rate.of((state, state < 8) for state in range(10))
    assert rate.interval == wilson(8, 10)
    assert str(rate) == str(Rate(8, 10))


def test_identical_repeats_count_once():
    rate = Rate.of((state, state < 5) for _ in range(10) for state in range(15))
    assert rate.interval == pytest.approx(wilson(5, 15))
    assert str(rate) == "33.3 % [15.2, 58.3] (50/150, 15 states)"
    assert Rate.of((state, False) for _ in range(10) for state in range(5)).interval == wilson(0, 5)


@pytest.mark.parametrize(("states", "alike"), [(10, 0.3), (20, 0.05), (20, 0.999)])
def test_clustered_intervals_have_nominal_coverage(states: int, alike: float):
    """600 evaluations of five episodes per state, whose success rates differ between states (beta-binomial, 70 %)."""
    rng, held, naive = np.random.default_rng(0), 0, 0
    for _ in range(600):
        chance = rng.beta(0.7 * (1 - alike) / alike, 0.3 * (1 - alike) / alike, states)
        rate = Rate.of((s, rng.random() < chance[s]) for s in range(states) for _ in range(5))
        held += rate.interval[0] <= 0.7 <= rate.interval[1]
        low, high = wilson(rate.successes, rate.episodes)
        naive += low <= 0.7 <= high
    assert held / 600 >= 0.92
    assert alike < 0.1 or naive / 600 < 0.85, "or the test shows nothing"


def test_few_states_widen_the_interval():
    """Five states of four episodes with 1, 1, 2, 3, 3 successes: p (1 - p) n^2 (5 - 1) / (5 * 4) / (t / z)^2."""
    groups = [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert effective_episodes(groups) == pytest.approx(0.25 * 400 * 4 / 20 * (1.96 / 2.776) ** 2, rel=0.01)


def test_change_is_later_minus_earlier():
    assert Rate(2, 10).change(Rate(5, 10)) == "+30.0"
    assert Mean(1.0, (0, 2), 3, 3).change(Mean(0.5, (0, 1), 3, 3)) == "-0.5"
    assert Rate(0, 0).change(Rate(5, 10)) == "-"


def test_means_are_clustered_by_state():
    once = Mean.of((s, float(s)) for s in range(10))
    half = student_t(9) * np.std(range(10), ddof=1) / np.sqrt(10)
    assert once.interval == pytest.approx((4.5 - half, 4.5 + half))
    copied = Mean.of((s, float(s)) for _ in range(7) for s in range(10))
    assert copied.interval == pytest.approx(once.interval)
    assert student_t(3) == pytest.approx(3.182, rel=0.01)
    assert student_t(30) == pytest.approx(2.042, rel=0.002)


def test_repeated_episodes_of_one_state_count_as_one():
    """Fails if the effective number of 49 episodes depends on the rounding of 1 / 49 * 49."""
    for episodes in (10, 49, 50):
        rate = Rate.of(("a", trial == 0) for trial in range(episodes))
        assert rate.effective_n == 1
        assert rate.interval == wilson(1 / episodes, 1)


def test_effective_episodes_never_exceed_the_episodes():
    """States that agree more than by chance do not increase the number of episodes."""
    groups = [[1.0, 0.0]] * 9 + [[1.0, 1.0]]
    assert effective_episodes(groups) == 20
    rate = Rate.of((state, outcome) for state, group in enumerate(groups) for outcome in group)
    assert rate.interval == wilson(11, 20)
