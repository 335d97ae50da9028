"""The GPU check of OpenVLA-OFT runs on a CPU with the tiny model."""

from embodyrl.findings import GpuParts
from embodyrl.policies.openvla_oft.gpu_check import measure_policy, planned_bytes
from embodyrl.types import PolicyCosts


def test_policy_check_acts_scores_and_trains() -> None:
    result = measure_policy(GpuParts(), "cpu", "tiny")
    assert result.level == "ok", result
    assert result.values["plain: gap of log-probabilities"] < 0.05
    assert result.values["all weights: trained parameters"] > result.values["adapters: trained parameters"]


def test_failed_build_does_not_end_the_check() -> None:
    result = measure_policy(GpuParts(), "no_device", "tiny")
    assert result.level == "FAIL"
    assert "building the policy" in result.text


def test_planned_bytes_are_those_of_the_precisions() -> None:
    costs = PolicyCosts(num_parameters=100, outside_layers=40, activation_bytes=10, scoring_bytes=(7, 0))
    assert planned_bytes(costs, 2) == 1600 + 120 + 27
    costs = PolicyCosts(num_parameters=100, num_trained=5, activation_bytes=10, scoring_bytes=(7, 0))
    assert planned_bytes(costs, 2) == 200 + 80 + 27
