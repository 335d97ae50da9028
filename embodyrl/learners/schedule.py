"""Learning-rate schedule of a run."""

import math

from embodyrl.learners.settings import OptimSettings


class Schedule:
    """Linear warm-up, then a constant rate or a decay to min_lr_ratio until the run ends.

    The warm-up is a number of optimizer steps, or a fraction of the run. The decay depends on the position in the run,
    because the number of optimizer steps per training step varies: episodes end early, groups are filtered, and samples
    without a gradient are skipped. wsd (warm-up, stable, decay; arXiv 2404.06395) decays only in the last part.
    """

    def __init__(self, cfg: OptimSettings, total: int, warmup: int = 0) -> None:
        """Set up the schedule; `warmup` is the number of warm-up steps if the config sets none."""
        self._cfg = cfg
        default_steps = 0 if cfg.warmup_ratio else warmup
        self._warmup = default_steps if cfg.warmup_steps is None else cfg.warmup_steps
        self._total = total
        self.num_steps = 0
        """Number of optimizer steps so far."""
        self.warmup_end = 0.0
        """Position, in training steps, at which the warm-up ended."""

    def factor(self, position: float) -> float:
        """Return the learning-rate factor at `position`, which counts training steps of the run."""
        cfg, remaining = self._cfg, self._total - position
        warmup_end = cfg.warmup_ratio * self._total
        if position < warmup_end:
            # Plus 1, so that the first step has a rate above 0.
            return min(1.0, (position + 1.0) / warmup_end)
        if self.num_steps < self._warmup:
            return (self.num_steps + 1) / self._warmup
        if self._warmup and self.num_steps == self._warmup:
            self.warmup_end = position
        return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * self._decay(remaining, max(warmup_end, self.warmup_end))

    def _decay(self, remaining: float, warmup_end: float) -> float:
        """Return the decay factor when `remaining` training steps remain."""
        progress = 1.0 - remaining / max(1e-9, self._total - warmup_end)
        if self._cfg.schedule == "linear":
            return 1.0 - progress
        if self._cfg.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if self._cfg.schedule == "wsd":
            return min(1.0, remaining / max(1.0, self._total * self._cfg.decay_ratio))
        return 1.0

    def step(self) -> None:
        """Count an optimizer step. Call this method after each step."""
        self.num_steps += 1
