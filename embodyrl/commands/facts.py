"""Banner lines, which describe a run at its start."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from embodyrl.algorithms.policy_losses import ClipSettings
from embodyrl.commands.held_out import held_out_banner_lines, rendering_banner_lines
from embodyrl.config.compose import format_override
from embodyrl.envs import ENVS
from embodyrl.envs.factory import SimFactory, tasks_in_memory
from embodyrl.envs.reward import RewardMode, StepRewardSettings
from embodyrl.envs.settings import EnvSplit
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes, available_cores
from embodyrl.plan.episodes import count_requested_episodes, eval_episodes, train_episodes
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import THIS_HOST, Config
from embodyrl.policies.inputs import gripper_text
from embodyrl.types import EnvSpec

MIB, GIB = 2**20, 2**30


def common_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the banner lines of a run as (label, text)."""
    cfg, env, policy = run_plan.cfg, run_plan.env, run_plan.policy
    workers = len(run_plan.env_workers)
    split = cfg.env.splits["eval" if run_plan.algorithm is None and cfg.evaluates else "train"]
    slots = f"{run_plan.num_slots} slots"
    if cfg.trains and run_plan.algorithm and cfg.env.train.total_num_envs < run_plan.num_slots:
        slots = f"{cfg.env.train.total_num_envs} slots (while validating {run_plan.num_slots})"
    parameters = run_plan.policy_costs.num_parameters
    lines = {
        "env": f"{env.name} ({len(env.tasks)} tasks) · {slots} in {workers} workers · "
        f"{_time_limit_text(env, split)} · {_observation_text(env)}",
        "policy": f"{policy.name} · {_format_count(parameters)} parameters · {cfg.model.precision_name} · "
        f"chunk {policy.num_action_chunks} x {policy.action_dim}",
    }
    lines["success"] = env.reward.success
    if isinstance(reward := cfg.reward, StepRewardSettings) and reward.path is not None:
        lines["reward"] = f"{reward.path} ({reward.mode})"
    lines |= dict(precision_facts(cfg)) | dict(preset_banner_lines(cfg))
    warnings = (*env.warnings, *policy.warnings, *_time_limit_warnings(run_plan), *_dense_reward_warnings(run_plan))
    if policy.inputs.instructions and not env.text.instructed:
        warnings += (
            f"'{policy.name}' reads instructions, and the environment has none, so its name is used; fix: "
            "env.instruction=TEXT",
        )
    if parameters and env.text.instructed and not policy.inputs.instructions and len(split.task_ids or env.tasks) > 1:
        warnings += (
            f"'{policy.name}' reads no instructions; fix, unless images and state show the task: select one task, "
            "env.train.task_ids=[0] env.eval.task_ids=[0]",
        )
    if warnings:
        lines["warning"] = "; ".join(warnings)
    if policy.inputs.num_images or policy.gripper:
        cameras = ", ".join(env.cameras.names[: policy.inputs.num_images]) or "none"
        rotation_text = (
            " · frames turned by 180 degrees" if policy.inputs.rotates_images and env.cameras.rotation_deg else ""
        )
        lines["inputs"] = (
            f"cameras {cameras}{rotation_text} · {gripper_text(policy.gripper)}, env: "
            f"{gripper_text(env.action.gripper)}"
        )
    if env.cameras.names and not policy.inputs.num_images and run_plan.algorithm is not None:
        lines["not seen"] = f"{', '.join(env.cameras.names)}: '{policy.name}' reads no images (model=cnn does)"
    if task_bytes := run_plan.env_costs.task_bytes:
        lines["simulators"] = task_memory_text(env, task_bytes, split, run_plan.env_workers_per_node)
    if run_plan.algorithm is not None:
        settings = run_plan.algorithm.settings
        loss = run_plan.algorithm.loss_settings
        clip = f" · clip {loss.clip_ratio_low}/{loss.clip_ratio_high}" if isinstance(loss, ClipSettings) else ""
        logprob_text = "" if run_plan.algorithm.estimator.needs_replay else f" · {settings.logprob_type.value}"
        lines["algorithm"] = f"{settings.method} · group {settings.group_size}{clip}{logprob_text}"
    arena_mib = run_plan.layout.offsets(run_plan.capacity)[1] / MIB
    arena = f"shared arena {arena_mib:.0f} MiB ({run_plan.capacity} records)"
    lines["machine"] = f"{available_cores()} cores · {arena} · disk {_free_disk(cfg) / GIB:.0f} GiB free"
    return list(lines.items())


