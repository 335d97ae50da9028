"""Process groups of the processes that train one policy; `OneRank` is a group of one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from embodyrl.channels.messages import RankInfo
from embodyrl.types import ImitationScores, PolicyScores

S = TypeVar("S", PolicyScores, ImitationScores)


class Ranks(Protocol):
    """The processes that train one policy, as each of them sees it. What is collective, all of them must call.

    Before each use the weights must be where it needs them: `train` for an update, `act` for acting, `reshard` for
    whatever request comes next.
    """

    rank_info: RankInfo
    shards: bool
    """The module holds parts of the weights, but for the time between `act` and `train`."""

    def score(self, compute: Callable[[], S], *, last: bool) -> S:
        """Run a forward pass; `last`: its backward pass ends the accumulation of gradients. Collective."""
        ...

    def exchange(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        """Return the parts of all ranks; collective."""
        ...

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor on the host over all ranks; collective."""
        ...

    def train(self) -> None:
        """Make ready for an update: shards; collective."""

    def act(self) -> None:
        """Make ready for acting: whole weights on every rank; collective."""

    def reshard(self) -> None:
        """Make ready for the next request: whole where the process acts, sharded where it only trains; collective."""

    def full_weights(self, *, write: bool) -> AbstractContextManager[None]:
        """Let the module hold whole, plain parameters; with `write`, what was changed inside is kept; collective."""
        ...

    def gathered(self, state: Any, *, everywhere: bool = False) -> Any:
        """Whole CPU tensors instead of shards, in any tree of lists and dicts; collective.

        Unless `everywhere` is set, only the first rank gets them.
        """

    def shard(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's part of a whole optimizer state."""
        ...

    def close(self) -> None:
        """Leave the group; idempotent."""


class OneRank:
    """One process trains alone: everything is whole, and where it is needed."""

    shards = False

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info

    def score(self, compute: Callable[[], S], *, last: bool) -> S:
        """See `Ranks.score`."""
        return compute()

    def exchange(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        """See `Ranks.exchange`."""
        return parts

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """See `Ranks.total`."""
        return own

    def train(self) -> None:
        """See `Ranks.train`."""

    def act(self) -> None:
        """See `Ranks.act`."""

    def reshard(self) -> None:
        """See `Ranks.reshard`."""

    def full_weights(self, *, write: bool) -> AbstractContextManager[None]:
        """See `Ranks.full_weights`."""
        return nullcontext()

    def gathered(self, state: Any, *, everywhere: bool = False) -> Any:
        """See `Ranks.gathered`."""
        return state

    def shard(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `Ranks.shard`."""
        return state

    def close(self) -> None:
        """See `Ranks.close`."""
