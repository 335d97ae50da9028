"""Config keys shared by algorithms; the keys of a single estimator or loss are declared in its module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from embodyrl.config.settings import Constraint, Count, Index, Path, Positive, Settings, Share, Weight, valid_if
from embodyrl.config.shared import SamplingSettings

RewardLevel = StrEnum("RewardLevel", ["chunk_level", "action_level"])
TokenLevel = StrEnum("TokenLevel", ["token_level", "action_level", "chunk_level"])
RewardNorm = StrEnum("RewardNorm", ["none", "group", "batch"])
TruncatedEpisodes = StrEnum("TruncatedEpisodes", ["train", "mask", "zero_reward"])
OldLogprob = StrEnum("OldLogprob", ["rollout", "recompute"])
_Address = Annotated[str, Field(pattern=r"^https?://\S+$"), Constraint("an address such as http://host:8000/v1")]
WeightMode = StrEnum("WeightMode", ["mask", "truncate"])
WeightLevel = StrEnum("WeightLevel", ["token", "sequence", "geometric"])
AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Bound = Annotated[float, Field(gt=1, le=10**9)]


ASCENDING = valid_if(lambda v: len(v) == 2 and v[0] < v[1])
_AROUND_ZERO = valid_if(lambda v: len(v) == 2 and v[0] < 0 < v[1])
_FRACTIONS = valid_if(lambda v: len(v) == 2 and 0 <= v[0] < v[1] <= 1)


class InferenceAlgorithm(Settings):
    """Config keys of `algorithm` that affect sampling."""

    sampling_params: SamplingSettings = SamplingSettings()


class AlgorithmSettings(InferenceAlgorithm):
    """Config keys for every estimator and loss."""

    keys_by_condition = {
        "kl_beta": "kl_penalty_type kl_in_reward reference_path reference_interval reference_url",
        "reference_url": "reference_model",
        "kl_in_reward": "kl_target",
        "kl_target": "kl_horizon",
        "old_logprob=recompute": "behave_weight_threshold m2_threshold",
        "behave_weight_threshold": "behave_weight_mode behave_weight_level",
    }

    imitates: ClassVar[bool] = False
    """True if the loss is the SFT loss."""
    transitions: ClassVar[bool] = False
    """True if updates sample transitions, including final observations, from a replay buffer in one process."""
    adv_type: str = "grpo"
    """Name of the advantage estimator."""
    loss_type: str = "ppo_clip"
    """Name of the policy loss."""
    loss: SkipJsonSchema[Settings] = Settings()
    """Settings of the loss, whose keys are written next to the keys of the estimator."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Number of episodes per group; all episodes of a group share a reset id."""
    rollout_epoch: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of rollouts of all environments per training step."""
    update_epoch: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of passes over the collected batch."""
    loss_agg_func: AggregationMode = "token-mean"
    """Aggregation of token losses: mean or sum over tokens, sequences or the batch."""
    logprob_type: TokenLevel = TokenLevel.token_level
    """Level of the probability ratio: token, action or chunk."""
    entropy_type: TokenLevel = TokenLevel.token_level
    """Level at which entropy is averaged: token, action or chunk."""
    entropy_bonus: Annotated[float, Field(ge=-(10**6), le=10**6)] = 0.0
    """Coefficient of the entropy bonus."""
    positive_nll_coef: Weight = 0.0
    """Weight of the mean of -log pi over actions with a positive advantage."""
    kl_beta: Weight = 0.0
    """Weight of the KL to the reference (the initial weights, or those of reference_path)."""
    reference_interval: Count | None = None
    """Interval, in training steps, at which the policy's weights are copied to the reference; null: never."""
    reference_path: Path | None = None
    """Weights of the reference: a run, a checkpoint or a model folder. For distillation, use a larger teacher model
    with the same tokens. Default: the initial weights."""
    reference_url: _Address | None = None
    """Language models: URL (with /v1) of an OpenAI-compatible completions server for the reference, for example a
    teacher."""
    reference_model: str | None = None
    """Model name on the server of reference_url; default: the first model of the server."""
    kl_penalty_type: Literal["k1", "abs", "k2", "low_var_kl", "k3", "k3+", "k3_unbiased"] = "low_var_kl"
    """KL estimator: k1, abs, k2, low_var_kl (= k3), k3+ (value of k3, gradient of k2), k3_unbiased."""
    kl_in_reward: bool = False
    """Subtract the KL from the reward of each action instead of adding the KL to the loss."""
    kl_target: Positive | None = None
    """Target KL per token of an adaptive kl_beta (with kl_in_reward); null: constant kl_beta."""
    kl_horizon: Count = 10000
    """Horizon of the adaptive kl_beta, in episodes."""
    advantage_clip: Annotated[list[float], _AROUND_ZERO, Constraint("[low,high] with low < 0 < high")] | None = None
    """Clip advantages to [low, high]."""
    reward_scale: Weight = 1.0
    """Factor that multiplies all rewards, after reward_bias is added; 0 with kl_beta > 0: pure distillation."""
    reward_bias: Annotated[float, Field(ge=-(10**9), le=10**9)] = 0.0
    """Constant added to the outcome (sum of rewards) of each episode."""
    reward_clip: Positive | None = None
    """Clip the outcomes of episodes to [-reward_clip, reward_clip]."""
    reward_norm: RewardNorm = RewardNorm.none
    """Normalize the outcomes of episodes over the group or the batch to mean 0 and standard deviation 1."""
    truncated_episodes: TruncatedEpisodes = TruncatedEpisodes.train
    """Treatment of episodes that hit a limit: train, mask (no loss, but their outcomes count in their groups) or
    zero_reward (outcome 0)."""
    curriculum: Share = 0.0
    """Fraction of groups whose task (with a single task: row or reset id) is sampled in proportion to its success
    variance p (1 - p); 0: uniform sampling."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 0
    """Maximum number of weight versions by which rollout data may lag behind the trained weights; 0: synchronous."""
    old_logprob: OldLogprob = OldLogprob.rollout
    """Old log-probabilities of the ratio: rollout (recorded while sampling) or recompute (before the update)."""
    behave_weight_threshold: Positive | None = None
    """Threshold of the loss weight pi_old / pi_rollout (decoupled PPO, needs old_logprob=recompute); null: no weight.
    For weights above the threshold, see behave_weight_mode."""
    behave_weight_mode: WeightMode = WeightMode.mask
    """Treatment of weights above behave_weight_threshold: mask (weight 0) or truncate (weight = threshold)."""
    behave_weight_level: WeightLevel = WeightLevel.token
    """Level of the weights. token: one weight per token; sequence: product of a sample's token weights; geometric:
    geometric mean of a sample's token weights."""
    m2_threshold: Positive | None = None
    """M2PO: drop the most off-policy tokens until the mean squared log-ratio is below this threshold; null: off."""
    off_policy_masking_delta: Positive | None = None
    """Drop samples with a negative advantage whose mean log pi_rollout - log pi exceeds this threshold; null: off."""
    early_stop_imp_ratio: Bound | None = None
    """Stop the update once the mean ratio of an optimizer step exceeds this value; null: never."""
    early_stop_kl: Positive | None = None
    """Stop the update once KL(old || new) of an optimizer step exceeds this value; null: never."""

    def nested(self) -> Iterator[tuple[str, Settings]]:
        """Yield nested settings; the keys of `loss` have no prefix."""
        for name, settings in super().nested():
            yield ("" if settings is self.loss else name), settings

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with the given values of keys of the estimator and of the loss."""
        own = {name: value for name, value in values.items() if name.partition(".")[0] in type(self).model_fields}
        loss = {name: value for name, value in values.items() if name not in own}
        return super().updated(own | {"loss": self.loss.updated(loss)} if loss else own)

    @property
    def method(self) -> str:
        """Return a one-line description of the algorithm."""
        return f"{self.adv_type} + {self.loss_type}"

    @property
    def needs_terminal_observations(self) -> bool:
        """True if terminated episodes need a final observation, because relabeled goals may undo the termination."""
        return False

    def problems(self) -> Iterator[str]:
        """Yield one message per contradiction between settings."""
        yield from super().problems()
        if self.kl_in_reward and self.kl_penalty_type in ("k3+", "k3_unbiased"):
            yield (
                f"algorithm.kl_penalty_type={self.kl_penalty_type} is for the loss only. With kl_in_reward=true, "
                "use k1, abs, k2, low_var_kl or k3."
            )
        if self.reference_url is not None and (self.reference_path is not None or self.reference_interval is not None):
            yield (
                "algorithm.reference_url: the server provides the reference; remove reference_path and "
                "reference_interval."
            )
        if self.reward_scale == 0 == self.kl_beta:
            yield "algorithm.reward_scale=0 removes every reward; set kl_beta above 0 or raise reward_scale."


class GroupSettings(AlgorithmSettings):
    """Config keys for estimators that compare the episodes of a group."""

    keys_by_condition = {"filter_rewards or filter_returns": "filter_refills"}

    filter_rewards: (
        Annotated[list[float], _FRACTIONS, Constraint("two numbers [low,high] with 0 <= low < high <= 1, or null")]
        | None
    ) = None
    """[low, high]: exclude groups with a mean success outside this range from the update."""
    filter_returns: Annotated[list[float], ASCENDING, Constraint("two numbers [low,high] with low < high")] | None = (
        None
    )
    """[low, high]: exclude groups with a mean return (before reward_scale) outside this range. Intended for rewards
    other than success."""
    filter_refills: Index = 0
    """Maximum number of rounds in which new groups replace filtered groups. If all groups are filtered, the weights do
    not change."""

    def problems(self) -> Iterator[str]:
        """Yield one message per contradiction between settings."""
        yield from super().problems()
        if self.group_size < 2:
            yield (
                f"algorithm.group_size={self.group_size}: adv_type '{self.adv_type}' compares the episodes of a group; "
                "set algorithm.group_size to 2 or more, or use adv_type=gae."
            )


class NormalizeSettings(Settings):
    """Config keys for estimators that can divide advantages by their standard deviation."""

    normalize_advantages: bool = True
    """Divide by the group's standard deviation (grpo, pass_at_k, gigpo), or whiten over the batch (gae)."""


