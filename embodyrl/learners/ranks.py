"""Process groups for data-parallel training of a policy."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from embodyrl.channels.messages import RankInfo
from embodyrl.types import ImitationLoss, PolicyScores

S = TypeVar("S", PolicyScores, ImitationLoss)


class Ranks:
    """A training rank: collective operations, and placement of full or sharded weights.

    This class is a single process with full weights; `ShardedRanks` is a process of a group. All ranks must call
    collective methods together. Call `shard_weights` before an update, `gather_weights` before inference, and `reshard`
    if the kind of the next request is not known.
    """

    shards = False
    """True if the module contains shards of the weights, except between `gather_weights` and `shard_weights`."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info

    def forward(self, compute: Callable[[], S], *, last: bool) -> S:
        """Run the forward pass `compute` (collective). `last` is True for the last micro-batch of an optimizer step."""
        return compute()

    def gather_metrics(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        """Gather lists of metrics (collective); every rank gets the concatenation of the lists of all ranks."""
        return parts

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a host tensor over all ranks (collective)."""
        return tensor

    def shard_weights(self) -> None:
        """Shard the weights for an update (collective)."""

    def gather_weights(self) -> None:
        """Gather the full weights on every rank for inference (collective)."""

    def reshard(self) -> None:
        """Restore the default placement (collective): shards, or full weights if the process also runs the policy."""

    def full_weights(self, *, write: bool) -> AbstractContextManager[None]:
        """Provide full, unsharded parameters inside the block (collective); with `write`, changes are kept."""
        return nullcontext()

    def gather(self, state: Any, *, everywhere: bool = False) -> Any:
        """Return a tree of lists and dicts with full CPU tensors in place of shards (collective).

        Only the first rank returns the tensors, unless `everywhere` is set.
        """
        return state

    def shard_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's shard of a full optimizer state."""
        return state

    def close(self) -> None:
        """Leave the process group; idempotent."""
