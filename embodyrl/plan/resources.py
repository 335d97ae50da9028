"""Settings of a run that depend on available memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Settings of a run that depend on available memory."""

    gradient_sync: str = "micro_batch"
    """Frequency of gradient reduction over the ranks: once per optimizer step (`step`) or per micro-batch
    (`micro_batch`)."""
    sleeps: bool = False
    """True if vLLM frees its memory during updates."""
    engine_memory_fraction: float = 0.4
    """Fraction of a GPU's memory for vLLM."""
    checkpoint: int = 0
    """Size of a checkpoint on disk in bytes; 0: unknown."""

    def get_banner_lines(self, run_plan: Any) -> list[tuple[str, str]]:
        """Return the lines (label, text) of `--dry-run` about memory and speed.

        Raises:
            ConfigError: the run needs more memory than the machine has.
        """
        del run_plan
        return []
