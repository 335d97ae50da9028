"""Log-probabilities from chunks of logits match those from all logits at once."""

import weakref
from typing import Any

import pytest
import torch
from settings import model_of
from test_causal_lm import PROMPTS, TINY, build, noise, observe
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from embodyrl.policies.causal_lm import model
from embodyrl.policies.causal_lm.model import LanguageModel
from embodyrl.policies.causal_lm.settings import TextLoraSettings


@pytest.mark.parametrize("is_lora", [False, True])
def test_chunked_log_probs_keep_values_and_gradients(is_lora, monkeypatch):
    cfg = model_of(**dict(TINY) | {"is_lora": is_lora, "lora": TextLoraSettings(r=2, lora_alpha=2)})
    tested = build(cfg, value_dim=6, temperature=0.7, trainable=True)
    torch.nn.init.normal_(tested.module.value_head.weight)
    out = tested.act(observe(*PROMPTS), noise=noise(5))
    seen = []
    for logits in (2**27, 5 * tested._net.vocabulary):
        monkeypatch.setattr(model, "CHUNK_LOGITS", logits)
        scores = tested.score(observe(*PROMPTS), out.tokens)
        loss = scores.logprob.square().sum() + scores.entropy.sum() + scores.value.square().sum()
        loss.backward()
        grads = [p.grad.clone() for p in tested.module.parameters() if p.requires_grad]
        seen.append((scores.logprob.detach(), scores.entropy.detach(), scores.value.detach(), *grads))
        tested.module.zero_grad()
    for whole, chunked in zip(*seen, strict=True):
        # Values' gradients are in the thousands here, and entries cancel.
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-5 * max(1.0, float(whole.abs().max())))


class Rows(TorchDispatchMode):
    """Context that counts the rows of logits that exist at the same time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape, self.live, self.peak, self.known = (1, width), 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.shape == self.shape and t.untyped_storage() not in self.known:
                self.known.add(t.untyped_storage())
                weakref.finalize(t.untyped_storage(), self._count, -1)
                self._count(1)
        return out

    def _count(self, more: int) -> None:
        self.live += more
        self.peak = max(self.peak, self.live)


@pytest.mark.parametrize("bonus", [0.0, 0.1])
def test_backward_pass_stores_the_logits_of_one_chunk(bonus, monkeypatch):
    tested = build(TINY, temperature=0.7, trainable=True)
    out = tested.act(observe(*PROMPTS), noise=noise(5))
    width = tested._net.vocabulary
    monkeypatch.setattr(model, "CHUNK_LOGITS", width)
    with Rows(width) as rows:
        scores = tested.score(observe(*PROMPTS), out.tokens)
        (scores.logprob.sum() + (bonus and bonus * scores.entropy.sum())).backward()
    assert out.tokens.size >= 10
    assert rows.peak <= 4, "rows of logits at once"


@pytest.mark.parametrize("cap", [None, 30.0])
def test_soft_capped_logits_are_not_computed_in_chunks(cap):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma2Config(
        vocab_size=32, num_key_value_heads=1, head_dim=8, final_logit_softcapping=cap, pad_token_id=0, **sizes
    )
    net = LanguageModel(Gemma2ForCausalLM(config), 0)
    assert net.has_plain_head(torch.autocast("cpu", enabled=False)) is (cap is None)
