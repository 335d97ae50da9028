"""OpenVLA token decoding against a plain full-vocabulary decoder without cache or padding."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from settings import model_of
from test_oft_golden import inputs_of
from test_oft_policy import observe

from embodyrl.policies import POLICIES
from embodyrl.policies.openvla_oft import OPENVLA
from embodyrl.policies.openvla_oft.model import decode_tokens

FIRST, END = 31744, 32000


@pytest.fixture
def openvla(checkpoint, make_policy):
    def make(**config):
        return make_policy(checkpoint, factory=OPENVLA, num_action_chunks=1, **config)

    return make


def rope(x):
    positions, dim = torch.arange(x.shape[-2]).float(), x.shape[-1]
    angle = torch.outer(positions, 10000.0 ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)
    turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
    return x * angle.cos() + turned * angle.sin()


def reference_logits(state, embeddings):
    """Return the logits [V] of the last row of [1, T, D]: Llama with a causal mask, written out."""

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * state[name]

    x = embeddings
    for i in range(3):
        base = f"language_model.model.layers.{i}."
        h = norm(x, base + "input_layernorm.weight")
        q, k, v = (
            (h @ state[f"{base}self_attn.{n}_proj.weight"].T).unflatten(-1, (2, 8)).transpose(1, 2) for n in "qkv"
        )
        scores = rope(q) @ rope(k).transpose(-1, -2) / 8**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + out.transpose(1, 2).flatten(2) @ state[f"{base}self_attn.o_proj.weight"].T
        h = norm(x, base + "post_attention_layernorm.weight")
        gate, up = (h @ state[f"{base}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ state[base + "mlp.down_proj.weight"].T
    return (norm(x, "language_model.model.norm.weight") @ state["language_model.lm_head.weight"].T)[0, -1]


def reference_decode(module, batch, row):
    """Return greedy ids, and log-probabilities at T = 1.6 among the action ids, of one row."""
    state = {name: p.detach() for name, p in module.state_dict().items()}
    patches = module.projector(module.vision_backbone(batch.pixels[row : row + 1]))
    ids = batch.prompt_ids[row, : batch.prompt_lengths[row]].tolist()
    found, logprobs = [], []
    for _ in range(7):
        text = state["language_model.model.embed_tokens.weight"][torch.tensor(ids + found)][None]
        logits = reference_logits(state, torch.cat([text[:, :1], patches, text[:, 1:]], dim=1))
        masked = torch.full_like(logits, -torch.inf)
        masked[FIRST:END] = logits[FIRST:END]
        found.append(int(masked.argmax()))
        logprobs.append(float((masked / 1.6).log_softmax(-1)[found[-1]]))
    return found, logprobs


def test_greedy_actions_and_log_probs_match_the_reference(openvla, golden):
    module, batch = openvla().module, inputs_of(golden)
    with torch.no_grad():
        logits, bins, _ = decode_tokens(module, batch, lambda _, x: x.argmax(-1))
        scored, _ = module(batch, bins + FIRST)
        for row in range(2):
            ids, logprobs = reference_decode(module, batch, row)
            assert (bins[row] + FIRST).tolist() == ids
            for got in (logits, scored):
                chosen = (got[row] / 1.6).log_softmax(-1).gather(-1, bins[row, :, None])[:, 0]
                np.testing.assert_allclose(chosen, logprobs, atol=1e-4)


def test_tokens_depend_on_earlier_tokens_only(openvla, golden):
    module, batch = openvla().module, inputs_of(golden)
    tokens = torch.full((2, 7), FIRST + 100)
    changed = tokens.clone()
    changed[:, 3] += 50
    with torch.no_grad():
        a, b = module(batch, tokens)[0], module(batch, changed)[0]
    assert torch.equal(a[:, :4], b[:, :4])
    assert all((a[:, j] - b[:, j]).abs().max() > 1e-3 for j in range(4, 7))


def test_openvla_actions_and_log_probs_are_batch_independent(openvla):
    policy = openvla(value_dim=1)
    assert policy.spec.tokens_per_chunk == 7
    obs, noise = observe(), np.random.default_rng(0).random((4, 7), dtype=np.float32)
    out = policy.act(obs, noise=noise)
    assert out.actions.shape == (4, 1, 7)
    scores = policy.score(obs, out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-4)
    np.testing.assert_allclose(scores.value.detach().numpy(), out.value, atol=1e-5)
    np.testing.assert_allclose(policy.values(obs), out.value, atol=1e-5)
    first = dataclasses.replace(obs, images=obs.images[:1], state=obs.state[:1], instructions=obs.instructions[:1])
    alone = policy.act(first, noise=noise[:1])
    np.testing.assert_array_equal(alone.tokens, out.tokens[:1])
    np.testing.assert_allclose(alone.logprob, out.logprob[:1], atol=1e-4)


def test_openvla_predicts_single_actions(checkpoint):
    assert POLICIES.get("openvla") is OPENVLA
    (problem,) = OPENVLA.validate(model_of("openvla", path=str(checkpoint)))
    assert "one action per inference" in problem
    assert "append_stop" not in OPENVLA.settings.model_fields
