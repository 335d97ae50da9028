"""The GPU check of vLLM runs with the module's own generation."""

from pathlib import Path

from embodyrl.findings import GpuParts
from embodyrl.policies.causal_lm import gpu_check


def test_engine_check_compares_log_probs_after_a_weight_update(tmp_path: Path) -> None:
    small = {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}
    gpu_check.write_model(tmp_path, gpu_check._SIZES | small)
    parts = GpuParts()
    gpu_check.run_engine(parts, tmp_path, "cpu", backend="hf")
    assert parts.failures == []
    assert len(parts.values["gaps of log-probabilities"]) == 3
