"""Settings of a run that depend on available memory, chosen by an extension (entry point group `embodyrl.planners`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from embodyrl.registry import Registry, takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Settings of a run that depend on available memory."""

    gradient_sync: str = "micro_batch"
    """Frequency of gradient reduction over the ranks: once per optimizer step (`step`) or per micro-batch
    (`micro_batch`)."""
    sleeps: bool = False
    """True if vLLM frees its memory during updates."""
    engine_share: float = 0.4
    """Fraction of a GPU's memory for vLLM."""
    checkpoint: int = 0
    """Size of a checkpoint on disk in bytes; 0: unknown."""

    def facts(self, run_plan: Any) -> list[tuple[str, str]]:
        """Return the lines (label, text) of `--dry-run` about memory and speed.

        Raises:
            ConfigError: the run needs more memory than the machine has.
        """
        del run_plan
        return [("memory", "not estimated: the extension 'planner' is missing; reinstall embodyrl to get it")]


PLANNERS: Registry[Callable[[Any], Resources]] = Registry(
    "planner", group="embodyrl.planners", wants="a function of a RunPlan that returns Resources", fits=takes(1)
)


def plan_resources(run_plan: Any) -> Resources:
    """Return the settings from the first planner; without a planner, return the settings that need the least memory."""
    for planner in PLANNERS.every():
        return planner(run_plan)
    cfg = run_plan.cfg
    if not cfg.trains:
        return Resources()
    sync = cfg.actor.fsdp.gradient_sync
    return Resources(
        gradient_sync="micro_batch" if sync == "auto" else sync, sleeps=bool(cfg.rollout.vllm.enable_sleep_mode)
    )
