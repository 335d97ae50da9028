"""Policy-gradient algorithm, which combines an advantage estimator and a policy loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.algorithms.estimators import GaeSettings
from embodyrl.algorithms.importance_weights import importance_weights, off_policy_mask, second_moment_mask
from embodyrl.algorithms.metrics import compute_batch_metrics, compute_value_metrics
from embodyrl.algorithms.policy_losses import (
    SUM_MODES,
    action_weights,
    bounded_ratio,
    equal_weights,
    select_scored_columns,
    to_units,
    unit_advantage,
    unit_mask,
    weighted_token_mean,
)
from embodyrl.algorithms.protocol import (
    ADVANTAGES,
    LOSSES,
    EstimatorInputs,
    LossInputs,
    LossTerms,
    LossUnits,
    LossWeights,
    MetricInputs,
)
from embodyrl.algorithms.settings import (
    AlgorithmSettings,
    BufferSettings,
    GroupSettings,
    OldLogprob,
    RewardLevel,
    TokenLevel,
    TruncatedEpisodes,
    ValueSettings,
)
from embodyrl.algorithms.shaping import ReturnScale, TaskOutcomes, adapt_beta, filter_groups, shape_rewards, subtract_kl
from embodyrl.algorithms.terms import IMPORTANCE_WEIGHTED, MAX_KL, kl, value_loss
from embodyrl.errors import ConfigError, NonFiniteError
from embodyrl.types import BoolArray, Episode, FloatArray, IntArray, PolicyScores, PreparedBatch

if TYPE_CHECKING:
    import torch

_EMPTY_INPUTS = EstimatorInputs()


class Algorithm:
    """Policy-gradient algorithm with a fixed config.

    Loss = policy loss + value_coef * value loss + kl_beta * KL(policy || reference) - entropy_bonus * entropy. Policy
    loss, KL and entropy share the weights of `loss_agg_func`; the value loss is a mean over value targets.
    `positive_nll_coef` adds the mean of -log pi over actions with a positive advantage (arXiv 2504.05118).
    """

    def __init__(self, cfg: AlgorithmSettings, longest_episode: int = 1, scored: int = 0) -> None:
        """Create the algorithm from its config.

        Args:
            cfg: the keys under `algorithm`.
            longest_episode: number of chunks of an episode at its time limit; for `weights`.
            scored: number of log-probabilities per action (`PolicySpec.scored`); 0: one per token.

        Raises:
            ConfigError: unknown names or contradictory settings.
        """
        if problems := list(cfg.problems()):
            raise ConfigError(problems)
        if isinstance(cfg, BufferSettings):
            cfg = cfg.without_unused_fields()
        self.settings = cfg
        self.estimator = ADVANTAGES.get(cfg.adv_type)
        self.critic_warmup = cfg.critic_warmup if isinstance(cfg, ValueSettings) and cfg.value_coef else 0
        """Number of initial training steps that train only the value head."""
        self.filter_refills = cfg.filter_refills if isinstance(cfg, GroupSettings) else 0
        """Maximum number of rounds in which new groups replace filtered groups."""
        self._longest_episode = longest_episode
        self.scored = scored
        self._loss = LOSSES.get(cfg.loss_type)
        self.loss_settings = cfg.loss if isinstance(cfg.loss, self._loss.settings) else self._loss.settings()
        self.needs_final_observations = self.estimator.needs_values or cfg.transitions
        """True if the final observations of truncated episodes are needed."""
        self.needs_reference = cfg.kl_beta > 0
        self.needs_reference_in_prepare = cfg.kl_in_reward and self.needs_reference
        """True if `prepare` needs `EstimatorInputs.logprob` and `EstimatorInputs.ref_logprob`."""
        self.recomputes_logprob = cfg.old_logprob == OldLogprob.recompute
        """True if the actor recomputes the old log-probabilities of the ratio before the update."""
        self._reward_kl_beta = cfg.kl_beta
        self.task_outcomes: TaskOutcomes = {}
        """Outcomes of earlier training steps, from which the curriculum samples tasks; updated by the driver."""
        self._scale = None
        if isinstance(cfg, GaeSettings) and cfg.normalize_returns:
            self._scale = ReturnScale(cfg.gamma)

    def value_dim(self, num_action_chunks: int) -> int:
        """Return V, the number of value outputs: 0, 1 (chunk level) or K (action level)."""
        if not isinstance(self.settings, ValueSettings):
            return 0
        return num_action_chunks if self.settings.reward_type is RewardLevel.action_level else 1

    def state(self) -> dict[str, Any]:
        """Return the state that changes during training, for a checkpoint."""
        scale = self._scale.state() if self._scale else {}
        return (
            {"reward_kl_beta": self._reward_kl_beta}
            | scale
            | ({"seen": self.task_outcomes} if self.task_outcomes else {})
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `state`."""
        self._reward_kl_beta = state["reward_kl_beta"]
        self.task_outcomes = state.get("seen", {})
        if self._scale:
            self._scale.load_state(state)

    def prepare(self, episodes: Sequence[Episode], inputs: EstimatorInputs = _EMPTY_INPUTS) -> PreparedBatch:
        """Convert episodes to a flat batch of chunk samples with advantages, in the order of episodes and chunks.

        The batch excludes groups that `select` filters, truncated episodes with `truncated_episodes=mask`, and chunks
        without an executed action. The outcome of a masked episode still counts in its group.

        Raises:
            NonFiniteError: a reward, value or advantage is NaN or infinite; the message names the episode.
        """
        assert episodes, "a step without episodes"
        for name in ("reward", "value", "bootstrap_value"):
            _require_finite(episodes, name.replace("_", " "), [getattr(episode, name) for episode in episodes])
        shaped, metrics = self._shape_rewards(episodes, inputs)
        # The order matters: filter groups by unshaped rewards, compute credits of all members, then remove masked
        # members. Estimators without groups remove masked episodes before they compute credits.
        selected = [i for i in self.select(episodes) if self.estimator.needs_groups or not self._is_masked(shaped[i])]
        selected_episodes = [shaped[i] for i in selected]
        inputs = EstimatorInputs(
            states=tuple(inputs.states[i] for i in selected) if self.estimator.needs_states else (),
            greedy=tuple(inputs.greedy[i] for i in selected) if self.estimator.needs_greedy else (),
            part_weights=inputs.part_weights,
        )
        credits = self.estimator.compute(selected_episodes, inputs, self.settings) if selected_episodes else []
        pairs = [pair for pair in zip(selected_episodes, credits, strict=True) if not self._is_masked(pair[0])]
        trained = [episode for episode, _ in pairs]
        actions = episodes[0].valid.shape[1]
        targets = episodes[0].value.shape[1] if self.estimator.needs_values else 0

        def stack(parts: Iterable[np.ndarray], shape: tuple[int, ...], dtype: type) -> np.ndarray:
            return np.concatenate([np.zeros((0, *shape), dtype=dtype), *parts]).astype(dtype)

        valid = stack((e.valid for e in trained), (actions,), np.bool_)
        advantage = stack((c.advantage for _, c in pairs), (actions,), np.float32)
        returns = stack((c.returns for _, c in pairs), (targets,), np.float32)
        if not (np.isfinite(advantage).all() and np.isfinite(returns).all()):
            _require_finite(selected_episodes, "advantage", [credit.advantage for credit in credits])
            _require_finite(selected_episodes, "value target", [credit.returns for credit in credits])
        if bounds := self.settings.advantage_clip:
            advantage = advantage.clip(min=bounds[0], max=bounds[1])
        advantage = np.where(valid, advantage, np.float32(0))
        executed = valid.any(axis=1)
        ids = np.array([e.spec.episode_id for e in trained], np.int64)
        metrics |= compute_batch_metrics(episodes, trained, valid, advantage)
        if trained and targets:
            metrics |= compute_value_metrics(valid, np.concatenate([e.value for e in trained]), returns)
        return PreparedBatch(
            records=stack((e.records for e in trained), (), np.int64)[executed],
            episode=np.repeat(ids, [len(e.valid) for e in trained])[executed],
            advantage=advantage[executed],
            returns=returns[executed],
            valid=valid[executed],
            has_signal=bool(pairs) and (self._has_other_terms or bool(advantage.any())),
            metrics=metrics,
        )

    def _shape_rewards(
        self, episodes: Sequence[Episode], inputs: EstimatorInputs
    ) -> tuple[list[Episode], dict[str, float]]:
        """Return the episodes with shaped rewards, and metrics of the KL subtracted from the rewards."""
        cfg, shaped = self.settings, shape_rewards(episodes, self.settings)
        if self._scale:
            shaped = self._scale.apply(shaped)
        if not self.needs_reference_in_prepare:
            return shaped, {}
        beta = self._reward_kl_beta
        shaped, mean_kl = subtract_kl(shaped, inputs, beta=beta, kind=cfg.kl_penalty_type, scored=self.scored)
        if cfg.kl_target is not None:
            self._reward_kl_beta = adapt_beta(
                beta, mean_kl, target=cfg.kl_target, samples=len(episodes), horizon=cfg.kl_horizon
            )
        return shaped, {"train/reward_kl": mean_kl, "train/kl_beta": beta}

    def weights(self, batch: PreparedBatch, samples: Sequence[int] | IntArray) -> LossWeights:
        """Return the loss weights of the n samples of one optimizer step.

        `samples` are batch indices and must include the samples of all ranks. If gradients are averaged over R ranks,
        multiply the loss by R.
        """
        rows = np.asarray(samples, dtype=np.int64)
        assert rows.size, "an optimizer step without samples"
        valid = batch.valid[rows]
        weight = action_weights(
            self.settings.loss_agg_func,
            batch.episode[rows],
            valid,
            level=self.settings.logprob_type,
            longest_episode=self._longest_episode,
        )
        targets = batch.returns.shape[1]
        # Targets of actions count only for executed actions. Targets of chunks always count, because chunks without an
        # executed action are dropped.
        counted = valid if targets == valid.shape[1] else np.ones((len(rows), targets), dtype=bool)
        positive = valid & (batch.advantage[rows] > 0) & (self.settings.positive_nll_coef > 0)
        return LossWeights(policy=weight, value=equal_weights(counted), positive=equal_weights(positive))

    def correct(
        self, proximal: torch.Tensor, behavior: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Compute off-policy correction factors for a whole batch from recomputed and rollout log-probabilities.

        Args:
            proximal: [B, L] recomputed log-probabilities.
            behavior: [B, L] log-probabilities of the behavior policies.
            valid: [B, K] bool.

        Returns:
            Detached factors on the policy loss of each unit, [B, K, P], [B, K, 1] or [B, 1, 1] by `logprob_type`, or
            None; and metrics.
        """
        cfg = self.settings
        log_weight = self._convert_to_units(proximal - behavior, valid, cfg.logprob_type)
        mask = unit_mask(valid, cfg.logprob_type).expand_as(log_weight)
        gap = log_weight.where(mask, 0.0)
        metrics = {
            "behaviour_gap": float(gap.abs().sum() / mask.sum()),
            "behaviour_ratio_max": float(gap.where(mask, -math.inf).exp().max()),
        }
        factors = None
        if cfg.behave_weight_threshold is not None:
            factors = importance_weights(
                log_weight,
                mask,
                cap=cfg.behave_weight_threshold,
                mode=cfg.behave_weight_mode,
                level=cfg.behave_weight_level,
            )
        if cfg.m2_threshold is not None:
            second_moment = second_moment_mask(log_weight, mask, threshold=cfg.m2_threshold).to(log_weight.dtype)
            factors = second_moment if factors is None else factors * second_moment
        if factors is not None:
            metrics["behaviour_removed"] = float(((factors == 0) & mask).sum() / mask.sum())
        return factors, metrics

    def loss(self, scores: PolicyScores, inputs: LossInputs) -> tuple[torch.Tensor, MetricInputs]:
        """Return the micro-batch's part of the loss of an optimizer step, and the inputs of its metrics."""
        cfg, valid = self.settings, inputs.valid
        assert scores.logprob.shape == inputs.old_logprob.shape, (scores.logprob.shape, inputs.old_logprob.shape)
        assert inputs.advantage.shape == valid.shape == inputs.weight.shape, (inputs.advantage.shape, valid.shape)
        new_logprob = self._convert_to_units(scores.logprob, valid, cfg.logprob_type)
        old_logprob = self._convert_to_units(inputs.old_logprob, valid, cfg.logprob_type)
        units = LossUnits(
            logprob=new_logprob,
            old_logprob=old_logprob,
            advantage=unit_advantage(inputs.advantage, valid, cfg.logprob_type),
            valid=unit_mask(valid, cfg.logprob_type),
        )
        terms = self._compute_terms(units)
        entropy = self._convert_to_units(
            scores.entropy if cfg.entropy_bonus else scores.entropy.detach(), valid, cfg.entropy_type
        )
        factors = self._compute_factors(units, inputs)
        weighted_loss = terms.loss if factors is None else terms.loss * factors
        loss = policy_loss = self._aggregate(weighted_loss, inputs.weight)
        if cfg.entropy_bonus:
            loss = loss - cfg.entropy_bonus * self._aggregate(entropy, inputs.weight)
        if cfg.positive_nll_coef:  # a mean over the actions with a positive advantage
            loss = loss - cfg.positive_nll_coef * weighted_token_mean(new_logprob, inputs.positive_weight)
        rows = {
            "logprob": select_scored_columns(scores.logprob.detach(), valid.shape[1], self.scored),
            "old_logprob": select_scored_columns(inputs.old_logprob, valid.shape[1], self.scored),
            "valid": valid,
            "weight": inputs.weight,
            "new": new_logprob.detach(),
            "old": old_logprob,
            "entropy": entropy.detach(),
            "ratio": terms.ratio.detach(),
            "clipped": terms.clipped,
        }
        sums = {"policy_loss": policy_loss.detach()}
        if self.needs_reference:
            assert inputs.ref_logprob is not None, "kl_beta > 0 needs reference log-probabilities"
            ref_logprob = self._convert_to_units(inputs.ref_logprob, valid, cfg.logprob_type)
            ref_kl = kl(new_logprob, ref_logprob, cfg.kl_penalty_type)
            if cfg.kl_penalty_type in IMPORTANCE_WEIGHTED:
                ref_kl = (bounded_ratio(new_logprob - old_logprob) * ref_kl).clamp(-MAX_KL, MAX_KL)
            if not cfg.kl_in_reward:
                loss = loss + cfg.kl_beta * self._aggregate(ref_kl, inputs.weight)
            rows["ref_kl"] = ref_kl.detach()
        if isinstance(cfg, ValueSettings):
            value = _compute_value_loss(cfg, scores, inputs)
            loss = loss.add(value, alpha=cfg.value_coef)
            sums["value_loss"] = value.detach()
        return loss, MetricInputs(rows=rows, sums=sums)

    def _compute_terms(self, units: LossUnits) -> LossTerms:
        """Compute the policy loss of each unit, and check the type and the shapes of the result."""
        terms = self._loss.compute(units, self.loss_settings)
        if not isinstance(terms, LossTerms):
            message = f"returned {type(terms).__name__}, expected LossTerms(loss=..., ratio=..., clipped=...)"
            raise ConfigError(f"algorithm.loss_type={self.settings.loss_type}: the loss {message}.")
        shapes = {name: tuple(getattr(terms, name).shape) for name in ("loss", "ratio", "clipped")}
        if wrong := [name for name, shape in shapes.items() if shape != tuple(units.logprob.shape)]:
            raise ConfigError(
                f"algorithm.loss_type={self.settings.loss_type}: LossTerms.{wrong[0]} has shape {shapes[wrong[0]]}, "
                f"expected {tuple(units.logprob.shape)}, one number per unit. Return one value per unit, "
                f"without a mean or sum: algorithm.loss_agg_func aggregates the units."
            )
        return terms

    def _compute_factors(self, units: LossUnits, inputs: LossInputs) -> torch.Tensor | None:
        """Return the detached off-policy factors for the policy loss of each unit; None: no factors."""
        factors = inputs.correction
        if self.settings.off_policy_masking_delta is None:
            return factors
        behavior = inputs.old_logprob if inputs.behavior_logprob is None else inputs.behavior_logprob
        behavior = self._convert_to_units(behavior, inputs.valid, self.settings.logprob_type)
        # Detached, because no gradient may flow through the mask.
        drift = units.mean(behavior - units.logprob.detach())
        mask = off_policy_mask(drift, units.advantage, delta=self.settings.off_policy_masking_delta)
        return mask if factors is None else factors * mask

    def _convert_to_units(self, tokens: torch.Tensor, valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
        """Convert token values [B, L] to units, without tokens that have no log-probability."""
        return to_units(select_scored_columns(tokens, valid.shape[1], self.scored), valid, level)

    def _aggregate(self, units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of units [B, K, P], [B, K, 1] or [B, 1, 1]."""
        weighted_mean = weighted_token_mean(units, weight)
        # `weighted_token_mean` averages over the tokens of an action; multiply by their number for a sum.
        return weighted_mean * units.shape[2] if self.settings.loss_agg_func in SUM_MODES else weighted_mean

    def select(self, episodes: Sequence[Episode]) -> list[int]:
        """Return the indices of the episodes whose groups pass `filter_rewards` and `filter_returns`.

        The bounds apply to unshaped rewards.
        """
        cfg = self.settings
        if not isinstance(cfg, GroupSettings):
            return list(range(len(episodes)))
        return filter_groups(episodes, success=cfg.filter_rewards, returns=cfg.filter_returns)

    def _is_masked(self, episode: Episode) -> bool:
        """Return True if the loss excludes the episode because the episode reached a limit."""
        return self.settings.truncated_episodes == TruncatedEpisodes.mask and episode.truncated and not episode.cut

    def zero_gradient_mask(self, batch: PreparedBatch) -> BoolArray:
        """Return the mask [B] of samples without a gradient; the actor skips their forward and backward pass."""
        # A value loss or KL term has a gradient even if the advantage is 0.
        if self._has_other_terms or self._loss.needs_all_samples:
            return np.zeros(len(batch.records), dtype=np.bool_)
        return ~((batch.advantage != 0) & batch.valid).any(axis=1)

    @property
    def _has_other_terms(self) -> bool:
        """Return True if samples with advantage 0 may have a gradient."""
        cfg = self.settings
        has_value_loss = isinstance(cfg, ValueSettings) and cfg.value_coef > 0
        return (
            self.estimator.needs_replay
            or has_value_loss
            or (cfg.kl_beta > 0 and not cfg.kl_in_reward)
            or cfg.entropy_bonus != 0
        )


def _compute_value_loss(cfg: ValueSettings, scores: PolicyScores, inputs: LossInputs) -> torch.Tensor:
    assert scores.value.shape == inputs.returns.shape == inputs.old_value.shape == inputs.value_weight.shape
    error = value_loss(scores.value, inputs.old_value, inputs.returns, clip=cfg.value_clip, huber_delta=cfg.huber_delta)
    return (error * inputs.value_weight).sum()


def _require_finite(episodes: Sequence[Episode], what: str, values: Sequence[FloatArray]) -> None:
    """Raise an error for the first episode with a NaN or infinite value; entries of unexecuted actions are ignored."""
    if not values or np.isfinite(np.concatenate(values)).all():
        return
    for episode, episode_values in zip(episodes, values, strict=True):
        executed_values = (
            episode_values[episode.valid] if episode_values.shape == episode.valid.shape else episode_values
        )
        if (non_finite := executed_values[~np.isfinite(executed_values)]).size:
            spec = episode.spec
            fix = (
                "The simulator returned this value: check the environment with `embodyrl check-env`."
                if what == "reward"
                else "Likely cause: diverging rewards or value errors. Lower actor.optim.lr, its value_lr or "
                "env.reward_coef."
            )
            raise NonFiniteError(
                f"{what} is {float(non_finite[0])} in episode {spec.episode_id} (task {spec.task_id}, reset id "
                f"{spec.reset_id}, seed {spec.seed}, {episode.length} env steps); the weights are unchanged. {fix}"
            )