def evaluation_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) about an evaluation."""
    cfg, env = run_plan.cfg, run_plan.env
    plan = eval_episodes(cfg, env, run_plan.policy)
    sampling_text = "sampled" if cfg.eval.sampling_params.do_sample else "greedy"
    num_states = len({episode.reset_id for episode in plan.episodes})
    text = f"{plan.num_episodes} {sampling_text} episodes of {num_states} initial states"
    if (num_requested := count_requested_episodes(cfg, env)) > plan.num_episodes:
        text += f"; {num_requested} episodes were requested, but the others would be exact copies"
    return [
        ("evaluation", text),
        *held_out_banner_lines(run_plan),
        *rendering_banner_lines(run_plan),
        *_env_banner_lines(cfg),
    ]


def _env_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the banner lines that the environment's factory adds."""
    factory = ENVS.get(cfg.env.env_type)
    return factory.facts(cfg.env) if isinstance(factory, SimFactory) else []


def precision_facts(cfg: Config) -> list[tuple[str, str]]:
    """Return a banner line if the model uses float32 because this host is slow in bfloat16; else an empty list."""
    if cfg.sources.get("model.precision") != THIS_HOST:
        return []
    return [("precision", "fp32: this processor has no bf16 instructions and is several times slower in bf16")]


def preset_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return a banner line with the presets of other groups that set values of `model`, `env` or `eval`."""
    overrides_by_source: dict[str, list[str]] = {}
    for key, source in cfg.sources.items():
        section, file = key.partition(".")[0], Path(source)
        unused = key.startswith(tuple(f"env.{split}." for split in {"train", "eval"} - cfg.env.splits.keys()))
        if (
            not unused
            and file.suffix == ".yaml"
            and section in ("model", "env", "eval")
            and file.parent.name in _PRESET_GROUPS
        ):
            overrides_by_source.setdefault(source, []).append(format_override(key, cfg.get(key)))
    text = "; ".join(f"{source}: {' '.join(overrides)}" for source, overrides in overrides_by_source.items())
    return [("presets", text)] if overrides_by_source else []


_PRESET_GROUPS = ("start", "experiment", "algorithm")
"""Groups whose options set values of other groups."""


def task_memory_text(env: EnvSpec, task_bytes: int, split: EnvSplit, workers: int) -> str:
    """Describe the memory that a loaded task needs, and the number of loaded tasks that each env worker keeps."""
    num_tasks = len(split.task_ids or env.tasks)
    num_loaded = min(num_tasks, tasks_in_memory(task_bytes, workers))
    return (
        f"up to {task_bytes / 2**30:.1f} GiB per loaded task, {available_bytes() / 2**30:.1f} GiB free: each of "
        f"{workers} workers keeps {num_loaded} of {num_tasks} tasks"
    )


def training_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) about samples, steps, memory and disk space of a training run.

    Raises:
        ConfigError: memory or disk space is too small.
    """
    cfg = run_plan.cfg
    assert run_plan.algorithm is not None
    plan = train_episodes(cfg, run_plan.env, 0, counts_chunk_steps=run_plan.algorithm.estimator.counts_chunk_steps)
    quota = plan.waves[0].quota_chunks
    if quota is not None:
        per_step = f"{quota} chunk steps x {plan.num_slots} slots x {len(plan.waves)} rollouts"
    else:
        per_step = f"{plan.num_episodes} episodes, {plan.num_episodes // cfg.algorithm.group_size} groups"
    resource_lines, size = run_plan.resources.get_banner_lines(run_plan), run_plan.resources.checkpoint
    samples = run_plan.max_samples
    require_disk(cfg, size, run_plan.total_steps)
    return [
        ("per step", f"{per_step} · up to {samples} samples, {run_plan.optimizer_steps_per_step} optimizer steps"),
        ("in total", f"{run_plan.total_steps} training steps"),
        *resource_lines,
        *([("disk", f"{size / GIB:.2f} GiB per checkpoint, {cfg.checkpoint.keep} kept")] if size else []),
    ]


