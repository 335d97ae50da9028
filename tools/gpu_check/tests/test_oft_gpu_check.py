"""The GPU check of OpenVLA-OFT runs on a CPU with the tiny model."""

import json

import pytest
import torch
from embodyrl_gpu_check.openvla_oft import _build_settings, measure_policy, planned_bytes
from embodyrl_gpu_check.result import GpuParts
from embodyrl_gpu_check.synthetic import ENV, write_checkpoint

from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.config import RANDOM_ON_DEVICE
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.vla.folder import RANDOM_INIT_KEY
from embodyrl.types import PolicyCosts


@pytest.mark.integration
def test_policy_check_measures_inference_and_training() -> None:
    result = measure_policy(GpuParts(), "cpu", "tiny")
    assert result.level == "ok", result
    assert result.values["plain: gap of log-probabilities"] < 0.05
    assert result.values["all weights: trained parameters"] > result.values["adapters: trained parameters"]


def test_failed_build_does_not_end_the_check() -> None:
    result = measure_policy(GpuParts(), "no_device", "tiny")
    assert result.level == "FAIL"
    assert "building the policy" in result.text


@pytest.mark.parametrize(
    ("trained", "activation", "planned"),
    [(None, 10, 1600), (None, 500, 1200 + 120 + 1007), (5, 10, 200 + 60 + 27), (5, 0, 200 + 80)],
)
def test_planned_memory_is_the_maximum_of_start_and_end_of_the_backward_pass(trained, activation, planned) -> None:
    logits = (5, 7) if activation else (0, 0)
    costs = PolicyCosts(
        num_parameters=100, num_trained=trained, outside_layers=40, activation_bytes=activation, logit_bytes=logits
    )
    assert planned_bytes(costs, 2) == planned


def test_weights_of_7b_are_generated_on_the_device(tmp_path):
    write_checkpoint(tmp_path, "7b", 2)
    assert json.loads((tmp_path / "config.json").read_text())[RANDOM_INIT_KEY] == RANDOM_ON_DEVICE


def test_weights_generated_on_a_cpu_device_match_the_cpu(tmp_path):
    write_checkpoint(tmp_path, "tiny", None)
    cfg, request = _build_settings(tmp_path, is_lora=False), PolicyRequest(env=ENV, device="cpu", seed=0)
    usual = FACTORY.build(cfg, request).module.state_dict()
    config = json.loads((tmp_path / "config.json").read_text()) | {RANDOM_INIT_KEY: RANDOM_ON_DEVICE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = FACTORY.build(cfg, request).module.state_dict()
    assert all(torch.equal(usual[name], weight) for name, weight in again.items())
