"""Records of action chunks as tokens: int64 numbers that only the policy interprets. No torch."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from embodyrl.types import FloatArray, IntArray

Stochastic = StrEnum("Stochastic", ["one", "all"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """So many whole numbers, then n float32, two to a token: bit patterns, so that nothing is rounded."""

    whole: int
    floats: int

    @property
    def tokens(self) -> int:
        """Tokens that they fill."""
        return self.whole + -(-self.floats // 2)

    def pack(self, whole: IntArray, floats: FloatArray) -> IntArray:
        """Tokens [B, tokens] of whole numbers [B, whole] and floats [B, floats]."""
        assert whole.shape[1:] == (self.whole,) and floats.shape[1:] == (self.floats,), (whole.shape, floats.shape)
        padded = np.zeros((len(floats), 2 * (self.tokens - self.whole)), np.float32)
        padded[:, : self.floats] = floats
        return np.concatenate([whole, padded.view(np.int64)], axis=1)

    def unpack(self, tokens: IntArray) -> tuple[IntArray, FloatArray]:
        """Whole numbers and floats of tokens [B, at least `tokens`]."""
        bits = np.ascontiguousarray(tokens[:, self.whole : self.tokens])
        return tokens[:, : self.whole], bits.view(np.float32)[:, : self.floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """Sizes of a chunk inside the flow and outside."""

    horizon: int
    """H: rows that flow."""
    width: int
    """D: numbers of a row, padding included."""
    executed: int
    """K <= H: rows that are executed, and that count."""
    action_dim: int
    """A <= D: numbers of a row that mean something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """Layout of the tokens that a chunk's record holds, and its number of log-probabilities."""

    shape: ChunkShape
    layout: TokenLayout
    per_action: int
    """P: log-probabilities of an executed action."""

    @classmethod
    def chain(cls, shape: ChunkShape, states: int) -> "ChunkRecord":
        """The record of a chain of Gaussian steps that keeps n whole states."""
        floats = states * shape.horizon * shape.width + shape.executed * shape.action_dim
        return cls(shape=shape, layout=TokenLayout(whole=1, floats=floats), per_action=shape.action_dim)

    @property
    def tokens(self) -> int:
        """Tokens of a chunk: a multiple of K with room for its log-probabilities, of which there are as many."""
        return self.shape.executed * max(self.per_action, -(-self.layout.tokens // self.shape.executed))
