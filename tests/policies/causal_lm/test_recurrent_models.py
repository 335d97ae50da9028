"""Hybrid models reply as with a plain forward pass; models with a state of their own are rejected by their type."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from settings import model_of
from test_causal_lm import build, noise, observe
from transformers import AutoConfig, AutoModelForCausalLM

from embodyrl.config.paths import assets_dir
from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError
from embodyrl.policies.causal_lm.policy import CausalLMPolicy
from embodyrl.policies.causal_lm.shared_prompts import is_sharing_cheaper

BASE = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
BASE["pad_token_id"] = 0
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 8}
LINEAR |= {"linear_num_value_heads": 4, "linear_value_head_dim": 8}
HYBRID = {
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
}
PROMPTS = ("12=", "abc=", "12=", "1+2+3+4+5+6+7+8+9=", "a=")


def write(folder: Path, kind: str, **sizes: object) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **BASE, **sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets_dir() / "causal_lm_tiny" / name, folder)
    return folder


def read(folder: Path) -> CausalLMPolicy:
    return build(model_of("causal_lm", precision=Precision.fp32, num_action_chunks=6, path=str(folder)))


@pytest.mark.parametrize("kind", HYBRID)
def test_hybrid_model_replies_match_a_plain_forward_pass(tmp_path: Path, kind: str):
    policy = read(write(tmp_path, kind, **ATTENTION, **HYBRID[kind]))
    out = policy.act(observe(*PROMPTS), noise=noise(5))
    scores = policy.score(observe(*PROMPTS), out.tokens).logprob.detach().numpy()
    assert not is_sharing_cheaper(policy.module, [policy.reader(observe("12="))[0]] * 8, 6), (
        "a backward pass needs earlier states"
    )
    for i, prompt in enumerate(PROMPTS):
        ids, reply = policy.reader(observe(prompt))[0], out.tokens[i][out.tokens[i] >= 0]
        logits = policy.module.lm(torch.tensor([[*ids, *reply]])).logits[0, len(ids) - 1 : -1]
        plain = logits.log_softmax(-1).gather(1, torch.tensor(reply)[:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(out.logprob[i, : len(reply)], plain, atol=1e-4)
        np.testing.assert_allclose(scores[i, : len(reply)], plain, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("rwkv", {"attention_hidden_size": 32}),
        ("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
        ("recurrent_gemma", ATTENTION | {"lru_width": 32, "block_types": ["recurrent", "attention"]}),
    ],
)
def test_model_without_a_cache_of_padded_prompts_is_rejected(tmp_path: Path, kind: str, sizes: dict):
    with pytest.raises(CheckpointError, match=f"'{kind}' do not support generation with a KV cache"):
        read(write(tmp_path, kind, **sizes))


def test_output_matrix_behind_another_layer_is_evaluated_completely(tmp_path: Path):
    """The decoder of ModernBERT has a dense layer between its last hidden states and the output matrix."""
    policy = read(write(tmp_path, "modernbert-decoder", **ATTENTION))
    tokens = np.random.default_rng(0).integers(4, 12, (8, 6))
    together = policy.score(observe(*["1+2+3+4+5+6="] * 8), tokens).logprob.detach()
    alone = policy.score(observe("1+2+3+4+5+6="), tokens[:1]).logprob.detach()
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-4)
