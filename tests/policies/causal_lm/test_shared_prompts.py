"""Replies to repeated prompts: log-probabilities, values and gradients match those of separate prompts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from settings import model_of
from test_causal_lm import TINY, build, noise, observe
from text_runs import ASKING, text_config
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from embodyrl.commands.train import train
from embodyrl.config.paths import assets_dir
from embodyrl.policies.causal_lm import CAUSAL_LM, policy
from embodyrl.policies.causal_lm.settings import TextLoraSettings
from embodyrl.policies.causal_lm.shared_prompts import is_sharing_cheaper
from embodyrl.policies.protocol import PolicyRequest

ASKED = ("What is the sum of 3 and 4, please?", "cab=")
GROUPS = ASKED * 4


@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("value_dim", [0, 6])
def test_shared_prompts_keep_log_probs_and_gradients(is_lora: bool, value_dim: int, monkeypatch: pytest.MonkeyPatch):
    cfg = model_of(**dict(TINY) | {"is_lora": is_lora, "lora": TextLoraSettings(r=2, lora_alpha=2)})
    tested = build(cfg, value_dim=value_dim, temperature=0.7, trainable=True)
    with torch.no_grad():  # attention of small random weights hardly depends on positions
        for name, weight in tested.module.named_parameters():
            weight.mul_(20.0 if "q_proj" in name or "k_proj" in name else 1.0)
    if value_dim:
        torch.nn.init.normal_(tested.module.value_head.weight)
    tokens = tested.act(observe(*GROUPS), noise=noise(len(GROUPS))).tokens
    tokens[3, 1:] = -1  # replies of different lengths
    found = []
    for shares in (is_sharing_cheaper, lambda *_: False):
        used = _watch(monkeypatch, shares)
        scores = tested.score(observe(*GROUPS), tokens)
        assert used == [shares is is_sharing_cheaper]
        (scores.logprob.square().sum() + scores.entropy.sum() + scores.value.square().sum()).backward()
        grads = [p.grad.clone() for p in tested.module.parameters() if p.grad is not None]
        found.append((scores.logprob.detach(), scores.entropy.detach(), scores.value.detach(), *grads))
        tested.module.zero_grad()
    for shared, apart in zip(*found, strict=True):
        torch.testing.assert_close(shared, apart, rtol=1e-4, atol=1e-5 * max([1.0, *apart.abs().flatten().tolist()]))


def test_planned_activations_cover_the_longest_replies_to_shorter_prompts(tmp_path: Path):
    """Sharing the longest prompts needs less memory than separate prompts of a third of their length."""
    reply, longest, samples, prompts = 16, 48, 16, 2
    AutoTokenizer.from_pretrained(assets_dir() / "causal_lm_tiny").save_pretrained(tmp_path)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).save_pretrained(tmp_path)
    lora = TextLoraSettings(r=2, lora_alpha=2)
    cfg = model_of(
        model_type="causal_lm", path=str(tmp_path), precision="fp32", is_lora=True, lora=lora, num_action_chunks=reply
    )
    env = replace(ASKING, text=replace(ASKING.text, prompt_tokens=longest))
    tested = CAUSAL_LM.build(cfg, PolicyRequest(env=env, device="cpu", seed=0))
    weights = {weight.untyped_storage().data_ptr() for weight in tested.module.parameters()}
    tokens = np.full((samples, reply), 7)

    def measure(width: int) -> int:
        """Return the bytes that scoring stores for the backward pass, with prompts of `width` tokens."""
        stored: list[torch.UntypedStorage] = []
        obs = observe(*("ab"[i % prompts] * (width - 1) for i in range(samples)))  # and a first token
        with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t.untyped_storage()) or t, lambda t: t):
            scores = tested.score(obs, tokens)
        assert scores.logprob.requires_grad
        return sum({s.data_ptr(): s.nbytes() for s in stored if s.data_ptr() not in weights}.values())

    measured = {width: measure(width) for width in (9, 18, 20, longest)}
    assert max(measured, key=measured.__getitem__) == 18, "longer prompts are shared"
    planned = CAUSAL_LM.costs(cfg, env, 0).estimate_activation_bytes(samples, prompts)
    assert 0.95 * measured[18] < planned < 1.1 * measured[18]


def test_different_prompts_are_not_shared(monkeypatch: pytest.MonkeyPatch):
    tested = build(TINY, trainable=True)
    used = _watch(monkeypatch, is_sharing_cheaper)
    obs = observe("What is 3 + 4?", "What is 4 + 4?", "cab=")
    tested.score(obs, tested.act(obs, noise=noise(3)).tokens)
    assert used == [False]


def test_micro_batches_of_an_update_contain_whole_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    distinct: list[int] = []
    monkeypatch.setattr(
        policy,
        "is_sharing_cheaper",
        lambda *args: distinct.append(len({id(p) for p in args[1]})) or is_sharing_cheaper(*args),
    )
    sizes = ("env.train.total_num_envs=16", "actor.micro_batch_size=8", "actor.global_batch_size=16")
    train(text_config(tmp_path, *sizes, "algorithm.entropy_bonus=1e-3", "runner.max_steps=1"))
    assert distinct == [2, 2], "two groups of four in each micro-batch"


def _watch(monkeypatch: pytest.MonkeyPatch, shares: Callable[..., bool]) -> list[bool]:
    """Record the decisions of `shares`, with `is_sharing_cheaper` replaced."""
    used: list[bool] = []
    monkeypatch.setattr(policy, "is_sharing_cheaper", lambda *args: used.append(shares(*args)) or used[-1])
    return used
