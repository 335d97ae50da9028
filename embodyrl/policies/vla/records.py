"""Token layouts of sampled action chunks: int64 tokens with a policy-specific meaning. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from embodyrl.types import FloatArray, IntArray

Stochastic = StrEnum("Stochastic", ["one", "all"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """Token layout: integers, one per token, followed by bit patterns of float32 numbers, two per token."""

    integers: int
    floats: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.integers + -(-self.floats // 2)

    def pack(self, integers: IntArray, floats: FloatArray) -> IntArray:
        """Pack integers [B, integers] and floats [B, floats] into tokens [B, tokens]."""
        assert integers.shape[1:] == (self.integers,) and floats.shape[1:] == (self.floats,), (
            integers.shape,
            floats.shape,
        )
        padded = np.zeros((len(floats), 2 * (self.tokens - self.integers)), np.float32)
        padded[:, : self.floats] = floats
        return np.concatenate([integers, padded.view(np.int64)], axis=1)

    def unpack(self, tokens: IntArray) -> tuple[IntArray, FloatArray]:
        """Unpack tokens [B, T] with T >= `tokens` into integers [B, integers] and floats [B, floats]."""
        bits = np.ascontiguousarray(tokens[:, self.integers : self.tokens])
        return tokens[:, : self.integers], bits.view(np.float32)[:, : self.floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """Sizes of an action chunk: predicted and executed actions, with and without padding."""

    horizon: int
    """H: number of actions that the network predicts per chunk."""
    width: int
    """D: action dimension with padding."""
    executed: int
    """K <= H: number of executed actions."""
    action_dim: int
    """A <= D: action dimension without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """Token layout of a sampled chunk, and the number of log-probabilities per action."""

    shape: ChunkShape
    layout: TokenLayout
    per_action: int
    """P: number of log-probabilities per executed action."""

    @classmethod
    def chain(cls, shape: ChunkShape, states: int) -> "ChunkRecord":
        """Return the token layout for a chain of Gaussian steps; the tokens contain `states` complete states."""
        floats = states * shape.horizon * shape.width + shape.executed * shape.action_dim
        return cls(shape=shape, layout=TokenLayout(integers=1, floats=floats), per_action=shape.action_dim)

    @property
    def tokens(self) -> int:
        """Number of tokens of a chunk: a multiple of K, at least the number of the chunk's log-probabilities."""
        return self.shape.executed * max(self.per_action, -(-self.layout.tokens // self.shape.executed))
