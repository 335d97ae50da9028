"""Banner lines, which describe a run at its start."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from embodyrl.algorithms.policy_losses import ClipSettings
from embodyrl.algorithms.settings import BufferSettings
from embodyrl.commands.held_out import held_out_banner_lines, rendering_banner_lines
from embodyrl.commands.run_folder import weight_banner_lines
from embodyrl.envs import ENVS
from embodyrl.envs.factory import SimFactory, get_max_tasks_in_memory
from embodyrl.envs.reward import RewardMode, StepRewardSettings
from embodyrl.envs.settings import EnvSplit
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes, available_cores
from embodyrl.plan.episodes import count_requested_episodes, eval_episodes, train_episodes
from embodyrl.plan.memory_limits import resource_banner_lines
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import THIS_HOST, Config
from embodyrl.policies.inputs import format_gripper
from embodyrl.specs import RewardSpec
from embodyrl.types import ActionKind, EnvSpec, PolicySpec

MIB, GIB = 2**20, 2**30


def start_banner_lines(run_plan: RunPlan, weights: Path | None) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) of a run and of its initial weights (see `resolve_initial_weights`)."""
    return [*common_banner_lines(run_plan), *weight_banner_lines(run_plan.cfg, weights, run_plan.env)]


def common_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the banner lines of a run as (label, text)."""
    cfg, env, policy = run_plan.cfg, run_plan.env, run_plan.policy
    split = cfg.env.splits["eval" if run_plan.algorithm is None and cfg.has_evaluations else "train"]
    parameters = run_plan.policy_costs.num_parameters
    size = f", {_format_count(parameters)} parameters, {cfg.model.precision_name}" if parameters else ""
    lines = {
        "environment": f"{env.name}: {_describe_tasks(env, split)} · {_describe_envs(run_plan)} · "
        f"{_describe_time_limit(env, split)}",
        "policy": f"{policy.name}{size}{_describe_inputs(env, policy)} · output: {_describe_outputs(env, policy)}",
    }
    if run_plan.algorithm is not None:
        settings, loss = run_plan.algorithm.settings, run_plan.algorithm.loss_settings
        clip = ""
        if isinstance(loss, ClipSettings) and not isinstance(settings, BufferSettings):
            clip = f", clip {loss.clip_ratio_low}/{loss.clip_ratio_high}"
        groups = f", groups of {settings.group_size}" if settings.group_size > 1 else ""
        lines["algorithm"] = (
            f"{settings.method}{clip}{groups} · {_describe_rollout_length(run_plan)} per step, sampled actions · "
            f"{run_plan.total_steps} steps"
        )
    if policy.gripper and env.action.gripper and format_gripper(policy.gripper) != format_gripper(env.action.gripper):
        lines["gripper"] = (
            f"policy {format_gripper(policy.gripper)}; environment {format_gripper(env.action.gripper)}; converted"
        )
    if env.reward.success != RewardSpec().success:
        lines["success"] = env.reward.success
    if isinstance(reward := cfg.reward, StepRewardSettings) and reward.path is not None:
        lines["reward"] = f"{reward.path} ({reward.mode})"
    lines |= dict(precision_banner_lines(cfg)) | dict(preset_banner_lines(cfg))
    warnings = (*env.warnings, *policy.warnings, *_time_limit_warnings(run_plan), *_dense_reward_warnings(run_plan))
    if policy.inputs.instructions and not env.text.instructed:
        warnings += (
            f"'{policy.name}' reads instructions, but the environment has none, so the name of the environment is "
            "used; fix: env.instruction=TEXT",
        )
    if parameters and env.text.instructed and not policy.inputs.instructions and len(split.task_ids or env.tasks) > 1:
        warnings += (
            f"'{policy.name}' reads no instructions; fix, unless images or state show the task: select one task with "
            "env.train.task_ids=[0] env.eval.task_ids=[0]",
        )
    if warnings:
        lines["warning"] = "; ".join(warnings)
    if env.cameras.names and not policy.inputs.num_images and run_plan.algorithm is not None:
        lines["not seen"] = f"{', '.join(env.cameras.names)}: '{policy.name}' reads no images (model=cnn does)"
    if task_bytes := run_plan.env_costs.task_bytes:
        lines["simulators"] = describe_task_memory(env, task_bytes, split, run_plan.env_workers_per_node)
    return list(lines.items())


def machine_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the line of `--dry-run` about this machine as (label, text)."""
    mib = run_plan.layout.offsets(run_plan.capacity)[1] / MIB
    shared = f"shared memory {mib:.0f} MiB ({run_plan.capacity} records)"
    cores = f"{(count := available_cores())} core{'s' * (count != 1)}"
    return [("machine", f"{cores} · {shared} · disk {_free_disk(run_plan.cfg) / GIB:.0f} GiB free")]


