"""What a choice of `adv_type` and `loss_type` reads and refuses, without torch."""

from __future__ import annotations

from embodyrl.algorithms.aggregation import MODES
from embodyrl.algorithms.losses import KL_ESTIMATORS
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.config.schema import AlgorithmConfig, RewardLevel, TokenLevel
from embodyrl.errors import UnknownNameError
from embodyrl.registry import closest

COMMON_KEYS = frozenset(
    {
        *("adv_type", "loss_type", "group_size", "rollout_epoch", "update_epoch", "loss_agg_func", "sampling_params"),
        *("kl_beta", "kl_penalty_type", "entropy_bonus", "logprob_type", "entropy_type"),
    }
)
VALUE_KEYS = frozenset({"value_clip", "huber_delta", "value_coef"})
GROUP_KEYS = frozenset({"filter_rewards"})


def consumed_keys(adv_type: str, loss_type: str) -> frozenset[str]:
    """Keys below `algorithm` that this combination reads; any other key must keep its default.

    Raises:
        UnknownNameError: no such estimator or loss.
    """
    estimator, loss = ADVANTAGES.get(adv_type), LOSSES.get(loss_type)
    keys = COMMON_KEYS | estimator.consumes | loss.consumes
    if estimator.needs_values:
        keys |= VALUE_KEYS
    if estimator.needs_groups:
        keys |= GROUP_KEYS
    return keys


def value_dim(cfg: AlgorithmConfig, num_action_chunks: int) -> int:
    """V, the value outputs that the estimator needs: 0, 1 (chunk level) or K (action level)."""
    if not ADVANTAGES.get(cfg.adv_type).needs_values:
        return 0
    return num_action_chunks if cfg.reward_type == RewardLevel.action_level else 1


def problems(cfg: AlgorithmConfig) -> list[str]:
    """Names and combinations below `algorithm` that cannot work, one line each with the cure."""
    found = [
        *_name_problem("loss_agg_func", cfg.loss_agg_func, MODES),
        *_name_problem("kl_penalty_type", cfg.kl_penalty_type, tuple(KL_ESTIMATORS)),
    ]
    try:
        estimator, _ = ADVANTAGES.get(cfg.adv_type), LOSSES.get(cfg.loss_type)
    except UnknownNameError as error:
        return [*error.problems, *found]
    if estimator.needs_groups and cfg.group_size < 2:
        found.append(
            f"algorithm.group_size={cfg.group_size}: adv_type '{cfg.adv_type}' compares the episodes of a group; "
            "set it to 2 or more, or use adv_type=gae."
        )
    if (
        "reward_type" in estimator.consumes
        and cfg.reward_type == RewardLevel.action_level
        and cfg.logprob_type == TokenLevel.chunk_level
    ):
        found.append(
            "algorithm.logprob_type=chunk_level has one ratio per chunk, but reward_type=action_level one advantage "
            "per action; use logprob_type=action_level or token_level, or reward_type=chunk_level."
        )
    if cfg.kl_beta == 0 and cfg.kl_penalty_type != AlgorithmConfig.kl_penalty_type:
        found.append(
            f"algorithm.kl_penalty_type={cfg.kl_penalty_type} has no effect while kl_beta is 0; "
            "set kl_beta above 0 or leave kl_penalty_type out."
        )
    found += _filter_problems(cfg.filter_rewards)
    found += _range_problems(cfg)
    return found


def _name_problem(key: str, value: str, options: tuple[str, ...]) -> list[str]:
    if value in options:
        return []
    return [f"algorithm.{key}: unknown '{value}'.{closest(value, options)} One of: {', '.join(options)}."]


def _filter_problems(bounds: list[float] | None) -> list[str]:
    if bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1):
        return []
    return [f"algorithm.filter_rewards={bounds}: give [low, high] with 0 <= low <= high <= 1, for example [0.1, 0.9]."]


def _range_problems(cfg: AlgorithmConfig) -> list[str]:
    rules = [
        ("clip_ratio_low", 0 < cfg.clip_ratio_low < 1, "between 0 and 1 (common: 0.2)"),
        ("clip_ratio_high", cfg.clip_ratio_high > 0, "above 0 (common: 0.2 to 0.28)"),
        ("clip_ratio_c", cfg.clip_ratio_c is None or cfg.clip_ratio_c > 1, "above 1 (common: 3.0), or null"),
        ("gamma", 0 <= cfg.gamma <= 1, "between 0 and 1"),
        ("gae_lambda", 0 <= cfg.gae_lambda <= 1, "between 0 and 1"),
        ("value_clip", cfg.value_clip is None or cfg.value_clip > 0, "above 0, or null"),
        ("huber_delta", cfg.huber_delta is None or cfg.huber_delta > 0, "above 0, or null"),
        ("value_coef", cfg.value_coef >= 0, "0 or more"),
        ("kl_beta", cfg.kl_beta >= 0, "0 or more"),
    ]
    return [f"algorithm.{key}={getattr(cfg, key)}: must be {rule}." for key, good, rule in rules if not good]
