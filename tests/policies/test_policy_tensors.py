"""The device of a policy process."""

from __future__ import annotations

import pytest
import torch

from embodyrl.errors import ConfigError
from embodyrl.policies.tensors import get_best_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts whose torch sees no GPU")


def test_a_visible_gpu_that_torch_cannot_use_is_rejected(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        ConfigError, match=r"GPU 0 is visible .*(not compiled with CUDA|no NVIDIA driver).*CUDA_VISIBLE_DEVICES= "
    ):
        get_best_device()


@pytest.mark.parametrize("visible", ["", "NoDevFiles"])
def test_policy_runs_on_the_cpu_without_a_visible_gpu(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert get_best_device() == "cpu"
