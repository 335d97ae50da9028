"""Rollouts with real vLLM: weight updates, replies and log-probabilities."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from test_causal_lm import PROMPTS, TINY, build, noise, observe

from embodyrl.policies.protocol import mark_weights_changed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def policy():
    return build(TINY, backend="vllm", value_dim=6, top=2)


def change_weights(policy, seed: int) -> None:
    """Change all weights in place, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.module.lm.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    mark_weights_changed(policy.module)


def test_vllm_replies_match_the_weights_after_each_update(policy):
    plain = build(TINY)
    seen = []
    for seed in range(4):
        theirs = policy.act(observe(*PROMPTS), noise=None)
        plain.module.lm.load_state_dict(policy.module.lm.state_dict())
        ours = plain.act(observe(*PROMPTS), noise=None)
        np.testing.assert_array_equal(theirs.tokens, ours.tokens)
        np.testing.assert_allclose(theirs.logprob, ours.logprob, atol=1e-4)
        seen.append(theirs.tokens)
        change_weights(policy, seed)
    assert not any(np.array_equal(a, b) for a, b in pairwise(seen))


def test_vllm_log_probs_match_the_module(policy):
    out = policy.act(observe(*PROMPTS), noise=noise(5))
    scores = policy.score(observe(*PROMPTS), out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-4)
    np.testing.assert_allclose(scores.value.detach().numpy(), out.value, atol=1e-4)
    again = policy.act(observe(*PROMPTS), noise=noise(5))
    np.testing.assert_array_equal(again.tokens, out.tokens)
    assert policy.act(observe(*PROMPTS), noise=noise(5, 9)).replies != out.replies


def test_vllm_top_tokens_match_the_module(policy):
    plain = build(TINY, top=2)
    plain.module.lm.load_state_dict(policy.module.lm.state_dict())
    theirs, ours = (p.act(observe(*PROMPTS), noise=None) for p in (policy, plain))
    np.testing.assert_array_equal(theirs.tokens, ours.tokens)
    for vllm, module in zip(*(map(json.loads, out.top) for out in (theirs, ours)), strict=True):
        assert [[name for name, _ in step] for step in vllm] == [[name for name, _ in step] for step in module]
        told, expected = (np.array([[p for _, p in step] for step in one]) for one in (vllm, module))
        np.testing.assert_allclose(told, expected, atol=2e-3)


def test_seeded_vllm_handles_more_prompt_tokens_than_max_num_batched_tokens():
    """Prompts above `max_num_batched_tokens` in chunks would stop vLLM's CPU build."""
    engine = {"max_model_len": 64, "max_num_batched_tokens": 64}
    policy = build(TINY, backend="vllm", engine=engine)
    prompts = ["1" * 40 + str(n) for n in range(8)]
    out = policy.act(observe(*prompts), noise=noise(8))
    np.testing.assert_allclose(
        policy.score(observe(*prompts), out.tokens).logprob.detach().numpy(), out.logprob, atol=1e-4
    )
