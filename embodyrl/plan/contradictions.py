"""Contradictions between slots, groups and staleness."""

from collections.abc import Iterator

from embodyrl.cluster.protocol import LauncherSettings, ProcessSettings
from embodyrl.envs.settings import TrainSplit
from embodyrl.learners.settings import FsdpSettings
from embodyrl.plan.settings import RolloutMode


def slot_problems(split: TrainSplit, size: int, launcher: LauncherSettings) -> Iterator[str]:
    """Yield the contradictions between slots and groups of `size`, one line each with the fix."""
    slots = split.total_num_envs
    if slots % size:
        near = [n for n in ((slots // size) * size, (slots // size + 1) * size) if n]
        best = min((g for g in range(1, slots + 1) if slots % g == 0), key=lambda g: (abs(g - size), g))
        yield (
            f"env.train.total_num_envs={slots} is not divisible by algorithm.group_size={size}: every group needs a "
            f"slot for each member. Use env.train.total_num_envs={' or '.join(map(str, near))}, "
            f"or algorithm.group_size={best}."
        )
    elif size > 1 and not split.use_fixed_reset_state_ids:
        yield (
            f"algorithm.group_size={size} compares episodes of one initial state, but "
            "env.train.use_fixed_reset_state_ids=false gives each its own; set it to true."
        )
    workers = launcher.env_workers if isinstance(launcher, ProcessSettings) else "auto"
    if workers != "auto" and workers > slots:
        yield (
            f"launcher.env_workers={workers} but only env.train.total_num_envs={slots} slots: some workers would idle. "
            f"Use launcher.env_workers={slots}."
        )


def staleness_problems(lag: int, fsdp: FsdpSettings, mode: RolloutMode, *, deterministic: bool) -> Iterator[str]:
    """Yield the settings that an asynchronous run excludes, one line each with the fix."""
    if lag and deterministic:
        yield (
            f"algorithm.max_staleness={lag}: the weights of an asynchronous rollout depend on timing, so "
            "runner.deterministic=true is impossible. Unset one of the two keys."
        )
    if lag and (fsdp.size > 1 or fsdp.cpu_offload) and mode is RolloutMode.collocated:
        yield (
            f"algorithm.max_staleness={lag} samples actions during updates, which needs one actor rank without "
            "offloading. Use rollout.mode=disaggregated, or actor.fsdp.size=1 and actor.fsdp.cpu_offload=false."
        )
