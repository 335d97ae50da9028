"""Process groups for data-parallel training of one policy; `OneRank` is a group of one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from embodyrl.channels.messages import RankInfo
from embodyrl.types import ImitationScores, PolicyScores

S = TypeVar("S", PolicyScores, ImitationScores)


class Ranks(Protocol):
    """Interface of a training rank.

    All ranks must call collective methods. Before each use, move the weights: `train` for an update, `act` for
    inference, `reshard` for the next request of any kind.
    """

    rank_info: RankInfo
    shards: bool
    """True if the module contains shards of the weights; between `act` and `train` it contains full weights."""

    def score(self, compute: Callable[[], S], *, last: bool) -> S:
        """Run a forward pass; `last`: gradient accumulation ends with this micro-batch. Collective."""
        ...

    def exchange(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        """Gather the metrics of all ranks: return the concatenated lists on every rank; collective."""
        ...

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor on the host over all ranks; collective."""
        ...

    def train(self) -> None:
        """Prepare for an update: sharded weights; collective."""

    def act(self) -> None:
        """Prepare for inference: full weights on every rank; collective."""

    def reshard(self) -> None:
        """Prepare for the next request: full weights if the process acts, shards if it only trains; collective."""

    def full_weights(self, *, write: bool) -> AbstractContextManager[None]:
        """Provide full, plain parameters in the block; with `write`, changes are kept; collective."""
        ...

    def gathered(self, state: Any, *, everywhere: bool = False) -> Any:
        """Return full CPU tensors in place of shards, in a tree of lists and dicts; collective.

        Unless `everywhere` is set, only the first rank returns them.
        """

    def shard(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's shard of a full optimizer state."""
        ...

    def close(self) -> None:
        """Leave the process group; idempotent."""


class OneRank:
    """A single training process with full weights."""

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
