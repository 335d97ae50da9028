"""GPU memory of simulators."""

from embodyrl.envs.factory import get_max_tasks_in_memory
from embodyrl.plan.run_plan import RunPlan


def rendering_bytes(run_plan: RunPlan) -> int:
    """Return the planned GPU memory of an env worker in bytes: rendering context, and textures of cached tasks."""
    env, count = run_plan.env_costs, len(run_plan.env_workers[0].env_indices)
    if env.task_bytes:
        cfg = run_plan.cfg
        split = cfg.env.splits["eval" if run_plan.algorithm is None and cfg.has_evaluations else "train"]
        tasks = len(split.task_ids or run_plan.env.tasks)
        count = min(count, tasks, get_max_tasks_in_memory(env.task_bytes, run_plan.env_workers_per_node))
    return env.gpu_bytes[0] + env.gpu_bytes[1] * count
