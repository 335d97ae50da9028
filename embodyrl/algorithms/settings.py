"""Keys that algorithms share; what only one estimator or loss reads stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from embodyrl.config.settings import Count, Index, Path, Positive, Says, Settings, Share, Weight, only
from embodyrl.config.shared import SamplingSettings

RewardLevel = StrEnum("RewardLevel", ["chunk_level", "action_level"])
TokenLevel = StrEnum("TokenLevel", ["token_level", "action_level", "chunk_level"])
RewardNorm = StrEnum("RewardNorm", ["none", "group", "batch"])
TruncatedEpisodes = StrEnum("TruncatedEpisodes", ["train", "mask", "zero_reward"])
OldLogprob = StrEnum("OldLogprob", ["rollout", "recompute"])
_Address = Annotated[str, Field(pattern=r"^https?://\S+$"), Says("an address such as http://host:8000/v1")]
WeightMode = StrEnum("WeightMode", ["mask", "truncate"])
WeightLevel = StrEnum("WeightLevel", ["token", "sequence", "geometric"])
AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Bound = Annotated[float, Field(gt=1, le=10**9)]


RISING = only(lambda v: len(v) == 2 and v[0] < v[1])
_AROUND_ZERO = only(lambda v: len(v) == 2 and v[0] < 0 < v[1])
_SHARES = only(lambda v: len(v) == 2 and 0 <= v[0] < v[1] <= 1)


class ActingAlgorithm(Settings):
    """What acting takes from an algorithm."""

    sampling_params: SamplingSettings = SamplingSettings()


class AlgorithmSettings(ActingAlgorithm):
    """What every estimator and every loss leaves to the loop."""

    needs = {
        "kl_beta": "kl_penalty_type kl_in_reward reference_path reference_interval reference_url",
        "reference_url": "reference_model",
        "kl_in_reward": "kl_target",
        "kl_target": "kl_horizon",
        "old_logprob=recompute": "behave_weight_threshold m2_threshold",
        "behave_weight_threshold": "behave_weight_mode behave_weight_level",
    }

    imitates: ClassVar[bool] = False
    """Its loss is that of supervised training."""
    adv_type: str = "grpo"
    """Advantage estimator."""
    loss_type: str = "ppo_clip"
    """Policy loss."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Episodes that share a reset id."""
    rollout_epoch: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Rollouts of all slots per training step."""
    update_epoch: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Passes over the collected batch."""
    loss_agg_func: AggregationMode = "token-mean"
    """How token losses become one number."""
    logprob_type: TokenLevel = TokenLevel.token_level
    """Level of the probability ratio."""
    entropy_type: TokenLevel = TokenLevel.token_level
    """Level at which entropy is averaged."""
    entropy_bonus: Annotated[float, Field(ge=-(10**6), le=10**6)] = 0.0
    """Weight of the entropy."""
    positive_nll_coef: Weight = 0.0
    """Weight of the mean of -log pi over actions with a positive advantage."""
    kl_beta: Weight = 0.0
    """Weight of the KL to the reference (the initial weights, or those of reference_path)."""
    reference_interval: Count | None = None
    """Training steps after each of which the reference takes the policy's weights; null: it stays."""
    reference_path: Path | None = None
    """Weights of the reference: a run, a checkpoint, or a folder in the public layout; it may be of another size, a
    teacher with the same tokens. Default: the weights at the start."""
    reference_url: _Address | None = None
    """Language models: a server with the completions protocol as the reference, its address with /v1: a teacher."""
    reference_model: str | None = None
    """Its name for the model; default its first."""
    kl_penalty_type: Literal["k1", "abs", "k2", "low_var_kl", "k3", "k3+", "k3_unbiased"] = "low_var_kl"
    """KL estimator: k1, abs, k2, low_var_kl (= k3), k3+ (value of k3, gradient of k2), k3_unbiased."""
    kl_in_reward: bool = False
    """Take the KL from the rewards, action by action, instead of adding it to the loss."""
    kl_target: Positive | None = None
    """KL per token that an adaptive kl_beta aims at (with kl_in_reward); null: kl_beta stays."""
    kl_horizon: Count = 10000
    """Episodes over which the adaptive kl_beta moves."""
    advantage_clip: Annotated[list[float], _AROUND_ZERO, Says("[low,high] with low < 0 < high")] | None = None
    """[low, high] bounds of advantages."""
    reward_scale: Weight = 1.0
    """Factor on rewards, after reward_bias; 0 beside kl_beta: nothing but the KL, for example to a teacher."""
    reward_bias: Annotated[float, Field(ge=-(10**9), le=10**9)] = 0.0
    """Added to the outcome of an episode."""
    reward_clip: Positive | None = None
    """Outcomes are clipped to +- this."""
    reward_norm: RewardNorm = RewardNorm.none
    """Shift and scale outcomes to mean 0 and standard deviation 1 over the group or the batch."""
    truncated_episodes: TruncatedEpisodes = TruncatedEpisodes.train
    """Episodes that hit a limit: train on them, mask (no loss, but their outcomes count in their groups) or
    zero_reward."""
    curriculum: Share = 0.0
    """Share of the groups drawn by how open their outcome is, p (1 - p) of the task's success so far (of the row's or
    reset id's, where there is one task); 0: all are visited equally often."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 0
    """Versions by which the oldest data of an update may lag behind its weights; 0: synchronous."""
    old_logprob: OldLogprob = OldLogprob.rollout
    """Denominator of the ratio: log-probabilities of the rollout, or recomputed by the actor before it trains."""
    behave_weight_threshold: Positive | None = None
    """Weigh the loss by pi_old / pi_rollout up to this cap (decoupled PPO; with old_logprob=recompute); null: off."""
    behave_weight_mode: WeightMode = WeightMode.mask
    """Above the cap: mask (weight 0) or truncate (weight = cap)."""
    behave_weight_level: WeightLevel = WeightLevel.token
    """One weight per token, or per sample: product (sequence) or geometric mean of its tokens."""
    m2_threshold: Positive | None = None
    """M2PO: drop the most off-policy tokens until their mean squared log-ratio is below this; null: off."""
    off_policy_masking_delta: Positive | None = None
    """Drop samples of negative advantage whose mean log pi_rollout - log pi exceeds this; null: off."""
    early_stop_imp_ratio: Bound | None = None
    """Leave out the rest of an update once the mean ratio of an optimizer step exceeds this; null: never."""
    early_stop_kl: Positive | None = None
    """Leave out the rest of an update once KL(old || new) in an optimizer step exceeds this; null: never."""

    @property
    def method(self) -> str:
        """What it does, in a line."""
        return f"{self.adv_type} + {self.loss_type}"

    def problems(self) -> Iterator[str]:
        """A KL that is taken from rewards has no gradient."""
        yield from super().problems()
        if self.kl_in_reward and self.kl_penalty_type in ("k3+", "k3_unbiased"):
            yield (
                f"algorithm.kl_penalty_type={self.kl_penalty_type} is a form for the loss; with kl_in_reward=true use "
                "one of k1, abs, k2, low_var_kl, k3."
            )
        if self.reference_url is not None and (self.reference_path is not None or self.reference_interval is not None):
            yield (
                "algorithm.reference_url: the reference is what that server serves; leave out reference_path and "
                "reference_interval."
            )
        if self.reward_scale == 0 == self.kl_beta:
            yield "algorithm.reward_scale=0 removes every reward; that wants something else to learn: kl_beta above 0."


class GroupSettings(AlgorithmSettings):
    """An estimator that compares the episodes of a group."""

    needs = {"filter_rewards or filter_returns": "filter_refills"}

    filter_rewards: (
        Annotated[list[float], _SHARES, Says("two numbers [low,high] with 0 <= low < high <= 1, or null")] | None
    ) = None
    """[low, high]: groups whose mean success lies outside do not enter the update."""
    filter_returns: Annotated[list[float], RISING, Says("two numbers [low,high] with low < high")] | None = None
    """[low, high]: groups whose mean return (before algorithm.reward_scale) lies outside do not enter the update; for
    rewards that are not success."""
    filter_refills: Index = 0
    """Rounds of further groups in place of filtered ones; if none is left after them, the weights stay as they are."""

    def problems(self) -> Iterator[str]:
        """One episode is no group."""
        yield from super().problems()
        if self.group_size < 2:
            yield (
                f"algorithm.group_size={self.group_size}: adv_type '{self.adv_type}' compares the episodes of a group; "
                "set it to 2 or more, or use adv_type=gae."
            )


class NormalizeSettings(Settings):
    """An estimator that may divide by a standard deviation."""

    normalize_advantages: bool = True
    """grpo, pass_at_k, gigpo: divide by the group's standard deviation; gae: whiten over the batch."""