class DiscountSettings(Settings):
    """Config keys for estimators with a discount."""

    gamma: Share = 1.0
    """Discount factor per chunk or per action (see reward_type)."""


class CreditSettings(AlgorithmSettings):
    """Config keys for estimators with one advantage per chunk or per action."""

    reward_type: RewardLevel = RewardLevel.chunk_level
    """Level of rewards and advantages: per chunk or per action."""

    def problems(self) -> Iterator[str]:
        """Yield one message per contradiction between settings."""
        yield from super().problems()
        if self.reward_type is RewardLevel.action_level and self.logprob_type is TokenLevel.chunk_level:
            yield (
                "algorithm.logprob_type=chunk_level has one ratio per chunk, but reward_type=action_level has one "
                "advantage per action; use logprob_type=action_level or token_level, or reward_type=chunk_level."
            )


class ValueSettings(CreditSettings):
    """Config keys for estimators with a value head."""

    keys_by_condition = {"value_coef": "value_clip huber_delta critic_warmup"}

    value_clip: Positive | None = 0.2
    """Clip range of value changes (PPO value clipping); null: off."""
    huber_delta: Positive | None = None
    """Delta of the Huber loss for the value; null: squared error."""
    value_coef: Weight = 0.5
    """Weight of the value loss."""
    critic_warmup: Index = 0
    """Number of initial training steps that train only the value head."""


