"""Policies that act with a suffix: guidance, files, and training."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.envs import ENVS
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_context
from embodyrl.policies import POLICIES
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.vla.conditioning import NEGATIVE, POSITIVE, Conditioning, add_suffix, read_conditioning
from embodyrl.types import Observation
from embodyrl.workers.noise import token_noise

MODELS = ("flow_small", "pi05_tiny", "smolvla_tiny")
GUIDED = Conditioning(suffix=POSITIVE, guidance=2.0)


def policy(model: str) -> FlowPolicy:
    cfg = load_config("eval", ["env=tabletop", f"model={model}", "model.precision=fp32"])
    env = ENVS.get("tabletop").spec(cfg.env, env_context(cfg))
    found = POLICIES.get(cfg.model.model_type).build(cfg.model, PolicyRequest(env=env, device="cpu", seed=0))
    assert isinstance(found, FlowPolicy)
    return found


def observation(found: FlowPolicy, text: str = "touch the red block") -> Observation:
    rng = np.random.default_rng(0)
    cameras = max(1, found.spec.inputs.num_images)
    return Observation(
        images=rng.integers(0, 256, (2, cameras, 56, 56, 3), np.uint8),
        state=rng.normal(size=(2, 4)).astype(np.float32),
        instructions=(text, text),
    )


@pytest.fixture(scope="module", params=MODELS)
def one(request: pytest.FixtureRequest) -> FlowPolicy:
    return policy(request.param)


def test_suffix_is_appended_once_and_replaced():
    once = add_suffix("open it", POSITIVE)
    assert once == "open it\nAdvantage: positive"
    assert add_suffix(once, POSITIVE) == once
    assert add_suffix(once, NEGATIVE) == "open it\nAdvantage: negative"
    assert add_suffix(f"{once} ", "") == "open it"


def test_guidance_matches_its_formula(one: FlowPolicy):
    """v = v_null + w (v_pos - v_null) in every step of the flow; w = 1 is one pass, w = 0 the policy without suffix."""
    obs = observation(one)
    x = torch.randn(2, *one._size, generator=torch.Generator().manual_seed(1))
    t = torch.full((2,), 0.5)

    def velocity(rule: Conditioning | None, words: str) -> torch.Tensor:
        one.conditioning = rule
        with torch.no_grad():
            return one._encode_for_inference(observation(one, words))[1](x, t)[0]

    words = obs.instructions[0]
    null, positive = velocity(None, words), velocity(None, add_suffix(words, POSITIVE))
    assert not torch.equal(null, positive)
    torch.testing.assert_close(velocity(GUIDED, words), null + 2.0 * (positive - null), rtol=0, atol=0)
    for weight, expected in ((0.0, null), (1.0, positive)):
        assert torch.equal(velocity(Conditioning(suffix=POSITIVE, guidance=weight), words), expected)
    # A client that already sent a suffix changes nothing.
    assert torch.equal(velocity(GUIDED, add_suffix(words, NEGATIVE)), velocity(GUIDED, words))
    one.conditioning = None


def test_guidance_zero_is_bit_identical_to_the_unconditioned_policy(one: FlowPolicy):
    obs = observation(one)
    seeds, steps = np.array([3, 4]), np.array([0, 0])
    noise = token_noise(seeds, steps, one.spec.tokens_per_chunk)
    for drawn in (None, noise):
        one.conditioning = None
        plain = one.act(obs, noise=drawn)
        one.conditioning = Conditioning(suffix=POSITIVE, guidance=0.0)
        found = one.act(obs, noise=drawn)
        for name in ("actions", "tokens", "logprob"):
            assert np.array_equal(getattr(found, name), getattr(plain, name)), name
    one.conditioning = None


def test_recomputed_log_probs_match_guided_actions(one: FlowPolicy):
    one.conditioning = GUIDED
    obs = observation(one)
    noise = token_noise(np.array([3, 4]), np.array([0, 0]), one.spec.tokens_per_chunk)
    found = one.act(obs, noise=noise)
    again = one.score(obs, found.tokens).logprob.detach().numpy()
    np.testing.assert_allclose(again, found.logprob, rtol=1e-4, atol=1e-4)
    one.conditioning = None


def test_conditioning_is_saved_with_the_weights(one: FlowPolicy, tmp_path: Path):
    one.conditioning = GUIDED
    one.save(tmp_path)
    guided = one.act(observation(one), noise=None).actions
    one.conditioning = None
    assert not np.array_equal(one.act(observation(one), noise=None).actions, guided)
    one.load_weights(tmp_path)
    assert one.conditioning == GUIDED
    assert np.array_equal(one.act(observation(one), noise=None).actions, guided)
    one.conditioning = None


@pytest.mark.parametrize("content", ['{"suffix": "x", "guidance": 1}', '{"suffix": 1}', "[]", "{"])
def test_malformed_conditioning_is_refused(tmp_path: Path, content: str):
    (tmp_path / "advantage.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"advantage\.json"):
        read_conditioning(tmp_path)


def test_guidance_requires_training_samples_without_suffix():
    words = partial(load_config, "sft")
    with pytest.raises(ConfigError, match="label_dropout=0"):
        words(["data.path=x", "objective.labels=x", "objective.label_dropout=0", "objective.guidance=2"])
    cfg: Any = words(["data.path=x", "objective.labels=x", "objective.guidance=2"])
    assert json.loads(cfg.objective.model_dump_json())["label_dropout"] == 0.3


def oft() -> OpenVlaOftPolicy:
    cfg = load_config("eval", ["env=tabletop", "model=openvla_oft_tiny", "model.precision=fp32"])
    env = ENVS.get("tabletop").spec(cfg.env, env_context(cfg))
    found = POLICIES.get(cfg.model.model_type).build(cfg.model, PolicyRequest(env=env, device="cpu", seed=0))
    assert isinstance(found, OpenVlaOftPolicy)
    return found


def test_guidance_of_discrete_actions_combines_logits(tmp_path: Path):
    """logits = null + w (positive - null), then the softmax; w = 0 is the policy without suffix bit for bit."""
    one = oft()
    rng = np.random.default_rng(0)
    size = (2, max(1, one.spec.inputs.num_images), 56, 56, 3)
    obs = Observation(
        images=rng.integers(0, 256, size, np.uint8),
        state=rng.normal(size=(2, 4)).astype(np.float32),
        instructions=("touch the red block",) * 2,
    )
    noise = token_noise(np.array([3, 4]), np.array([0, 0]), one.spec.tokens_per_chunk)
    plain = one.act(obs, noise=noise)
    one.conditioning = Conditioning(suffix=POSITIVE, guidance=0.0)
    zero = one.act(obs, noise=noise)
    assert np.array_equal(zero.tokens, plain.tokens)
    assert np.array_equal(zero.logprob, plain.logprob)
    one.conditioning = GUIDED
    found = one.act(obs, noise=noise)
    ids = torch.from_numpy(found.tokens)
    with torch.no_grad():
        words = [GUIDED.null(obs), GUIDED.conditioned(obs)]
        null, positive = (one._forward(one._inputs(each), ids)[0] for each in words)
    expected = (null + 2.0 * (positive - null)).log_softmax(-1)
    chosen = expected.gather(-1, (ids - one._head._columns.start)[..., None])[..., 0].numpy()
    np.testing.assert_allclose(found.logprob, chosen, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(one.score(obs, found.tokens).logprob.detach().numpy(), chosen, rtol=1e-4, atol=1e-5)
    one.save(tmp_path)
    one.conditioning = None
    one.load_weights(tmp_path)
    assert one.conditioning == GUIDED


def test_guidance_without_logits_of_a_whole_chunk_is_refused():
    cfg = load_config(
        "eval",
        [
            "env=tabletop",
            "model=openvla_oft_tiny",
            "model.action_head=l1",
            "model.precision=fp32",
            "model.path=assets/openvla_oft_tiny56px",
        ],
    )
    env = ENVS.get("tabletop").spec(cfg.env, env_context(cfg))
    one: Any = POLICIES.get(cfg.model.model_type).build(cfg.model, PolicyRequest(env=env, device="cpu", seed=0))
    with pytest.raises(ConfigError, match="Use guidance 0 or 1"):
        one.conditioning = GUIDED
    one.conditioning = Conditioning(suffix=POSITIVE, guidance=1.0)