def evaluation_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) about an evaluation."""
    cfg, env = run_plan.cfg, run_plan.env
    plan = eval_episodes(cfg, env, run_plan.policy)
    states = len({e.reset_id for e in plan.episodes})
    text = f"{plan.num_episodes} episodes, {'sampled' if cfg.eval.sampling_params.do_sample else 'greedy'} actions"
    text += f", {states} initial states" if states < plan.num_episodes else ""
    training, held_out = run_plan.algorithm is not None, held_out_banner_lines(run_plan)
    text += ", initial states that training does not use" if training and not held_out else ""
    if (num_requested := count_requested_episodes(cfg, env)) > plan.num_episodes:
        text += f"; {num_requested} episodes were requested, but the remaining episodes would be exact copies"
    label = "validation" if training else "evaluation"
    factory = ENVS.get(cfg.env.env_type)
    env_lines = factory.get_banner_lines(cfg.env) if isinstance(factory, SimFactory) else []
    return [(label, text), *held_out, *rendering_banner_lines(run_plan), *env_lines]


def precision_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return a banner line if the model uses float32 because this host is slow in bfloat16; else an empty list."""
    if cfg.sources.get("model.precision") != THIS_HOST:
        return []
    return [("precision", "fp32: this processor has no bf16 instructions and is several times slower in bf16")]


def preset_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return a banner line about the presets of other groups that set values of `model`, `env` or `eval`."""
    unused = tuple(f"env.{split}." for split in {"train", "eval"} - cfg.env.splits.keys())
    num_keys = Counter(
        source
        for key, source in cfg.sources.items()
        if key.startswith(("model.", "env.", "eval.")) and not key.startswith(unused)
        if source.endswith(".yaml") and Path(source).parent.name in _PRESET_GROUPS
    )
    text = "; ".join(f"{source} sets {count} keys" for source, count in num_keys.items())
    return [("presets", f"{text} (--print-config prints the values)")] if num_keys else []


_PRESET_GROUPS = ("start", "experiment", "algorithm")
"""Groups whose options set values of other groups."""


def describe_task_memory(env: EnvSpec, task_bytes: int, split: EnvSplit, workers: int) -> str:
    """Describe the memory of a loaded task, and the number of loaded tasks that each env worker keeps in memory."""
    num_tasks = len(split.task_ids or env.tasks)
    in_memory = min(num_tasks, get_max_tasks_in_memory(task_bytes, workers))
    return (
        f"up to {task_bytes / 2**30:.1f} GiB per loaded task, {available_bytes() / 2**30:.1f} GiB free: each of "
        f"{workers} workers keeps {in_memory} of {num_tasks} tasks"
    )


def training_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) about samples, steps, memory and disk space of a training run.

    Raises:
        ConfigError: memory or disk space is too small.
    """
    cfg = run_plan.cfg
    resource_lines, size = resource_banner_lines(run_plan), run_plan.memory.checkpoint
    require_disk(cfg, size, run_plan.total_steps)
    steps = run_plan.optimizer_steps_per_training_step
    return [
        ("update", f"up to {run_plan.max_samples} samples and {steps} optimizer steps per step"),
        *resource_lines,
        *([("disk", f"{size / GIB:.2f} GiB per checkpoint, {cfg.checkpoint.keep} kept")] if size else []),
    ]