_BUFFER_FIELDS = {"sampling_params", "adv_type", "loss", "group_size", "rollout_epoch", "reward_scale", "curriculum"}
_UNUSED_FIELDS = AlgorithmSettings.model_fields.keys() - _BUFFER_FIELDS - {"max_staleness"}
"""Fields of AlgorithmSettings that have no effect with a replay buffer."""


class BufferSettings(AlgorithmSettings):
    """Config keys for algorithms that train on a replay buffer and demonstrations."""

    keys_by_condition = {
        "demonstrations": "demonstration_share",
        "never: this algorithm has its own update": " ".join(_UNUSED_FIELDS),
    }

    replay_size: Annotated[int, Field(ge=2, le=10**9)] = 1_000_000
    """Capacity of the replay buffer in observations; the oldest observations are overwritten."""
    save_replay: bool = True
    """Save the replay buffer in checkpoints; false: a resumed run first fills a new buffer up to learning_starts."""
    learning_starts: Index = 1000
    """Number of chunk samples in the replay buffer before the first update."""
    updates_per_sample: Positive = 1.0
    """Number of updates per new chunk in the replay buffer; each update uses actor.global_batch_size samples."""
    demonstrations: list[Path] = []
    """Folders of demonstrations of this environment to mix into training batches. SAC uses the rewards of
    demonstrations."""
    demonstration_share: Share = 0.5
    """Fraction of demonstrations in each batch."""

    def without_unused_fields(self) -> Self:
        """Return a copy in which all fields without effect have their defaults."""
        return self.model_copy(update={name: AlgorithmSettings.model_fields[name].default for name in _UNUSED_FIELDS})

    @property
    def method(self) -> str:
        """Return a one-line description of the algorithm."""
        return f"{self.adv_type}, {self.updates_per_sample:g} updates per sample"
