"""Replies to repeated prompts: log-probabilities, values and gradients match those of separate prompts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from settings import model_of
from test_causal_lm import TINY, build, noise, observe
from text_runs import text_config

from embodyrl.commands.train import train
from embodyrl.policies.causal_lm import policy
from embodyrl.policies.causal_lm.settings import TextLoraSettings
from embodyrl.policies.causal_lm.shared_prompts import is_sharing_cheaper

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