def require_disk(cfg: Config, checkpoint_bytes: int, total_steps: int) -> None:
    """Raise an error if the checkpoints of a run, of `checkpoint_bytes` bytes each, do not fit on the disk.

    Raises:
        ConfigError: too little free space; the message contains required and free space.
    """
    interval, free = cfg.runner.save_interval, _free_disk(cfg)
    num_written = 1 if interval == -1 else -(-total_steps // interval)
    num_written += interval != -1 and num_written < total_steps  # a checkpoint after five minutes without one
    num_held = min(num_written, cfg.checkpoint.keep + 1)
    if checkpoint_bytes * num_held > free:
        # With checkpoint.keep=1, two checkpoints are stored while the second is written.
        fewer = ", set checkpoint.keep=1" if num_held > 2 else ", set runner.save_interval=-1" if num_held > 1 else ""
        stored = f", and up to {num_held} checkpoints are stored at a time" if num_held > 1 else ""
        raise ConfigError(
            f"A checkpoint needs {_format_bytes(checkpoint_bytes)}{stored}, but only {_format_bytes(free)} are free "
            f"in {cfg.runner.output_dir}. Free disk space{fewer}, or change runner.output_dir."
        )


def _describe_tasks(env: EnvSpec, split: EnvSplit) -> str:
    """Describe the number of tasks of a run, for example "3 of 21 tasks"."""
    total, chosen = len(env.tasks), len(split.task_ids or env.tasks)
    part = f"{chosen} of {total}" if chosen < total else str(total)
    return f"{part} task{'s' * (total > 1)}"


def _describe_envs(run_plan: RunPlan) -> str:
    """Describe the number of parallel environments and of their processes."""
    cfg, workers, num_envs = run_plan.cfg, len(run_plan.env_workers), run_plan.num_envs
    text = f"{num_envs} parallel environments"
    if cfg.is_train_command and run_plan.algorithm and cfg.env.train.total_num_envs < num_envs:
        text = f"{cfg.env.train.total_num_envs} parallel environments ({num_envs} in validations)"
    return f"{text} in {workers} process{'es' * (workers > 1)}"


def _describe_rollout_length(run_plan: RunPlan) -> str:
    """Describe the length of a training rollout, in episodes or in chunks of actions."""
    assert run_plan.algorithm is not None
    counts = run_plan.algorithm.estimator.counts_chunk_steps
    plan = train_episodes(run_plan.cfg, run_plan.env, 0, counts_chunk_steps=counts)
    if (quota := plan.waves[0].quota_chunks) is None:
        return f"{plan.num_episodes} episodes"
    repeats = f", {len(plan.waves)} times" if len(plan.waves) > 1 else ""
    return f"{quota} chunks of actions in each of {plan.num_envs} environments{repeats}"


def _describe_time_limit(env: EnvSpec, split: EnvSplit) -> str:
    """Describe the time limit of an episode."""
    limit = split.time_limit(env)
    own = "" if limit == split.max_episode_steps else " (the environment's own limit)"
    return f"at most {limit} steps per episode{own}"


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


def _describe_inputs(env: EnvSpec, policy: PolicySpec) -> str:
    """Describe the observation that the policy reads: cameras with image size, state, or text."""
    names = env.cameras.names[: policy.inputs.num_images]
    parts = ["text"] if env.action.kind is ActionKind.text else []
    if names:
        turned = " turned by 180 degrees" if policy.inputs.rotates_images and env.cameras.rotation_deg else ""
        size = "x".join(map(str, env.cameras.size))
        parts.append(f"camera{'s' * (len(names) > 1)} {', '.join(names)} {size}{turned}")
    if policy.inputs.state and env.state_dim:
        parts.append(f"state of {env.state_dim} numbers")
    return f" · input: {' and '.join(parts)}" if parts else ""


def _describe_outputs(env: EnvSpec, policy: PolicySpec) -> str:
    """Describe the output of the policy per observation."""
    if env.action.kind is ActionKind.text:
        return f"text of at most {policy.num_action_chunks} tokens"
    chunk, dim = policy.num_action_chunks, policy.action_dim
    actions = f"{chunk} action{'s' * (chunk > 1)}"
    if env.action.kind is ActionKind.discrete:
        return f"{actions}, each with {env.action.sizes[0]} choices"
    return f"{actions} of {dim} number{'s' * (dim > 1)}"


def _dense_reward_warnings(run_plan: RunPlan) -> Iterator[str]:
    """Warn if a policy may earn more by waiting near the goal than by success, which ends the episode."""
    cfg, env = run_plan.cfg, run_plan.env
    reward = cfg.reward
    replaced = isinstance(reward, StepRewardSettings) and reward.path and reward.mode is RewardMode.replace
    summed = env.reward.dense and not replaced and not getattr(cfg.env, "use_rel_reward", False)
    if run_plan.algorithm is not None and summed and not cfg.env.train.ignore_terminations:
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
