"""Settings that rooms beside each other share."""

from enum import StrEnum

from embodyrl.config.settings import Count, CountOrAll, Positive, Settings, Share

Precision = StrEnum("Precision", ["bf16", "fp32"])


class SamplingSettings(Settings):
    """How a policy chooses while it collects data."""

    temperature: Positive = 1.0
    """One temperature for rollout and loss."""
    top_k: CountOrAll = -1
    """Text generation only; -1: off."""
    top_p: Share = 1.0
    """Text generation only; 1: off."""
    repetition_penalty: Positive = 1.0
    """Text generation only; 1: off."""
    max_new_tokens: Count | None = None
    """Text generation only: tokens of the longest reply."""
    stop: list[str] = []
    """Text generation only: a reply ends with the first of these texts."""
