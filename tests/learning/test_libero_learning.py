"""Ten minutes of GRPO on a CPU improve the included LIBERO checkpoint; shuffled advantages do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_runs import rows

import embodyrl

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(3600)]


def gain(folder: Path, *words: str, experiment: str = "libero_laptop") -> float:
    """Return the change of sampled success on 100 held-out episodes from the first to the last validation."""
    places = (f"runner.output_dir={folder}", "runner.logger.backends=[jsonl]")
    run = embodyrl.train(embodyrl.compose("train", [f"experiment={experiment}", *places, *words])).run
    found = [row["eval/success_once"] for row in rows(run) if "eval/success_once" in row]
    return found[-1] - found[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_laptop_experiment_gains_50_points(tmp_path: Path, seed: int) -> None:
    assert gain(tmp_path, f"seed={seed}") >= 0.5


def test_laptop_run_with_shuffled_advantages_does_not_improve(tmp_path: Path) -> None:
    assert gain(tmp_path, "algorithm.adv_type=toy_gates:SHUFFLED_GRPO") <= 0.1


def test_dsrl_improves_libero(tmp_path: Path) -> None:
    """Measured gains: +33, +32 and +42 points on 100 test episodes."""
    assert gain(tmp_path, experiment="libero_laptop_flow") >= 0.2
