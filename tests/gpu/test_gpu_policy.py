"""OpenVLA-OFT on a CUDA device: golden values, log-probabilities and the 7B benchmark."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from settings import model_of

from embodyrl.config.shared import Precision
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.model import ModelInputs
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, Observation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "openvla_oft"
TASKS = ("pick up the milk and place it in the basket", "open the middle drawer of the cabinet")
ENV = EnvSpec(
    name="e", action=ActionSpec(dim=7), tasks=TASKS, states_per_task=(1, 1),
    cameras=CameraSpec(names=("a",), size=(64, 64)),
    benchmark=BenchmarkSpec(unnorm_key="libero_10"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """By default, convolutions on CUDA round float32 to TF32 (ten bits), which exceeds the tolerances."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def build(path, *, device="cuda", precision=Precision.fp32, trainable=True):
    cfg = model_of(path=str(path), num_images_in_input=1, use_proprio=False, precision=precision)
    request = PolicyRequest(env=ENV, value_dim=1, temperature=1.0, device=device, seed=0, trainable=trainable)
    return FACTORY.build(cfg, request)


def observe(rows=4):
    images = np.random.default_rng(0).integers(0, 256, (rows, 1, 64, 64, 3), dtype=np.uint8)
    texts = tuple(TASKS[i % 2] for i in range(rows))
    return Observation(images=images, state=np.zeros((rows, 0), np.float32), instructions=texts)


def golden_logits(name):
    return load_file(GOLDEN / "expected" / f"{name}.safetensors", device="cuda")["action_logits_31744_32064"][..., :256]


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_gpu_logits_match_golden_values(tmp_path, precision):
    """The error in bfloat16 may be three times that of the CPU, because kernels round and add in another order."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "tiny_oft", folder)
    shutil.copy(ROOT / "assets" / "openvla_oft_tiny" / "tokenizer.json", folder)
    module = build(folder, precision=precision, trainable=False).module
    inputs = load_file(GOLDEN / "expected" / "inputs.safetensors", device="cuda")
    prompt = inputs["prompt_a"][None]
    dtype = next(module.parameters()).dtype
    batch = ModelInputs(
        pixels=inputs["pixel_values_1img"][:1].to(dtype), prompt_ids=prompt, prompt_lengths=prompt.new_tensor([21])
    )
    exact = golden_logits("official_discrete_1img")
    with torch.no_grad():
        error = module(batch)[0].float() - exact
    if precision == Precision.fp32:
        assert error.abs().max() < 1e-2
    else:
        rounding = golden_logits("official_discrete_1img_bf16").float() - exact
        assert error.norm() < 3.0 * rounding.norm()


@pytest.mark.parametrize(("precision", "tolerance"), [(Precision.fp32, 1e-4), (Precision.bf16, 1e-2)])
def test_sampled_and_recomputed_log_probs_agree_on_gpu(precision, tolerance):
    policy, obs = build("assets/openvla_oft_tiny", precision=precision), observe()
    out = policy.act(obs, noise=np.random.default_rng(1).random((4, 56), dtype=np.float32))
    scores = policy.score(obs, out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().cpu(), out.logprob, atol=tolerance)
    (scores.logprob.sum() + scores.value.sum()).backward()
    assert all(p.grad is not None for p in policy.module.parameters() if p.requires_grad)


def test_cpu_and_gpu_actions_agree():
    obs, noise = observe(), np.random.default_rng(1).random((4, 56), dtype=np.float32)
    gpu, cpu = (build("assets/openvla_oft_tiny", device=device).act(obs, noise=noise) for device in ("cuda", "cpu"))
    assert (gpu.tokens == cpu.tokens).mean() > 0.97, "a token may flip where its uniform number meets a bin's edge"
    same = gpu.tokens == cpu.tokens
    np.testing.assert_allclose(gpu.logprob[same], cpu.logprob[same], atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_7b_model_samples_actions_and_trains_with_adapters(tmp_path):
    if torch.cuda.mem_get_info()[1] < 40 * 2**30:
        pytest.skip("7B in bfloat16 with adapters wants 40 GiB of device memory")
    out = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--json", str(out), "--modes", "lora", "--batches", "1", "8"]
    subprocess.run([*command, "--micro-batch", "4", "--global-batch", "8", "--seconds", "1"], check=True, cwd=ROOT)
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["7b bf16 lora act batch 8"]["ours"] > rows["7b bf16 lora act batch 1"]["ours"]
    assert rows["7b bf16 lora train peak memory"]["ratio"] > 1
