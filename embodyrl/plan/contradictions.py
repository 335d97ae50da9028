"""Contradictions between values of a config."""

from collections.abc import Iterator

from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import LauncherSettings, ProcessSettings
from embodyrl.config.settings import nodes
from embodyrl.envs.settings import TrainSplit
from embodyrl.errors import ConfigError
from embodyrl.learners.settings import FsdpSettings
from embodyrl.plan.schema import Config, sections_of
from embodyrl.plan.settings import RolloutMode


def contradictions(cfg: Config) -> Iterator[str]:
    """Yield contradictory values of a whole config, one line each with the fix."""
    for node in nodes(cfg):
        yield from node.problems()
    for section in sections_of(cfg).values():
        yield from section.problems(cfg)
    # The section exists only with a launcher that brings it along.
    if cfg.has("cluster"):
        try:
            apart = cfg.acting_processes > 0
            LAUNCHERS.get(cfg.launcher.name).nodes(cfg.cluster, separate=apart)
        except ConfigError as error:
            yield str(error)
    # A file serves training as well.
    if cfg.typed("video") and cfg.video.startswith("changed:") and (not cfg.trains or cfg.runner.only_eval):
        yield f"video={cfg.video} compares two validations of a training. Use first:N, failures or all."
    if cfg.trains:
        yield from _training_problems(cfg)
    if cfg.has("checkpoint"):
        yield from _rank_problems(cfg)


def _training_problems(cfg: Config) -> Iterator[str]:
    yield from slot_problems(cfg.env.train, cfg.algorithm.group_size, cfg.launcher)
    lag, certain = cfg.algorithm.max_staleness, cfg.runner.deterministic
    yield from staleness_problems(lag, cfg.actor.fsdp, cfg.rollout.mode, deterministic=certain)
    if cfg.algorithm.curriculum and lag:
        yield "algorithm.curriculum needs the outcomes of the previous step; set algorithm.max_staleness=0."
    if cfg.critic.path is not None and (certain or cfg.actor.fsdp.size > 1):
        yield (
            "critic.path: a separate critic works with one actor rank and without runner.deterministic=true. Set "
            "actor.fsdp.size=1 and runner.deterministic=false, or use the policy's value head."
        )
    if cfg.runner.resume_dir is not None and cfg.ckpt is not None:
        yield (
            f"ckpt={cfg.ckpt} and runner.resume_dir={cfg.runner.resume_dir}: a resumed run loads its own "
            "weights. Use one of the two keys."
        )


def _rank_problems(cfg: Config) -> Iterator[str]:
    size = cfg.actor.fsdp.size
    if size > 1 and LAUNCHERS.get(cfg.launcher.name).in_process:
        yield f"actor.fsdp.size={size}: launcher={cfg.launcher.name} has one process; use launcher=local or one rank."
    elif size > 1 and cfg.trains and cfg.rollout.backend != "hf" and not cfg.rollout.acting_processes:
        yield (
            f"rollout.backend={cfg.rollout.backend} generates with one actor rank. Use actor.fsdp.size=1, "
            "rollout.mode=disaggregated, or rollout.backend=hf."
        )
    elif size > 1 and cfg.model.compiled:
        key = "model.cuda_graphs" if cfg.model.recorded else "model.compile"
        yield f"{key}=true works with one actor rank. Use actor.fsdp.size=1, or {key}=false."


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
    """Yield the settings that asynchronous rollouts do not support, one line each with the fix."""
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
