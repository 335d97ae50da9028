"""Learning-rate schedule of a run."""

import math

from embodyrl.learners.settings import OptimSettings


class Schedule:
    """Linear warm-up, then a constant rate or a decay to min_lr_ratio until the run ends.

    Warm-up counts optimizer steps, or is a share of the run. The decay follows the position in the run, because the
    number of optimizer steps per training step varies: episodes end early, groups are filtered, samples without a
    gradient are skipped. wsd (warm-up, stable, decay; arXiv 2404.06395) decays only in the last part of the run.
    """

    def __init__(self, cfg: OptimSettings, total: int, warmup: int = 0) -> None:
        """Set up the schedule; `warmup` is the number of warm-up steps if the config sets none."""
        self._cfg = cfg
        own = 0 if cfg.warmup_ratio else warmup
        self._warmup = own if cfg.warmup_steps is None else cfg.warmup_steps
        self._total = total
        self.taken = 0
        """Number of optimizer steps so far."""
        self.warm_until = 0.0
        """Position, in training steps, at which the warm-up ended."""

    def factor(self, position: float) -> float:
        """Return the learning-rate factor at `position`, which counts training steps of the run."""
        cfg, left = self._cfg, self._total - position
        share = cfg.warmup_ratio * self._total
        if position < share:
            # Plus 1, so that the first step has a rate above 0.
            return min(1.0, (position + 1.0) / share)
        if self.taken < self._warmup:
            return (self.taken + 1) / self._warmup
        if self._warmup and self.taken == self._warmup:
            self.warm_until = position
        return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * self._decay(left, max(share, self.warm_until))

    def _decay(self, left: float, warm_until: float) -> float:
        """Return the decay factor when `left` training steps remain."""
        progress = 1.0 - left / max(1e-9, self._total - warm_until)
        if self._cfg.schedule == "linear":
            return 1.0 - progress
        if self._cfg.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if self._cfg.schedule == "wsd":
            return min(1.0, left / max(1.0, self._total * self._cfg.decay_ratio))
        return 1.0

    def count(self) -> None:
        """Count an optimizer step. Call this method after each step."""
        self.taken += 1
