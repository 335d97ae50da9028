"""The actor ranks: one process on its own, or N processes that share one policy (`learners/sharded.py`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from embodyrl.channels.messages import RankInfo
from embodyrl.types import ImitationScores, PolicyScores

S = TypeVar("S", PolicyScores, ImitationScores)

VALUE_HEAD = "value_head"


class Ranks(Protocol):
    """The processes that train one policy, as each of them sees it. What is collective, all of them must call.

    Before each use the weights must be where it needs them: `train` for an update, `act` for acting, `reshard` for
    whatever request comes next.
    """

    rank_info: RankInfo

    def score(self, compute: Callable[[], S], *, last: bool) -> S:
        """Run a forward pass; `last`: its backward pass ends the accumulation of gradients. Collective."""
        ...

    def exchange(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        """Return the parts of all ranks; collective."""
        ...

    def train(self) -> None:
        """Make ready for an update: shards; collective."""
        ...

    def act(self) -> None:
        """Make ready for acting: whole weights on every rank; collective."""
        ...

    def reshard(self) -> None:
        """Make ready for the next request: whole where the process acts, sharded where it only trains; collective."""
        ...

    def full_weights(self, *, write: bool) -> AbstractContextManager[None]:
        """Let the module hold whole, plain parameters; with `write`, what was changed inside is kept; collective."""
        ...

    def gathered(self, state: Any, *, everywhere: bool = False) -> Any:
        """Whole CPU tensors instead of shards, in any tree of lists and dicts; collective.

        Unless `everywhere` is set, only the first rank gets them.
        """
        ...

    def shard(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's part of a whole optimizer state."""
        ...

    def close(self) -> None:
        """Leave the group; idempotent."""
        ...


class OneRank:
    """`Ranks` of a policy that one process trains alone: everything is whole all the time, and nobody is asked."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info

    def score(self, compute: Callable[[], S], *, last: bool) -> S:
        """See `Ranks.score`."""
        return compute()

    def exchange(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        """See `Ranks.exchange`."""
        return parts

    def train(self) -> None:
        """Nothing is sharded."""

    act = reshard = close = train

    def full_weights(self, *, write: bool) -> AbstractContextManager[None]:
        """See `Ranks.full_weights`."""
        return nullcontext()

    def gathered(self, state: Any, *, everywhere: bool = False) -> Any:
        """See `Ranks.gathered`."""
        return state

    def shard(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `Ranks.shard`."""
        return state


def halve(module: nn.Module, *, sharded: bool) -> None:
    """Keep in bfloat16 what actors of fp32 weights bring to it wherever it is used; their function stays, bit for bit.

    Autocast casts the weights of matrix products and convolutions, and FSDP all of a layer (`learners/sharded.py`).
    Embeddings, other norms and the value head stay as they are.
    """
    products = (nn.Linear, nn.modules.conv._ConvNd)
    whole = [*layers(module)] if sharded else []
    parts = [m for n, m in module.named_modules() if isinstance(m, products) and VALUE_HEAD not in n]
    # A tied weight that is also used outside of a product (an embedding) stays as it is.
    elsewhere = {p for m in module.modules() if not isinstance(m, products) for p in m.parameters(recurse=False)}
    chosen = {p for m in parts for p in m.parameters()} - elsewhere | {p for m in whole for p in m.parameters()}
    for parameter in chosen:
        parameter.data = parameter.data.bfloat16()


def layers(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the elements of its outermost module lists."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [unit for child in module.children() for unit in layers(child)]
