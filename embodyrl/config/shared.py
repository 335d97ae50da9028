"""Settings classes shared by several packages."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Count, CountOrAll, Index, Positive, Settings, Share

Precision = StrEnum("Precision", ["bf16", "fp32"])


class SamplingSettings(Settings):
    """Config keys for the sampling of actions and tokens during rollouts."""

    temperature: Positive = 1.0
    """Sampling temperature of rollouts, also used for log-probabilities in the loss."""
    top_k: CountOrAll = -1
    """Text generation only: sample from the k most probable tokens; -1: off."""
    top_p: Share = 1.0
    """Text generation only: probability mass of nucleus sampling; 1: off."""
    repetition_penalty: Positive = 1.0
    """Text generation only: penalty on tokens that occur in the prompt or the reply; 1: off."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Text generation only: value subtracted from a token's logit for each occurrence in the reply; 0: off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Text generation only: value subtracted from the logit of a token that occurs in the reply; 0: off."""
    max_new_tokens: Count | None = None
    """Text generation only: maximum number of tokens in a reply."""
    min_new_tokens: Index = 0
    """Text generation only: minimum number of tokens in a reply."""
    stop: list[str] = []
    """Text generation only: stop strings; a reply ends at the first occurrence of a stop string."""
    stop_token_ids: list[Index] = []
    """Text generation only: ids of tokens that end a reply, in addition to the model's own end tokens."""

    def problems(self) -> Iterator[str]:
        """Yield an error if the minimum reply length exceeds the maximum."""
        yield from super().problems()
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            yield (
                f"algorithm.sampling_params.min_new_tokens={self.min_new_tokens} is more than max_new_tokens="
                f"{self.max_new_tokens}; lower min_new_tokens."
            )
