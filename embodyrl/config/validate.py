"""What the types cannot say: ranges, keys that this version does not serve yet, and combinations that contradict."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from embodyrl.config.keys import all_keys, leaves, spell
from embodyrl.config.placement import parse_placement
from embodyrl.config.schema import ClusterConfig, Config, RolloutMode
from embodyrl.errors import ConfigError


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


_COMMON: tuple[tuple[Rule, str], ...] = (
    (
        _number(lambda v: v >= 1, "at least 1"),
        "runner.max_steps cluster.num_nodes env.init_params.camera_heights env.init_params.camera_widths "
        "env.train.total_num_envs env.train.max_episode_steps env.train.max_steps_per_rollout_epoch "
        "env.eval.total_num_envs env.eval.max_episode_steps env.eval.max_steps_per_rollout_epoch model.action_dim "
        "model.num_action_chunks model.num_images_in_input model.lora.r model.lora.lora_alpha algorithm.group_size "
        "algorithm.rollout_epoch algorithm.update_epoch algorithm.sampling_params.max_new_tokens "
        "rollout.pipeline_stage_num rollout.num_workers actor.micro_batch_size actor.global_batch_size "
        "actor.max_tokens_per_mbs eval.episodes eval.episodes_per_task data.max_prompt_length env.max_turns "
        "reward.workers collect.episodes checkpoint.keep",
    ),
    (
        _number(lambda v: v == -1 or v >= 1, "at least 1, or -1"),
        "runner.max_epochs runner.val_check_interval runner.save_interval algorithm.sampling_params.top_k "
        "actor.fsdp.size actor.fsdp.shard_size",
    ),
    (
        _number(lambda v: v >= 0, "0 or more"),
        "model.expert_noise algorithm.value_coef algorithm.critic_warmup algorithm.kl_beta "
        "algorithm.positive_nll_coef algorithm.log_ratio_coef algorithm.filter_refills algorithm.max_staleness "
        "actor.optim.lr actor.optim.value_lr actor.optim.weight_decay actor.optim.warmup_steps reward.overlong_buffer "
        "reward.overlong_penalty faults.max_restarts_per_worker",
    ),
    (
        _number(lambda v: v > 0, "greater than 0"),
        "algorithm.clip_ratio_high algorithm.kl_target algorithm.kl_horizon algorithm.reward_scale "
        "algorithm.reward_clip algorithm.ratio_max algorithm.sapo_tau_pos algorithm.sapo_tau_neg "
        "algorithm.step_advantage_weight algorithm.m2_threshold algorithm.off_policy_masking_delta "
        "algorithm.behave_weight_threshold algorithm.sampling_params.temperature "
        "algorithm.sampling_params.repetition_penalty actor.optim.adam_eps actor.optim.clip_grad "
        "eval.sampling_params.temperature reward.timeout_s faults.step_timeout_s faults.start_timeout_s "
        "faults.update_timeout_s",
    ),
    (_number(lambda v: v > 0, "greater than 0, or null"), "algorithm.value_clip algorithm.huber_delta"),
    (_number(lambda v: v > 1, "greater than 1, or null"), "algorithm.clip_ratio_c algorithm.early_stop_imp_ratio"),
    (_number(lambda v: 0 <= v <= 1, "between 0 and 1"), "algorithm.gamma algorithm.gae_lambda"),
    (
        _number(lambda v: 0 <= v < 1, "at least 0 and below 1"),
        "actor.optim.adam_beta1 actor.optim.adam_beta2 data.val_share",
    ),
    (
        _number(lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
        "algorithm.cov_share algorithm.sampling_params.top_p",
    ),
    (
        _text(r".*\S.*", "a path"),
        "ckpt runner.output_dir model.lora.path data.path data.val_path collect.out video_cfg.base_dir",
    ),
    (_text(r"[^/\s\0]+", "a name without '/' and blanks"), "runner.experiment_name runner.logger.project_name"),
)
"""Rules, each with the keys that follow it."""

_SPLIT_RULES = {
    "task_ids": _list(
        lambda v: len(v) > 0 and len(set(v)) == len(v) and min(v) >= 0,
        "a list of different task numbers from 0, for example [0,3]",
    ),
    "state_ids": _list(lambda v: len(v) == 2 and 0 <= v[0] <= v[1], "[first,last] with 0 <= first <= last, or null"),
}

RULES: dict[str, Rule] = {
    **{name: rule for rule, names in _COMMON for name in names.split()},
    **{f"env.{split}.{key}": rule for split in ("train", "eval") for key, rule in _SPLIT_RULES.items()},
    "seed": _number(lambda v: 0 <= v < 2**63, "between 0 and 2**63 - 1"),
    "video": _text(r"none|failures|all|first:[1-9]\d*", "one of none, failures, first:N, all"),
    "runner.logger.backends": _list(
        lambda v: len(set(v)) == len(v), "a list of different names, for example [console,jsonl,wandb]"
    ),
    "launcher.env_workers": _text(r"auto|[1-9]\d*", "auto or an integer of at least 1"),
    "env.reward_coef": Rule(lambda v: v != 0, "different from 0 (0 removes every reward)"),
    "model.hidden_sizes": _list(
        lambda v: all(n >= 1 for n in v), "a list of widths of at least 1, for example [64,64]"
    ),
    "model.num_diffusion_steps_inference": _number(lambda v: 1 <= v <= 50, "between 1 and 50"),
    "model.lora.init_lora_weights": _one_of("gaussian", "kaiming"),
    "algorithm.clip_ratio_low": _number(lambda v: 0 < v < 1, "between 0 and 1, both excluded"),
    "algorithm.cov_bounds": _list(lambda v: len(v) == 2 and v[0] < v[1], "[low,high] with low < high"),
    "algorithm.advantage_clip": _list(lambda v: len(v) == 2 and v[0] < 0 < v[1], "[low,high] with low < 0 < high"),
    "algorithm.filter_rewards": _list(
        lambda v: len(v) == 2 and 0 <= v[0] < v[1] <= 1, "two numbers [low,high] with 0 <= low < high <= 1, or null"
    ),
    "rollout.backend": _one_of("hf", "vllm"),
    "actor.optim.schedule": _one_of("constant", "linear", "cosine", "wsd"),
    "data.prompt_template": _text(r"(?s).*\{prompt\}.*", "text that contains {prompt}"),
    "video_cfg.fps": _number(lambda v: 1 <= v <= 240, "between 1 and 240"),
}
"""Range of each key; null is always fine where the type allows it."""

_NO_OFFLOAD = "offloading is not available in this version"

UNAVAILABLE: Mapping[str, str] = {
    "rollout.enable_offload": _NO_OFFLOAD,
    "env.train.enable_offload": _NO_OFFLOAD,
    "env.eval.enable_offload": _NO_OFFLOAD,
    "actor.enable_offload": _NO_OFFLOAD,
    "algorithm.sampling_params.do_sample": "training samples its actions; greedy ones carry no gradient",
}
"""Keys that nothing consumes yet, so that only their default is legal, and why. Delete a row when it is served."""


def find_invalid(cfg: Config) -> list[str]:
    """Return one line for each value that is out of range or not served by this version."""
    problems: list[str] = []
    for name, value in leaves(cfg):
        default = all_keys()[name].default
        if value is None:
            continue
        rule = RULES.get(name)
        if (isinstance(value, float) and not math.isfinite(value)) or (rule and not rule.holds(value)):
            wording = rule.wording if rule else "a finite number"
            problems.append(f"{name}={spell(value)}: must be {wording}. Default: {spell(default)}.")
        elif name in UNAVAILABLE and value != default:
            problems.append(f"{name}={spell(value)}: {UNAVAILABLE[name]}. Use {name}={spell(default)}.")
    return problems


def find_conflicts(cfg: Config) -> list[str]:
    """Return one line for each combination of (single valid) values that contradicts itself."""
    return [text for check in (_slots, _actor, _launcher, _ranks, _weights) for text in check(cfg)]


def _slots(cfg: Config) -> Iterator[str]:
    slots, size, workers = cfg.env.train.total_num_envs, cfg.algorithm.group_size, cfg.launcher.env_workers
    if slots % size:
        near = [n for n in ((slots // size) * size, (slots // size + 1) * size) if n]
        sizes = [g for g in range(1, slots + 1) if slots % g == 0]
        best = min(sizes, key=lambda g: (abs(g - size), g))
        yield (
            f"env.train.total_num_envs={slots} is not divisible by algorithm.group_size={size}: every group needs a "
            f"slot for each member. Use env.train.total_num_envs={' or '.join(map(str, near))}, "
            f"or algorithm.group_size={best}."
        )
    elif size > 1 and not cfg.env.train.use_fixed_reset_state_ids:
        yield (
            f"algorithm.group_size={size} compares episodes of one initial state, but "
            "env.train.use_fixed_reset_state_ids=false gives each its own; set it to true."
        )
    if workers != "auto" and cfg.launcher.name == "inline":
        yield f"launcher.env_workers={workers}: launcher=inline starts no processes. Use launcher.env_workers=auto."
    elif workers != "auto" and int(workers) > slots:
        yield (
            f"launcher.env_workers={workers} but only env.train.total_num_envs={slots} slots: some workers would idle. "
            f"Use launcher.env_workers={slots}."
        )


def _actor(cfg: Config) -> Iterator[str]:
    micro, total = cfg.actor.micro_batch_size, cfg.actor.global_batch_size
    if micro > total:
        yield (
            f"actor.micro_batch_size={micro} is larger than actor.global_batch_size={total}, of which it is a part. "
            f"Use actor.micro_batch_size={total}."
        )
    if cfg.algorithm.max_staleness and cfg.runner.deterministic:
        yield (
            f"algorithm.max_staleness={cfg.algorithm.max_staleness}: which weights an asynchronous rollout acts "
            "with depends on the clock, so runner.deterministic=true cannot hold. Set one of them back."
        )


def _launcher(cfg: Config) -> Iterator[str]:
    name, cluster, usual = cfg.launcher.name, cfg.cluster, ClusterConfig()
    if name == "ray":
        try:
            apart = cfg.rollout.mode == RolloutMode.disaggregated
            parse_placement(cluster.component_placement, cluster.num_nodes, apart=apart)
        except ConfigError as error:
            yield str(error)
    elif cluster != usual:
        key = "num_nodes" if cluster.num_nodes != usual.num_nodes else "component_placement"
        value = spell(getattr(cluster, key))
        yield f"cluster.{key}={value}: launcher={name} uses this host only. Use launcher=ray, or remove it."


def _ranks(cfg: Config) -> Iterator[str]:
    """At most one line: what is wrong with the number of ranks hides the rest."""
    fsdp, collocated = cfg.actor.fsdp, cfg.rollout.mode == RolloutMode.collocated
    if fsdp.size > 1 and cfg.launcher.name == "inline":
        yield f"actor.fsdp.size={fsdp.size}: launcher=inline has one process. Use launcher=local, or actor.fsdp.size=1."
    elif fsdp.size > 0 and fsdp.shard_size > 0 and fsdp.size % fsdp.shard_size:
        yield (
            f"actor.fsdp.size={fsdp.size} is not a multiple of actor.fsdp.shard_size={fsdp.shard_size}: every copy of "
            f"the weights needs as many ranks. Use actor.fsdp.shard_size=-1."
        )
    elif fsdp.size > 1 and cfg.rollout.backend != "hf" and collocated:
        yield (
            f"rollout.backend={cfg.rollout.backend} generates with one actor rank. Use actor.fsdp.size=1, "
            "rollout.mode=disaggregated, or rollout.backend=hf."
        )
    elif (fsdp.size > 1 or fsdp.cpu_offload) and cfg.algorithm.max_staleness and collocated:
        yield (
            f"algorithm.max_staleness={cfg.algorithm.max_staleness} acts while it trains, which takes one actor rank "
            "with its weights in place. Use rollout.mode=disaggregated, or actor.fsdp.size=1 and "
            "actor.fsdp.cpu_offload=false."
        )
    elif collocated and cfg.rollout.num_workers > 1:
        yield (
            f"rollout.num_workers={cfg.rollout.num_workers}: with rollout.mode=collocated the actor ranks act. "
            "Use rollout.mode=disaggregated, or actor.fsdp.size."
        )
    elif fsdp.size > 1 and cfg.model.compile:
        yield "model.compile=true works with one actor rank. Use actor.fsdp.size=1, or model.compile=false."


def _weights(cfg: Config) -> Iterator[str]:
    if cfg.runner.resume_dir is not None and cfg.ckpt is not None:
        yield (
            f"ckpt={cfg.ckpt} and runner.resume_dir={cfg.runner.resume_dir}: a resumed run has weights of its own. "
            "Use one of them."
        )
    chosen = cfg.eval.sampling_params
    if chosen.temperature is not None and not chosen.do_sample:
        yield (
            f"eval.sampling_params.temperature={chosen.temperature} has no effect on greedy evaluation. "
            "Set eval.sampling_params.do_sample=true, or remove it."
        )
