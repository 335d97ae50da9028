"""The default model precision without a configured value."""

from pathlib import Path

import pytest

from embodyrl import devices
from embodyrl.cli.dry_run import describe
from embodyrl.config.paths import resolve_asset
from embodyrl.config.shared import Precision
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.saved import save_config


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    model = ["model=causal_lm", f"model.path={resolve_asset('assets/causal_lm_tiny')}"]
    return [*model, f"data.path={tmp_path}/rows.jsonl", f"runner.output_dir={tmp_path}"]


def processor(monkeypatch: pytest.MonkeyPatch, folder: Path, *features: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(devices, "PROCESSOR", folder / "cpuinfo")
    (folder / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu sse avx512f {' '.join(features)}\n")


def test_float32_is_the_default_on_cpus_without_bfloat16(words, tmp_path, monkeypatch):
    processor(monkeypatch, tmp_path)
    cfg = load_config("sft", words)
    assert cfg.model.precision is Precision.fp32
    assert describe(cfg).count("no bf16 instructions") == 1
    save_config(cfg, tmp_path / "config.yaml")
    processor(monkeypatch, tmp_path, "avx512_bf16")
    assert load_saved_config(tmp_path / "config.yaml", []).model.precision is Precision.fp32, "resumed as it began"
    cfg = load_config("sft", words)
    assert cfg.model.precision is Precision.bf16
    assert "bf16 instructions" not in describe(cfg)


def test_bfloat16_is_kept_on_gpus_and_if_configured(words, tmp_path, monkeypatch):
    processor(monkeypatch, tmp_path)
    cfg = load_config("sft", [*words, "model.precision=bf16"])
    assert cfg.model.precision is Precision.bf16
    assert "bf16 instructions" not in describe(cfg)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert load_config("sft", words).model.precision is Precision.bf16
    monkeypatch.setattr(devices, "PROCESSOR", tmp_path / "missing")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert load_config("sft", words).model.precision is Precision.bf16, "an unknown processor"
