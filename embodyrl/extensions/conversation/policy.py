"""Interface of policies with text actions."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from embodyrl.policies.protocol import Policy
from embodyrl.types import IntArray, Observation


@runtime_checkable
class TextPolicy(Policy, Protocol):
    """Interface of a policy with text actions."""

    def encode_replies(self, replies: Sequence[str]) -> IntArray:
        """Return tokens [B, longest] of replies with their end tokens, padded with -1."""
        ...

    def prompt_lengths(self, obs: Observation) -> IntArray:
        """Return the number of tokens [B] of each conversation."""
        ...

    def served_by(self, url: str, model: str | None) -> Any:
        """Return a reference policy with `score` and `module`, computed by a model on a server.

        Raises:
            EmbodyError: there is no server, or its tokens differ.
        """
        ...