class DiscountSettings(Settings):
    """An estimator that discounts."""

    gamma: Share = 1.0
    """Discount per credited step (chunk or action, see reward_type)."""


class ReturnScaleSettings(DiscountSettings):
    """An estimator whose rewards may be brought to one scale."""

    normalize_returns: bool = False
    """Divide rewards by the running standard deviation of discounted returns; what is reported stays as it is."""


class CreditSettings(AlgorithmSettings):
    """An estimator with one credit per chunk or per action."""

    reward_type: RewardLevel = RewardLevel.chunk_level
    """Credit per chunk or per action."""

    def problems(self) -> Iterator[str]:
        """One ratio per chunk cannot carry one advantage per action."""
        yield from super().problems()
        if self.reward_type is RewardLevel.action_level and self.logprob_type is TokenLevel.chunk_level:
            yield (
                "algorithm.logprob_type=chunk_level has one ratio per chunk, but reward_type=action_level one "
                "advantage per action; use logprob_type=action_level or token_level, or reward_type=chunk_level."
            )


class ValueSettings(CreditSettings):
    """An estimator with a value head."""

    needs = {"value_coef": "value_clip huber_delta critic_warmup"}

    value_clip: Positive | None = 0.2
    """Clip of the value change; null: off."""
    huber_delta: Positive | None = None
    """Huber loss for the value instead of a square; null: off."""
    value_coef: Weight = 0.5
    """Weight of the value loss."""
    critic_warmup: Index = 0
    """Training steps at the start that train nothing but the value head."""


