"""Options: rotary table precision, action bounds, temperature, freezing and gradient checkpointing."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import torch
from test_oft_golden import close, inputs_of
from test_oft_policy import observe, uniforms

from embodyrl.config.shared import Precision
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.policies.openvla_oft import llama
from embodyrl.policies.openvla_oft.llama import apply_adapted_linears
from embodyrl.policies.settings import LoraSettings
from embodyrl.types import BenchmarkSpec


def test_rope_bf16_table_rounds_frequencies(checkpoint, make_policy, golden):
    """RLinf casts the rotary frequencies to bfloat16; the golden logits of both variants are 4.06 apart."""
    want = golden("official_discrete_1img_bf16")["action_logits_31744_32064_inv_freq_bf16"][..., :256].float()
    batch = inputs_of(golden, rows=1)
    distance = {}
    for rounded in (True, False):
        options = {"precision": Precision.bf16, "trainable": False, "rope_bf16_table": rounded}
        module = make_policy(checkpoint, **options).module
        with torch.no_grad():
            logits, _ = module(dataclasses.replace(batch, pixels=batch.pixels.bfloat16()))
        distance[rounded] = (logits - want).abs().max()
    assert distance[True] <= 0.5
    assert distance[False] > 3


def test_bounds_normalization_uses_minimum_and_maximum(checkpoint, make_policy):
    raw = json.loads((checkpoint / "dataset_statistics.json").read_text())["libero_10_no_noops"]["action"]
    policy = make_policy(checkpoint, action_normalization="bounds")
    assert (policy._bounds.high, policy._bounds.mask) == (tuple(raw["max"]), (*[True] * 6, False))
    wide = policy.act(observe(), noise=uniforms(4)).actions[..., 0]
    narrow = make_policy(checkpoint).act(observe(), noise=uniforms(4)).actions[..., 0]
    share = (wide - raw["min"][0]) / (raw["max"][0] - raw["min"][0])
    np.testing.assert_allclose(share, (narrow - raw["q01"][0]) / (raw["q99"][0] - raw["q01"][0]), atol=1e-5)


def test_evaluation_temperature_replaces_that_of_training(checkpoint, make_policy):
    hot, cold = make_policy(checkpoint, temperature=1.6), make_policy(checkpoint, temperature=0.6)
    got, want = hot.act(observe(), noise=uniforms(4), temperature=0.6), cold.act(observe(), noise=uniforms(4))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.logprob, want.logprob)
    assert not np.array_equal(got.tokens, hot.act(observe(), noise=uniforms(4)).tokens)


def test_freeze_patterns_select_parameters(checkpoint, make_policy):
    policy = make_policy(checkpoint, value_dim=1, freeze=["vision_backbone.*", "*.embed_tokens.weight"])
    scores = policy.score(observe(), policy.act(observe(), noise=uniforms(4)).tokens)
    (scores.logprob.sum() + scores.value.sum()).backward()
    with_gradient = {name for name, p in policy.module.named_parameters() if p.grad is not None}
    assert with_gradient
    assert not any(name.startswith("vision_backbone.") or "embed_tokens" in name for name in with_gradient)
    with pytest.raises(ConfigError, match=r"'vision\.\*' matches no parameter.*vision_backbone"):
        make_policy(checkpoint, freeze=["vision.*"])


def test_gradient_checkpointing_saves_memory(checkpoint, make_policy):
    gradients, saved = {}, {}
    for recompute in (False, True):
        policy = make_policy(checkpoint, value_dim=1, recompute=recompute)
        tokens = policy.act(observe(), noise=uniforms(4)).tokens
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.nbytes) or t, lambda t: t):
            scores = policy.score(observe(), tokens)
        (scores.logprob.sum() + scores.value.sum()).backward()
        gradients[recompute] = {n: p.grad for n, p in policy.module.named_parameters() if p.grad is not None}
        saved[recompute] = sum(kept)
    assert gradients[True].keys() == gradients[False].keys()
    for name, gradient in gradients[False].items():
        close(gradients[True][name], gradient, 1e-6, 1e-5)
    assert saved[True] < 0.5 * saved[False]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("aot_eager", marks=pytest.mark.timeout(300)),
        pytest.param("inductor", marks=pytest.mark.timeout(1800)),  # compiles C++: minutes
    ],
)
@pytest.mark.slow
def test_compiled_model_matches_the_plain_model(checkpoint, make_policy, monkeypatch, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor wants a C++ compiler")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    plain, fast = (make_policy(checkpoint, compile=c) for c in (False, True))
    a, b = (p.act(observe(), noise=None) for p in (plain, fast))
    np.testing.assert_allclose(b.logprob, a.logprob, atol=1e-4)
    plain.score(observe(), a.tokens).logprob.mean().backward()
    fast.score(observe(), a.tokens).logprob.mean().backward()
    for x, y in zip(plain.module.parameters(), fast.module.parameters(), strict=True):
        if x.grad is not None:
            assert y.grad is not None
            # Compiled, products are MKL's. Gradients are about 1, and either rounding is up to 1e-3 from float64.
            close(y.grad, x.grad, 1e-3, 1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_update_of_adapters_matches_the_plain_update(checkpoint, make_policy, monkeypatch):
    """Two micro-batches of one size, with the fused products that a GPU uses: one graph, without breaks."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(llama, "apply_linears", lambda layers, x, to=None: apply_adapted_linears(layers, x, to))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    results = []
    for compiled in (False, True):
        lora = LoraSettings(r=4, lora_alpha=4)
        policy = make_policy(checkpoint, compile=compiled, is_lora=True, lora=lora)
        torch.manual_seed(0)
        for weight in policy.module.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.05)
        tokens = np.full((2, policy.spec.tokens_per_chunk), policy._config.action_vocab_start + 3)
        logprobs = [policy.score(observe(seed, rows=2), tokens).logprob for seed in (0, 1)]
        sum(part.mean() for part in logprobs).backward()
        gradients = {name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}
        results.append((torch.cat(logprobs).detach(), gradients))
    (plain, plain_gradients), (fast, fast_gradients) = results
    close(fast, plain, 1e-5, 1e-5)
    assert fast_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        close(fast_gradients[name], gradient, 1e-5 * float(gradient.abs().max()), 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(("chunk", "dim", "images"), [(25, 14, 3), (5, 7, 1)])
def test_other_action_dimensions_are_supported(checkpoint, make_policy, env_spec, chunk, dim, images):
    """ALOHA: 25 actions of 14 dimensions from three cameras, between minimum and maximum; Bridge: 5 of 7."""
    bounds = {"min": [-2.0] * dim, "max": [2.0] * dim, "q01": [-1.0] * dim, "q99": [1.0] * dim}
    (checkpoint / "dataset_statistics.json").write_text(json.dumps({"robot": {"action": bounds}}))
    env = dataclasses.replace(
        env_spec,
        cameras=dataclasses.replace(env_spec.cameras, names=("a", "b", "c")),
        benchmark=BenchmarkSpec(unnorm_key="robot"),
        action=dataclasses.replace(env_spec.action, dim=dim),
    )
    shape = {"num_action_chunks": chunk, "action_dim": dim, "num_images_in_input": images}
    policy = make_policy(checkpoint, env=env, value_dim=chunk, action_normalization="bounds", **shape)
    obs = observe(rows=2, cameras=3)
    out = policy.act(obs, noise=np.random.default_rng(0).random((2, chunk * dim), dtype=np.float32))
    assert (out.actions.shape, out.tokens.shape, out.value.shape) == ((2, chunk, dim), (2, chunk * dim), (2, chunk))
    np.testing.assert_allclose(policy.score(obs, out.tokens).logprob.detach(), out.logprob, atol=1e-5)
    assert 1.0 < np.abs(out.actions).max() <= 2.0
    # Time-major: the tokens of one action lie side by side.
    centers = policy._actions.decode(out.tokens).reshape(2, chunk, dim)
    np.testing.assert_allclose(out.actions, 2 * centers, atol=1e-6)


@pytest.mark.parametrize(
    ("preset", "want"),
    [
        ("openvla_oft_simplevla", ("official", False, 1, True, "discrete", False)),
        ("openvla_oft_rlinf", ("rlinf", True, 1, False, "discrete", False)),
        ("openvla_oft_official", ("official", False, 2, True, "l1", True)),
        ("openvla", ("official", False, 1)),
    ],
)
def test_presets_are_valid(preset, want):
    model = load_config("train", [f"model={preset}"]).model
    chunks = () if preset == "openvla" else (model.append_stop, model.action_head, model.use_proprio)
    assert (model.image_pipeline, model.rope_bf16_table, model.num_images_in_input, *chunks) == want
