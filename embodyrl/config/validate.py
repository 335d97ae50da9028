"""What the types cannot say: ranges, keys that this version does not serve yet, and combinations that contradict."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from embodyrl.config.keys import all_keys, leaves, plain, spell
from embodyrl.config.placement import parse_placement
from embodyrl.config.schema import ClusterConfig, Config, RolloutMode
from embodyrl.errors import ConfigError
from embodyrl.registry import closest


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on one value and its wording after "must be"."""

    holds: Callable[[object], bool]
    wording: str


def _number(holds: Callable[[float], bool], wording: str) -> Rule:
    return Rule(lambda v: isinstance(v, int | float) and holds(v), wording)


def _text(pattern: str, wording: str) -> Rule:
    return Rule(lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None, wording)


def _one_of(*names: str) -> Rule:
    return Rule(lambda v: v in names, f"one of {', '.join(names)}")


def _list(holds: Callable[[list[float]], bool], wording: str) -> Rule:
    return Rule(lambda v: isinstance(v, list) and holds(v), wording)


_COUNT = _number(lambda v: v >= 1, "at least 1")
_NOT_NEGATIVE = _number(lambda v: v >= 0, "0 or more")
_POSITIVE = _number(lambda v: v > 0, "greater than 0")
_FRACTION = _number(lambda v: 0 <= v <= 1, "between 0 and 1")
_BETA = _number(lambda v: 0 <= v < 1, "at least 0 and below 1")
_COUNT_OR_NEVER = _number(lambda v: v == -1 or v >= 1, "at least 1, or -1")
_NAME = _text(r"[^/\s\0]+", "a name without '/' and blanks")
_PATH = _text(r".*\S.*", "a path")
_TASKS = "a list of different task numbers from 0, for example [0,3]"

_SPLIT_RULES = {
    "total_num_envs": _COUNT,
    "max_episode_steps": _COUNT,
    "max_steps_per_rollout_epoch": _COUNT,
    "task_ids": _list(lambda v: len(v) > 0 and len(set(v)) == len(v) and min(v) >= 0, _TASKS),
    "state_ids": _list(lambda v: len(v) == 2 and 0 <= v[0] <= v[1], "[first,last] with 0 <= first <= last, or null"),
}

