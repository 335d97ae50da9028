"""Resource plan of a run: memory, memory fraction of vLLM, and predicted speed."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.plan.memory import MemoryPlan, engine_memory_fraction, plan_evaluation, plan_memory
from embodyrl.plan.memory_limits import require_devices, require_memory
from embodyrl.plan.rates import predict
from embodyrl.plan.resources import Resources
from embodyrl.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedResources(Resources):
    """Resources of a run, including the memory plan."""

    memory: MemoryPlan

    def get_banner_lines(self, run_plan: RunPlan) -> list[tuple[str, str]]:
        """Return the lines of `--dry-run` about memory and speed.

        Raises:
            ConfigError: the run needs more memory or GPUs than the machine has.
        """
        require_devices(run_plan)
        require_memory(run_plan, self.memory)
        if run_plan.algorithm is None:
            return self.memory.lines(run_plan.ranks, len(run_plan.env_workers))
        rates, vllm = predict(run_plan), ("", f"vLLM gets {self.engine_memory_fraction:.0%} of its GPU")
        return [
            *self.memory.lines(run_plan.ranks, len(run_plan.env_workers)),
            *([vllm] if self.memory.engine else []),
            *(rates.lines(run_plan.max_samples) if rates else []),
        ]


def plan_resources(run_plan: RunPlan) -> Resources:
    """Estimate the memory of a run, and derive the settings that depend on memory.

    `nvidia-smi` is called only if necessary.
    """
    learns = run_plan.cfg.is_train_command and run_plan.algorithm is not None
    memory = plan_memory(run_plan) if learns else None
    engine_fraction = engine_memory_fraction(run_plan, memory) if run_plan.cfg.rollout.backend == "vllm" else 0.0
    if memory is None:
        return PlannedResources(engine_memory_fraction=engine_fraction, memory=plan_evaluation(run_plan))
    return PlannedResources(
        gradient_sync=memory.gradient_sync,
        sleeps=memory.sleeps,
        engine_memory_fraction=engine_fraction,
        checkpoint=memory.checkpoint,
        memory=memory,
    )