def require_disk(cfg: Config, checkpoint: int, total_steps: int) -> None:
    """Raise an error if the checkpoints of a run, of `checkpoint` bytes each, do not fit on the disk.

    Raises:
        ConfigError: too little free space; the message contains required and free space.
    """
    interval, free = cfg.runner.save_interval, _free_disk(cfg)
    num_written = 1 if interval == -1 else -(-total_steps // interval)
    num_stored = min(num_written, cfg.checkpoint.keep + 1)
    if checkpoint * num_stored > free:
        # With checkpoint.keep=1, two checkpoints are stored while the second is written.
        advice = (
            ", set checkpoint.keep=1" if num_stored > 2 else ", set runner.save_interval=-1" if num_stored > 1 else ""
        )
        count_text = f", and up to {num_stored} checkpoints are stored at a time" if num_stored > 1 else ""
        raise ConfigError(
            f"A checkpoint needs {_format_bytes(checkpoint)}{count_text}, but only {_format_bytes(free)} are free in "
            f"{cfg.runner.output_dir}. Free disk space{advice}, or change runner.output_dir."
        )


def _time_limit_text(env: EnvSpec, split: EnvSplit) -> str:
    """Describe the time limit of an episode."""
    limit = split.time_limit(env)
    source_text = "" if limit == split.max_episode_steps else " (the environment's own limit)"
    return f"{limit} steps/episode{source_text}"


def _time_limit_warnings(run_plan: RunPlan) -> Iterator[str]:
    """Warn if training episodes can never reach their time limit, because rollouts or validations end them earlier."""
    cfg, algorithm = run_plan.cfg, run_plan.algorithm
    if algorithm is None or not algorithm.estimator.counts_chunk_steps:
        return
    split, limit = cfg.env.train, cfg.env.train.time_limit(run_plan.env)
    steps = split.max_steps_per_rollout_epoch or split.max_episode_steps
    interval, per_step = cfg.runner.val_check_interval, steps * cfg.algorithm.rollout_epoch
    if not split.continue_episodes and steps < limit:
        yield (
            f"training episodes have at most {steps} of {limit} steps, because each rollout starts new episodes; fix: "
            f"env.train.continue_episodes=true or env.train.max_steps_per_rollout_epoch={limit}"
        )
    elif split.continue_episodes and interval * per_step < limit and interval != -1:
        yield (
            f"training episodes have at most {interval * per_step} of {limit} steps, because each validation ends "
            f"them; fix: runner.val_check_interval={-(-limit // per_step)} or larger"
        )


def _observation_text(env: EnvSpec) -> str:
    """Describe the observation of the policy: cameras with image size, state size, or text."""
    if not env.cameras.names:
        return f"state [{env.state_dim}]" if env.state_dim else "words"
    return f"{', '.join(env.cameras.names)} {env.cameras.size[0]}x{env.cameras.size[1]}"


def _dense_reward_warnings(run_plan: RunPlan) -> Iterator[str]:
    """Warn if a policy may earn more by waiting near the goal than by success, which ends the episode."""
    cfg, env = run_plan.cfg, run_plan.env
    reward = cfg.reward
    is_replaced = (
        isinstance(reward, StepRewardSettings) and reward.path is not None and reward.mode is RewardMode.replace
    )
    is_summed = env.reward.dense and not is_replaced and not getattr(cfg.env, "use_rel_reward", False)
    if run_plan.algorithm is not None and is_summed and not cfg.env.train.ignore_terminations:
        yield (
            f"the reward of '{env.name}' is positive before success, so if success ends an episode, waiting near the "
            "goal may earn more; fix: env.use_rel_reward=true"
        )


def _format_bytes(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def _format_count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)


def _free_disk(cfg: Config) -> int:
    folder = Path(cfg.runner.output_dir)
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"runner.output_dir={cfg.runner.output_dir}: {folder} is not writable. Set another folder.")
    return shutil.disk_usage(folder).free