RULES: dict[str, Rule] = {
    "seed": _number(lambda v: 0 <= v < 2**63, "between 0 and 2**63 - 1"),
    "video": _text(r"none|failures|all|first:[1-9]\d*", "one of none, failures, first:N, all"),
    "ckpt": _PATH,
    "runner.output_dir": _PATH,
    "runner.experiment_name": _NAME,
    "runner.max_steps": _COUNT,
    "runner.max_epochs": _COUNT_OR_NEVER,
    "runner.val_check_interval": _COUNT_OR_NEVER,
    "runner.save_interval": _COUNT_OR_NEVER,
    "runner.logger.backends": _list(
        lambda v: len(set(v)) == len(v), "a list of different names, for example [console,jsonl,wandb]"
    ),
    "runner.logger.project_name": _NAME,
    "cluster.num_nodes": _COUNT,
    "launcher.env_workers": _text(r"auto|[1-9]\d*", "auto or an integer of at least 1"),
    "env.reward_coef": Rule(lambda v: v != 0, "different from 0 (0 removes every reward)"),
    "env.init_params.camera_heights": _COUNT,
    "env.init_params.camera_widths": _COUNT,
    **{f"env.{split}.{key}": rule for split in ("train", "eval") for key, rule in _SPLIT_RULES.items()},
    "model.action_dim": _COUNT,
    "model.num_action_chunks": _COUNT,
    "model.num_images_in_input": _COUNT,
    "model.hidden_sizes": _list(
        lambda v: all(n >= 1 for n in v), "a list of widths of at least 1, for example [64,64]"
    ),
    "model.expert_noise": _NOT_NEGATIVE,
    "model.num_diffusion_steps_inference": _number(lambda v: 1 <= v <= 50, "between 1 and 50"),
    "model.lora.r": _COUNT,
    "model.lora.path": _PATH,
    "model.lora.init_lora_weights": _one_of("gaussian", "kaiming"),
    "model.lora.lora_alpha": _COUNT,
    "algorithm.group_size": _COUNT,
    "algorithm.rollout_epoch": _COUNT,
    "algorithm.update_epoch": _COUNT,
    "algorithm.gamma": _FRACTION,
    "algorithm.gae_lambda": _FRACTION,
    "algorithm.clip_ratio_low": _number(lambda v: 0 < v < 1, "between 0 and 1, both excluded"),
    "algorithm.clip_ratio_high": _POSITIVE,
    "algorithm.clip_ratio_c": _number(lambda v: v > 1, "greater than 1, or null"),
    "algorithm.value_clip": _number(lambda v: v > 0, "greater than 0, or null"),
    "algorithm.huber_delta": _number(lambda v: v > 0, "greater than 0, or null"),
    **{
        f"algorithm.{key}": _NOT_NEGATIVE
        for key in ("value_coef", "critic_warmup", "kl_beta", "positive_nll_coef", "log_ratio_coef")
    },
    **{
        f"algorithm.{key}": _number(lambda v: v > 0, "greater than 0")
        for key in (
            *("kl_target", "kl_horizon", "reward_scale", "reward_clip"),
            *("ratio_max", "sapo_tau_pos", "sapo_tau_neg", "step_advantage_weight", "m2_threshold"),
            *("off_policy_masking_delta", "behave_weight_threshold"),
        )
    },
    "algorithm.cov_share": _number(lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
    "algorithm.cov_bounds": _list(lambda v: len(v) == 2 and v[0] < v[1], "[low,high] with low < high"),
    "algorithm.advantage_clip": _list(lambda v: len(v) == 2 and v[0] < 0 < v[1], "[low,high] with low < 0 < high"),
    "algorithm.early_stop_imp_ratio": _number(lambda v: v > 1, "greater than 1, or null"),
    "algorithm.filter_rewards": _list(
        lambda v: len(v) == 2 and 0 <= v[0] < v[1] <= 1, "two numbers [low,high] with 0 <= low < high <= 1, or null"
    ),
    "algorithm.filter_refills": _NOT_NEGATIVE,
    "algorithm.max_staleness": _NOT_NEGATIVE,
    "algorithm.sampling_params.temperature": _POSITIVE,
    "algorithm.sampling_params.top_k": _COUNT_OR_NEVER,
    "algorithm.sampling_params.repetition_penalty": _POSITIVE,
    "algorithm.sampling_params.max_new_tokens": _COUNT,
    "algorithm.sampling_params.top_p": _number(lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
    "rollout.pipeline_stage_num": _COUNT,
    "rollout.backend": _one_of("hf", "vllm"),
    "rollout.num_workers": _COUNT,
    "actor.micro_batch_size": _COUNT,
    "actor.global_batch_size": _COUNT,
    "actor.max_tokens_per_mbs": _COUNT,
    "actor.fsdp.size": _COUNT_OR_NEVER,
    "actor.fsdp.shard_size": _COUNT_OR_NEVER,
    "actor.optim.lr": _NOT_NEGATIVE,
    "actor.optim.value_lr": _NOT_NEGATIVE,
    "actor.optim.adam_beta1": _BETA,
    "actor.optim.adam_beta2": _BETA,
    "actor.optim.adam_eps": _POSITIVE,
    "actor.optim.weight_decay": _NOT_NEGATIVE,
    "actor.optim.clip_grad": _POSITIVE,
    "actor.optim.schedule": _one_of("constant", "linear", "cosine", "wsd"),
    "actor.optim.warmup_steps": _NOT_NEGATIVE,
    "eval.episodes": _COUNT,
    "eval.sampling_params.temperature": _POSITIVE,
    "eval.episodes_per_task": _COUNT,
    "data.path": _PATH,
    "data.val_path": _PATH,
    "data.val_share": _number(lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "data.prompt_template": _text(r"(?s).*\{prompt\}.*", "text that contains {prompt}"),
    "data.max_prompt_length": _COUNT,
    "reward.overlong_buffer": _NOT_NEGATIVE,
    "reward.overlong_penalty": _NOT_NEGATIVE,
    "reward.timeout_s": _POSITIVE,
    "env.max_turns": _COUNT,
    "reward.workers": _COUNT,
    "collect.out": _PATH,
    "collect.episodes": _COUNT,
    "checkpoint.keep": _COUNT,
    "faults.max_restarts_per_worker": _NOT_NEGATIVE,
    "faults.step_timeout_s": _POSITIVE,
    "faults.start_timeout_s": _POSITIVE,
    "faults.update_timeout_s": _POSITIVE,
    "video_cfg.fps": _number(lambda v: 1 <= v <= 240, "between 1 and 240"),
    "video_cfg.base_dir": _PATH,
}
"""Range of each key; null is always fine where the type allows it."""

_NO_OFFLOAD = "offloading is not available in this version"

UNAVAILABLE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "rollout.enable_offload": ((False,), _NO_OFFLOAD),
    "env.train.enable_offload": ((False,), _NO_OFFLOAD),
    "env.eval.enable_offload": ((False,), _NO_OFFLOAD),
    "actor.enable_offload": ((False,), _NO_OFFLOAD),
    "algorithm.sampling_params.do_sample": ((True,), "training samples its actions; greedy ones carry no gradient"),
}
"""Keys that nothing consumes yet: their legal values and the reason. Delete a row when its feature arrives."""


def find_invalid(cfg: Config) -> list[str]:
    """Return one line for each value that is out of range or not served by this version."""
    problems: list[str] = []
    for name, value in leaves(cfg):
        key = all_keys()[name]
        if value is None:
            continue
        rule = RULES.get(name)
        if (isinstance(value, float) and not math.isfinite(value)) or (rule and not rule.holds(value)):
            wording = rule.wording if rule else "a finite number"
            problems.append(f"{name}={spell(value)}: must be {wording}. Default: {spell(key.default)}.")
        elif name in UNAVAILABLE and plain(value) not in UNAVAILABLE[name][0]:
            allowed, reason = UNAVAILABLE[name]
            names = [spell(a) for a in allowed]
            hint = closest(spell(value), names) if len(names) > 1 else ""
            problems.append(f"{name}={spell(value)}: {reason}.{hint} Use {name}={' or '.join(names)}.")
    return problems


def find_conflicts(cfg: Config) -> list[str]:
    """Return one line for each combination of (single valid) values that contradicts itself."""
    checks = (_groups, _workers, _batches, _resume, _sampling, _async, _ranks, _cluster)
    return [text for check in checks if (text := check(cfg))]


def _groups(cfg: Config) -> str | None:
    slots, size = cfg.env.train.total_num_envs, cfg.algorithm.group_size
    if slots % size:
        near = [n for n in ((slots // size) * size, (slots // size + 1) * size) if n]
        sizes = [g for g in range(1, slots + 1) if slots % g == 0]
        best = min(sizes, key=lambda g: (abs(g - size), g))
        return (
            f"env.train.total_num_envs={slots} is not divisible by algorithm.group_size={size}: every group needs a "
            f"slot for each member. Use env.train.total_num_envs={' or '.join(map(str, near))}, "
            f"or algorithm.group_size={best}."
        )
    if size > 1 and not cfg.env.train.use_fixed_reset_state_ids:
        return (
            f"algorithm.group_size={size} compares episodes of one initial state, but "
            "env.train.use_fixed_reset_state_ids=false gives each its own; set it to true."
        )
    return None


def _workers(cfg: Config) -> str | None:
    name, workers, slots = cfg.launcher.name, cfg.launcher.env_workers, cfg.env.train.total_num_envs
    if workers == "auto":
        return None
    if name == "inline":
        return f"launcher.env_workers={workers}: launcher={name} starts no processes. Use launcher.env_workers=auto."
    if int(workers) > slots:
        return (
            f"launcher.env_workers={workers} but only env.train.total_num_envs={slots} slots: some workers would idle. "
            f"Use launcher.env_workers={slots}."
        )
    return None


def _batches(cfg: Config) -> str | None:
    micro, total = cfg.actor.micro_batch_size, cfg.actor.global_batch_size
    if micro <= total:
        return None
    return (
        f"actor.micro_batch_size={micro} is larger than actor.global_batch_size={total}, of which it is a part. "
        f"Use actor.micro_batch_size={total}."
    )


def _cluster(cfg: Config) -> str | None:
    name, cluster = cfg.launcher.name, cfg.cluster
    if name == "ray":
        try:
            apart = cfg.rollout.mode == RolloutMode.disaggregated
            parse_placement(cluster.component_placement, cluster.num_nodes, apart=apart)
        except ConfigError as error:
            return str(error)
        return None
    for key, value, default in (
        ("num_nodes", cluster.num_nodes, 1),
        ("component_placement", dict(cluster.component_placement), ClusterConfig().component_placement),
    ):
        if value != default:
            return f"cluster.{key}={spell(value)}: launcher={name} uses this host only. Use launcher=ray, or remove it."
    return None


def _ranks(cfg: Config) -> str | None:
    fsdp = cfg.actor.fsdp
    if fsdp.size > 1 and cfg.launcher.name == "inline":
        return (
            f"actor.fsdp.size={fsdp.size}: launcher=inline has one process. Use launcher=local, or actor.fsdp.size=1."
        )
    if fsdp.size > 0 and fsdp.shard_size > 0 and fsdp.size % fsdp.shard_size:
        return (
            f"actor.fsdp.size={fsdp.size} is not a multiple of actor.fsdp.shard_size={fsdp.shard_size}: every copy of "
            f"the weights needs as many ranks. Use actor.fsdp.shard_size=-1."
        )
    collocated = cfg.rollout.mode == RolloutMode.collocated
    if fsdp.size > 1 and cfg.rollout.backend != "hf" and collocated:
        return (
            f"rollout.backend={cfg.rollout.backend} generates with one actor rank. Use actor.fsdp.size=1, "
            "rollout.mode=disaggregated, or rollout.backend=hf."
        )
    if (fsdp.size > 1 or fsdp.cpu_offload) and cfg.algorithm.max_staleness and collocated:
        return (
            f"algorithm.max_staleness={cfg.algorithm.max_staleness} acts while it trains, which takes one actor rank "
            "with its weights in place. Use rollout.mode=disaggregated, or actor.fsdp.size=1 and "
            "actor.fsdp.cpu_offload=false."
        )
    if collocated and cfg.rollout.num_workers > 1:
        return (
            f"rollout.num_workers={cfg.rollout.num_workers}: with rollout.mode=collocated the actor ranks act. "
            "Use rollout.mode=disaggregated, or actor.fsdp.size."
        )
    if fsdp.size > 1 and cfg.model.compile:
        return "model.compile=true works with one actor rank. Use actor.fsdp.size=1, or model.compile=false."
    return None


def _resume(cfg: Config) -> str | None:
    if cfg.runner.resume_dir is None or cfg.ckpt is None:
        return None
    return (
        f"ckpt={cfg.ckpt} and runner.resume_dir={cfg.runner.resume_dir}: a resumed run has weights of its own. "
        "Use one of them."
    )


def _sampling(cfg: Config) -> str | None:
    chosen = cfg.eval.sampling_params
    if chosen.temperature is None or chosen.do_sample:
        return None
    return (
        f"eval.sampling_params.temperature={chosen.temperature} has no effect on greedy evaluation. "
        "Set eval.sampling_params.do_sample=true, or remove it."
    )


def _async(cfg: Config) -> str | None:
    if not (cfg.algorithm.max_staleness and cfg.runner.deterministic):
        return None
    return (
        f"algorithm.max_staleness={cfg.algorithm.max_staleness}: which weights an asynchronous rollout acts "
        "with depends on the clock, so runner.deterministic=true cannot hold. Set one of them back."
    )
