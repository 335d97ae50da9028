"""Streaming generation: one reply of a language model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from embodyrl.config.shared import SamplingSettings
from embodyrl.errors import EmbodyError
from embodyrl.extensions.conversation import Message, join_messages
from embodyrl.policies.causal_lm.sampling import choose, find_stop
from embodyrl.types import Observation

if TYPE_CHECKING:
    from embodyrl.policies.causal_lm.policy import CausalLMPolicy

_UNFINISHED = "\ufffd"
"""Character that a tokenizer returns for an incomplete sequence of bytes."""


class PromptError(EmbodyError, ValueError):
    """Conversation that the model cannot process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token of a reply."""

    token: int
    logprob: float
    """Log-probability before temperature and truncation."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens with their log-probabilities."""
    text: str
    """Text that this token completes. The concatenated texts of all tokens are the reply."""
    is_end: bool
    """True for an end token, which has no text."""
    finish: str | None
    """Reason for the end of the reply: stop (end token or stop string) or length; None: this token is not the last."""


def context_length(policy: CausalLMPolicy) -> int | None:
    """Return the maximum number of tokens of prompt and reply; None: unknown."""
    net: Any = policy.module
    return getattr(net.lm.config.get_text_config(), "max_position_embeddings", None)


def read_prompt(policy: CausalLMPolicy, messages: Sequence[Message]) -> list[int]:
    """Return the tokens of a conversation, up to the start of the reply.

    Raises:
        PromptError: the chat template rejects the roles, or the conversation exceeds the context.
    """
    from jinja2 import TemplateError

    cameras = policy.spec.inputs.num_images
    images = np.zeros((1, cameras, 1, 1, 3), np.uint8)
    obs = Observation(images=images, state=np.zeros((1, 0), np.float32), instructions=(join_messages(messages),))
    try:
        prompt = policy.read(obs)[0]
    except (TemplateError, TypeError, LookupError) as error:
        roles = ", ".join(m.role for m in messages)
        why = " ".join(str(error).split())[:200]
        raise PromptError(f"The chat template of the model rejects messages of {roles}: {why}") from error
    limit = context_length(policy)
    if limit is not None and len(prompt) >= limit:
        raise PromptError(f"The messages have {len(prompt)} tokens, but the model's context has only {limit} tokens")
    return list(prompt)


@torch.no_grad()
def stream(
    policy: CausalLMPolicy,
    prompt: Sequence[int],
    sampling: SamplingSettings,
    *,
    limit: int,
    seed: int | None,
    top: int = 0,
) -> Iterator[Piece]:
    """Generate one reply token by token, with the distribution of `CausalLMPolicy.act`.

    Args:
        policy: a language model.
        prompt: tokens of `read_prompt`.
        sampling: temperature, truncation, penalties and stop strings.
        limit: maximum number of tokens.
        seed: seed of the samples; None: the most probable tokens.
        top: number of most probable tokens to return.
    """
    net: Any = policy.module
    device = policy.ends.device
    noise = None if seed is None else torch.Generator().manual_seed(seed)
    text = ReplyText(policy.read.decode, sampling.stop, policy.read.opened)
    cache = DynamicCache(config=net.lm.config)
    given = torch.tensor([list(prompt)], device=device)
    seen = torch.zeros(1, net.vocabulary, dtype=torch.bool, device=device).scatter_(1, given, True)
    said = torch.empty(1, 0, dtype=torch.int64, device=device)
    start = 0
    for count in range(1, limit + 1):
        mask = torch.ones(1, start + given.shape[1], dtype=torch.int64, device=device)
        positions = torch.arange(start, start + given.shape[1], device=device)[None]
        logits: Tensor = net(given, mask, positions, 1, cache)[0][:, 0]
        uniform = None if noise is None else torch.rand(1, generator=noise).to(device)
        barred = [policy.ends] if count <= sampling.min_new_tokens else []
        barred += [] if policy.never is None else [policy.never]
        forbidden = torch.cat(barred) if barred else None
        chosen = choose(logits, uniform, sampling.temperature, sampling, seen, said, forbidden)
        raw = logits.log_softmax(-1)[0]
        token, best = int(chosen), raw.topk(min(top, raw.shape[0]))
        ended = bool(torch.isin(chosen, policy.ends).item())
        fresh = text.add(token, last=ended or count == limit, may_stop=count >= sampling.min_new_tokens)
        finish = "stop" if ended or text.stopped else "length" if count == limit else None
        yield Piece(
            token=token,
            logprob=float(raw[token]),
            top=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
            text=fresh,
            is_end=ended,
            finish=finish,
        )
        if finish:
            return
        start += given.shape[1]
        given = chosen[:, None]
        seen.scatter_(1, given, True)
        said = torch.cat([said, given], 1)


class ReplyText:
    """Incremental decoder: holds back incomplete characters and possible beginnings of stop strings."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], opened: str = "") -> None:
        """Set up an empty reply; `opened`: tag of the generation prompt, with which the text begins."""
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._from = self._done = 0
        """`_done`: number of decoded tokens. `_from`: earlier token at which decoding restarts, because the text of a
        token depends on the previous token."""
        self._held = opened
        self.stopped = False
        """True after a stop string."""

    def add(self, token: int, *, last: bool, may_stop: bool = True) -> str:
        """Add a token and return the new text that further tokens cannot change.

        `last`: return all remaining text. `may_stop`: False before the minimum length, where stop strings are text.
        """
        self._tokens.append(token)
        before = self._decode(self._tokens[self._from : self._done])
        after = self._decode(self._tokens[self._from :])
        if last or not after.endswith(_UNFINISHED):
            self._held += after[len(before) :]
            self._from, self._done = self._done, len(self._tokens)
        if may_stop and (found := find_stop(self._held, 0, self._stops)) is not None:
            self.stopped = True
            return self._release(found)
        return self._release(len(self._held) if last else len(self._held) - self._possible())

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _possible(self) -> int:
        """Return the length of the longest suffix of the undecided text that is the beginning of a stop string."""
        sizes = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n]))
        return max(sizes, default=0)
