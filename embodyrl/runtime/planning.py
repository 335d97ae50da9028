"""What a run will need and do, derived before anything starts: `--dry-run` and the start-up banner."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from embodyrl.config.schema import Config, EnvSplitConfig
from embodyrl.envs.memory import tasks_in_memory
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes
from embodyrl.runtime.build import Blueprint, draw_blueprint
from embodyrl.runtime.episodes import eval_plan, train_plan
from embodyrl.runtime.memory import GIB, plan_memory, require_memory
from embodyrl.types import EnvSpec


def describe(cfg: Config, command: str = "train") -> str:
    """Return the derived sizes of a run, a line each."""
    if command == "collect":
        from embodyrl.runtime.collect import draw_collection

        lines = facts(draw_collection(cfg))
        lines.append(("demos", f"{cfg.collect.episodes} episodes to {cfg.collect.out}"))
        return _layout(lines)
    if command == "sft":
        from embodyrl.runtime.sft_setup import sft_facts

        return _layout(sft_facts(cfg))
    training = command == "train" and not cfg.runner.only_eval
    blueprint = draw_blueprint(cfg, training=training)
    lines = facts(blueprint)
    if training:
        lines += _training_facts(blueprint)
    plan = eval_plan(blueprint.cfg, blueprint.env)
    lines.append(("validation", f"{plan.num_episodes} episodes in {plan.num_slots} slots"))
    return _layout(lines)


def _layout(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<12} {text}" for name, text in lines)


def facts(blueprint: Blueprint) -> list[tuple[str, str]]:
    """Name and text of the banner's lines."""
    cfg, env, policy = blueprint.cfg, blueprint.env, blueprint.policy
    split = cfg.env.train if blueprint.algorithm or blueprint.single_step else cfg.env.eval
    lines = {
        "env": f"{env.name} ({len(env.tasks)} tasks) · {blueprint.num_slots} slots in {len(blueprint.seats)} workers · "
        f"{split.max_episode_steps} steps/episode · {_sight(env)}",
        "policy": f"{policy.name} · {_count(policy.num_parameters)} parameters · {cfg.model.precision.value} · "
        f"chunk {policy.num_action_chunks} x {policy.action_dim}",
    }
    if env.task_bytes:
        lines["simulators"] = memory_of_tasks(env, split, len(blueprint.seats))
    if blueprint.algorithm is not None:
        a = cfg.algorithm
        clip = f"clip {a.clip_ratio_low}/{a.clip_ratio_high}"
        lines["algorithm"] = f"{a.adv_type} + {a.loss_type} · group {a.group_size} · {clip} · {a.logprob_type.value}"
    arena = f"shared arena {blueprint.layout.offsets(blueprint.capacity)[1] / 2**20:.0f} MiB"
    lines["machine"] = (
        f"{os.cpu_count()} cores · {arena} ({blueprint.capacity} records) · disk {_free_disk(cfg) / GIB:.0f} GiB free"
    )
    return list(lines.items())


def memory_of_tasks(env: EnvSpec, split: EnvSplitConfig, workers: int) -> str:
    """What loaded tasks cost, and how many of them each env worker keeps."""
    wanted = len(split.task_ids or env.tasks)
    kept = min(wanted, tasks_in_memory(env.task_bytes, workers))
    return (
        f"up to {env.task_bytes / 2**30:.1f} GiB per loaded task, {available_bytes() / 2**30:.1f} GiB free: each of "
        f"{workers} workers keeps {kept} of {wanted} tasks"
    )


def _training_facts(blueprint: Blueprint) -> list[tuple[str, str]]:
    cfg = blueprint.cfg
    assert blueprint.algorithm is not None
    plan = train_plan(cfg, blueprint.env, 0, counts_chunk_steps=blueprint.algorithm.counts_chunk_steps)
    quota = plan.waves[0].quota_chunks
    if quota is not None:
        per_step = f"{quota} chunk steps x {plan.num_slots} slots x {len(plan.waves)} rollouts"
    else:
        per_step = f"{plan.num_episodes} episodes, {plan.num_episodes // cfg.algorithm.group_size} groups"
    memory = plan_memory(blueprint)
    require_memory(blueprint, memory)
    free = _free_disk(cfg)
    if memory.checkpoint * (cfg.checkpoint.keep + 1) > free:
        raise ConfigError(
            f"A checkpoint needs {memory.checkpoint / GIB:.1f} GiB; {cfg.checkpoint.keep} are kept while one more is "
            f"written, and {free / GIB:.1f} GiB are free in {cfg.runner.output_dir}. Free some, or checkpoint.keep=1."
        )
    samples = blueprint.max_samples
    return [
        ("per step", f"{per_step} · up to {samples} samples, {blueprint.optimizer_steps_per_step} optimizer steps"),
        ("in total", f"{blueprint.total_steps} training steps"),
        *memory.lines(blueprint.ranks, len(blueprint.seats)),
        ("disk", f"{memory.checkpoint / GIB:.2f} GiB per checkpoint, {cfg.checkpoint.keep} kept"),
    ]


def _sight(env: EnvSpec) -> str:
    """What the policy can see."""
    if not env.cameras:
        return f"state [{env.state_dim}]"
    return f"{', '.join(env.cameras)} {env.image_size[0]}x{env.image_size[1]}"


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)


def _free_disk(cfg: Config) -> int:
    folder = Path(cfg.runner.output_dir)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
