"""What a choice of `adv_type` and `loss_type` reads and refuses, without torch."""

from __future__ import annotations

from collections.abc import Callable

from embodyrl.algorithms.aggregation import MODES
from embodyrl.algorithms.losses import KL_ESTIMATORS
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.algorithms.shaping import REWARD_KL
from embodyrl.config.keys import plain, spell
from embodyrl.config.schema import AlgorithmConfig, OldLogprob, RewardLevel, RewardNorm, TokenLevel
from embodyrl.errors import UnknownNameError
from embodyrl.registry import closest

COMMON_KEYS = frozenset(
    {
        *("adv_type", "loss_type", "group_size", "rollout_epoch", "update_epoch", "loss_agg_func", "sampling_params"),
        *("kl_beta", "kl_penalty_type", "kl_in_reward", "kl_target", "kl_horizon", "logprob_type"),
        *("entropy_bonus", "entropy_type", "positive_nll_coef", "advantage_clip", "truncated_episodes"),
        *("reward_scale", "reward_bias", "reward_clip", "reward_norm"),
        *("old_logprob", "behave_weight_threshold", "behave_weight_mode", "behave_weight_level", "m2_threshold"),
        *("off_policy_masking_delta", "early_stop_imp_ratio", "max_staleness"),
    }
)
VALUE_KEYS = frozenset({"value_clip", "huber_delta", "value_coef", "critic_warmup"})
GROUP_KEYS = frozenset({"filter_rewards", "filter_refills"})

_NO_RATIO = "old_logprob is rollout, so pi_old / pi_rollout is 1; set old_logprob=recompute"
_NO_WEIGHTS = "behave_weight_threshold is null; set it"
_WITHOUT: tuple[tuple[str, str, Callable[[AlgorithmConfig], bool]], ...] = (
    ("kl_penalty_type", "kl_beta is 0; set kl_beta above 0", lambda c: c.kl_beta == 0),
    ("kl_in_reward", "kl_beta is 0; set kl_beta above 0", lambda c: c.kl_beta == 0),
    ("kl_target", "kl_in_reward is false; set it to true", lambda c: not c.kl_in_reward),
    ("filter_refills", "filter_rewards is null; set its bounds", lambda c: c.filter_rewards is None),
    ("kl_horizon", "kl_target is null; set it", lambda c: c.kl_target is None),
    ("reward_norm", "group_size is 1", lambda c: c.reward_norm == RewardNorm.group and c.group_size == 1),
    ("behave_weight_threshold", _NO_RATIO, lambda c: c.old_logprob == OldLogprob.rollout),
    ("m2_threshold", _NO_RATIO, lambda c: c.old_logprob == OldLogprob.rollout),
    ("behave_weight_mode", _NO_WEIGHTS, lambda c: c.behave_weight_threshold is None),
    ("behave_weight_level", _NO_WEIGHTS, lambda c: c.behave_weight_threshold is None),
)
"""Keys that do nothing while another one has its default: key, what is missing, when."""


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
    return keys - estimator.ignores


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
    if cfg.kl_in_reward and cfg.kl_penalty_type not in REWARD_KL:
        found.append(
            f"algorithm.kl_penalty_type={cfg.kl_penalty_type} is a form for the loss; with kl_in_reward=true use one "
            f"of {', '.join(REWARD_KL)}."
        )
    defaults = AlgorithmConfig()
    found += [
        f"algorithm.{key}={spell(plain(getattr(cfg, key)))} has no effect while {missing}, or leave {key} out."
        for key, missing, idle in _WITHOUT
        if idle(cfg) and getattr(cfg, key) != getattr(defaults, key)
    ]
    return found


def _name_problem(key: str, value: str, options: tuple[str, ...]) -> list[str]:
    if value in options:
        return []
    return [f"algorithm.{key}: unknown '{value}'.{closest(value, options)} One of: {', '.join(options)}."]
