"""The GPU check of vLLM runs with the module's own generation."""

from pathlib import Path

from embodyrl_gpu_check import vllm_engine
from embodyrl_gpu_check.result import GpuParts


def test_engine_check_compares_log_probs_after_a_weight_update(tmp_path: Path) -> None:
    small = {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}
    vllm_engine.write_model(tmp_path, vllm_engine._SIZES | small)
    parts = GpuParts()
    vllm_engine.run_engine(parts, tmp_path, "cpu", backend="hf")
    assert parts.failures == []
    assert len(parts.values["gaps of log-probabilities"]) == 3
