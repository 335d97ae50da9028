import pytest

from embodyrl.monitor.intervals import wilson


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
def test_published_intervals(successes: int, n: int, low: float, high: float):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_symmetry_and_bounds():
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low), abs=1e-12)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 10)[0] == 0.0


def test_nothing_known_without_trials():
    assert wilson(0, 0) == (0.0, 1.0)


def test_impossible_counts():
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson(3, 2)