_BUFFER_READS = {"sampling_params", "adv_type", "group_size", "rollout_epoch", "reward_scale", "curriculum"}
"""Keys of all algorithms that have an effect with a replay buffer."""


class BufferSettings(AlgorithmSettings):
    """An algorithm whose updates draw from a buffer of what was seen, and from demonstrations."""

    needs = {
        "demonstrations": "demonstration_share",
        "never: this algorithm has its own update": " ".join(AlgorithmSettings.model_fields.keys() - _BUFFER_READS),
    }

    replay_size: Annotated[int, Field(ge=2, le=10**9)] = 1_000_000
    """Observations that the buffer holds; the oldest make room."""
    save_replay: bool = True
    """Keep the buffer in checkpoints; false: a resumed run fills a new one first, up to learning_starts."""
    learning_starts: Index = 1000
    """Chunk samples in the buffer before the first update."""
    updates_per_sample: Positive = 1.0
    """Updates for each new chunk sample, of actor.global_batch_size samples each."""
    demonstrations: list[Path] = []
    """Folders of demonstrations of this environment that are learned from as well; SAC: with its rewards."""
    demonstration_share: Share = 0.5
    """Of each batch, where there are demonstrations."""

    @property
    def method(self) -> str:
        """What it does, in a line."""
        shown = f", {self.demonstration_share:.0%} demonstrated" if self.demonstrations else ""
        return f"{self.adv_type}, {self.updates_per_sample:g} updates per sample{shown}"


class ReplaySettings(BufferSettings, DiscountSettings):
    """An algorithm whose critics learn from a buffer of all that was seen (SAC, RLPD)."""

    n_step: Count = 1
    """Chunks whose rewards are added up before a critic's estimate takes their place."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Share by which the target critics follow at each update."""
    critics: Annotated[int, Field(ge=2, le=100)] = 2
    """Critics. More than two as in REDQ: a target is the smallest of two drawn ones, the policy follows the mean."""
    policy_interval: Count = 1
    """Updates of the critics for each one of policy and temperature."""
    critic_layer_norm: bool = False
    """Layer normalisation in the critics, which bounds what they say of unseen actions (RLPD)."""
    alpha_init: Positive = 1.0
    """Weight of the entropy at first; it is learned."""
    target_entropy: Annotated[float, Field(ge=-(10**6), le=10**6)] | None = None
    """Entropy of a chunk, nat, that the weight is learned for; default: minus the number of action dimensions."""
    image_shift: Annotated[int, Field(ge=0, le=64)] = 4
    """Policies that read cameras: pixels, at most, by which pictures are shifted at random for an update; 0: none."""
    hindsight_goals: Index = 0
    """Goal environments: for each drawn transition, so many others as if their goal were one that their episode reached
    later (HER, `future`); 4 in the paper. 0: none."""

    @property
    def method(self) -> str:
        """What it does, in a line."""
        return super().method + (f", {self.hindsight_goals} goals in hindsight" if self.hindsight_goals else "")
