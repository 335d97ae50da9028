"""The keys of environments, models and algorithms; see `schema` for the rest of the tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

RewardLevel = StrEnum("RewardLevel", ["chunk_level", "action_level"])
TokenLevel = StrEnum("TokenLevel", ["token_level", "action_level", "chunk_level"])
Precision = StrEnum("Precision", ["bf16", "fp32"])
RenderProfile = StrEnum("RenderProfile", ["full", "lean"])
RewardNorm = StrEnum("RewardNorm", ["none", "group", "batch"])
TruncatedEpisodes = StrEnum("TruncatedEpisodes", ["train", "mask", "zero_reward"])
OldLogprob = StrEnum("OldLogprob", ["rollout", "recompute"])
WeightMode = StrEnum("WeightMode", ["mask", "truncate"])
WeightLevel = StrEnum("WeightLevel", ["token", "sequence", "geometric"])
ObsMode = StrEnum("ObsMode", ["rgb", "state"])
SimBackend = StrEnum("SimBackend", ["cpu", "gpu"])
Normalization = StrEnum("Normalization", ["bounds_q99", "bounds"])
ImagePipeline = StrEnum("ImagePipeline", ["rlinf", "official"])
ActionHead = StrEnum("ActionHead", ["discrete", "l1", "diffusion"])


@dataclass
class InitParams:
    camera_heights: int = 256
    """Height of every camera image, pixels."""
    camera_widths: int = 256
    """Width of every camera image, pixels."""
    camera_names: list[str] = field(default_factory=lambda: ["agentview"])
    """Cameras that are rendered for the policy, in the order of its image inputs; each one costs rendering time."""


@dataclass
class EnvSplitConfig:
    total_num_envs: int = 8
    """Env slots."""
    auto_reset: bool = True
    """An ended slot starts its next episode at once; false: one episode per slot and rollout epoch."""
    ignore_terminations: bool = False
    """Go on after success until max_episode_steps."""
    use_fixed_reset_state_ids: bool = True
    """Members of a group, and all episodes of a slot within one rollout epoch, share one reset id."""
    max_episode_steps: int = 512
    """Time limit in env steps; reaching it truncates the episode."""
    max_steps_per_rollout_epoch: int | None = None
    """Env steps per slot and rollout epoch where the algorithm counts steps (GAE); default max_episode_steps."""
    task_ids: list[int] | None = None
    """Tasks to use; default all."""
    state_ids: list[int] | None = None
    """[first, last]: initial states of each task that this split may use; default all."""
    enable_offload: bool = False
    """Free simulator memory between rollouts."""


@dataclass
class EnvConfig:
    env_type: str = "libero"
    """Which adapter: a registered name or package.module:attr."""
    task_suite_name: str | None = None
    """LIBERO suite."""
    id: str | None = None
    """Environment id (gym, maniskill)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the environment's constructor."""
    max_turns: int = 1
    """Replies of one text episode; more than one where tools answer in between."""
    tools: list[str] = field(default_factory=list)
    """Tools that a text reply may call: calculator, python, or package.module:function of a text."""
    wrappers: list[str] = field(default_factory=list)
    """Wrappers around a Gymnasium environment, innermost first: package.module:attr of a callable env -> env."""
    obs_mode: ObsMode = ObsMode.rgb
    """rgb: camera images and proprioception; state: all that the task observes, no images (maniskill)."""
    sim_backend: SimBackend = SimBackend.cpu
    """cpu: a simulator per slot, exact repetition; gpu: one batch for all slots of a worker (maniskill)."""
    control_mode: str | None = None
    """How actions drive the robot; default: the task's own (maniskill)."""
    reward_mode: str | None = None
    """normalized_dense, dense, sparse or none (success counts); default: the task's own (maniskill)."""
    use_rel_reward: bool = True
    """Reward is the change of the simulator's reward, so that a return telescopes to its last value."""
    reward_coef: float = 1.0
    """Factor on every reward."""
    init_params: InitParams = field(default_factory=InitParams)
    render_profile: RenderProfile = RenderProfile.full
    """full: pixel-identical to the benchmark; lean: decimated visuals for software rendering, same physics."""
    fast_physics: bool | None = None
    """Inner loop without repeated work, equal to the benchmark's up to rounding; null: on with render_profile=lean."""
    train: EnvSplitConfig = field(default_factory=EnvSplitConfig)
    eval: EnvSplitConfig = field(default_factory=EnvSplitConfig)


@dataclass
class LoraConfig:
    r: int = 32
    """Rank."""
    lora_alpha: int = 32
    """Scale numerator."""
    target_modules: str = "all-linear"
    """Which modules get adapters: all-linear, or last parts of module names with commas (q_proj,v_proj)."""
    init_lora_weights: str = "gaussian"
    """Start of the first factor: gaussian or kaiming; the second one starts at 0, so that nothing changes at first."""
    path: str | None = None
    """Adapter folder to start from; without is_lora it is merged into the weights."""


@dataclass
class ModelConfig:
    model_type: str = "openvla_oft"
    """Which policy: a registered name or package.module:attr."""
    path: str | None = None
    """Checkpoint folder in the model's public layout."""
    action_dim: int = 7
    """A: dimensions of one action."""
    num_action_chunks: int = 8
    """K: actions per policy query."""
    unnorm_key: str | None = None
    """Key of the action statistics; default: the environment's own."""
    num_images_in_input: int = 1
    """Camera images per query."""
    use_proprio: bool = False
    """Feed proprioception."""
    action_normalization: Normalization = Normalization.bounds_q99
    """Statistics that stand for -1 and 1 of actions and proprioception: bounds_q99 (q01, q99) or bounds (min, max)."""
    precision: Precision = Precision.bf16
    """Compute precision; master weights stay fp32 while training."""
    image_pipeline: ImagePipeline = ImagePipeline.rlinf
    """Preprocessing the checkpoint was trained with: rlinf (bicubic) or official (JPEG, lanczos, 0.9 crop)."""
    append_stop: bool = True
    """Put the STOP token after the action placeholders, as the original training did."""
    rope_bf16_table: bool = False
    """Round the rotary frequencies to bfloat16, as RLinf does; only for checkpoints that were trained so."""
    action_head: ActionHead = ActionHead.discrete
    """discrete tokens (RL, sft, eval), or the continuous heads l1 (sft, eval) and diffusion (eval)."""
    num_diffusion_steps_inference: int = 50
    """Denoising steps of the diffusion head, at most the 50 of its training."""
    use_film: bool = False
    """The vision towers are modulated by the instruction (FiLM, OFT+; eval)."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that stay as they are: patterns of names, for example [vision_backbone.*]."""
    compile: bool = False
    """Compile the model with torch.compile (slow first steps)."""
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers (mlp, cnn), of the policy's and of the value's network."""
    chat: bool | None = None
    """Language models: apply the tokenizer's chat template; null: if it has one."""
    expert_noise: float = 0.0
    """model=scripted: standard deviation of the noise on executed actions; what is recorded stays clean."""
    is_lora: bool = False
    """Train low-rank adapters instead of all weights."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class SamplingParams:
    do_sample: bool = True
    """Sample; false: greedy."""
    temperature: float = 1.0
    """One temperature for rollout and loss."""
    top_k: int = -1
    """Text generation only; -1: off."""
    top_p: float = 1.0
    """Text generation only; 1: off."""
    repetition_penalty: float = 1.0
    """Text generation only; 1: off."""
    max_new_tokens: int | None = None
    """Text generation only: tokens of the longest reply."""
    stop: list[str] = field(default_factory=list)
    """Text generation only: a reply ends with the first of these texts."""


@dataclass
class EvalSamplingParams:
    do_sample: bool = False
    """Sample; false: greedy."""
    temperature: float | None = None
    """Temperature of sampled evaluation; default: that of training."""


@dataclass
class AlgorithmConfig:
    adv_type: str = "grpo"
    """Advantage estimator."""
    loss_type: str = "ppo_clip"
    """Policy loss."""
    group_size: int = 8
    """Episodes that share a reset id."""
    rollout_epoch: int = 1
    """Rollouts of all slots per training step."""
    update_epoch: int = 1
    """Passes over the collected batch."""
    gamma: float = 1.0
    """Discount per credited step (chunk or action, see reward_type)."""
    gae_lambda: float = 1.0
    """GAE lambda."""
    clip_ratio_low: float = 0.2
    """PPO clip below 1."""
    clip_ratio_high: float = 0.28
    """PPO clip above 1."""
    clip_ratio_c: float | None = None
    """Dual clip bound for negative advantages (> 1); null: off."""
    ratio_max: float = 2.0
    """aipo: upper bound of the importance weight."""
    sapo_tau_pos: float = 1.0
    """sapo: steepness of the gate for positive advantages."""
    sapo_tau_neg: float = 1.05
    """sapo: steepness of the gate for the others."""
    log_ratio_coef: float = 1.0
    """dro: weight of half the squared log-ratio; kl_cov: of its absolute value."""
    cov_share: float = 2.0e-4
    """clip_cov, kl_cov: share of the tokens that is held back."""
    cov_bounds: list[float] = field(default_factory=lambda: [1.0, 5.0])
    """clip_cov: [low, high] covariance of advantage and log-probability of the tokens to choose from."""
    positive_nll_coef: float = 0.0
    """Weight of the mean of -log pi over actions with a positive advantage."""
    value_clip: float | None = 0.2
    """Clip of the value change; null: off."""
    huber_delta: float | None = None
    """Huber loss for the value instead of a square; null: off."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    critic_warmup: int = 0
    """Training steps at the start that train nothing but the value head."""
    loss_agg_func: str = "token-mean"
    """How token losses become one number."""
    kl_beta: float = 0.0
    """Weight of the KL to the reference (the initial weights)."""
    kl_penalty_type: str = "low_var_kl"
    """KL estimator: k1, abs, k2, low_var_kl (= k3), k3+ (value of k3, gradient of k2), k3_unbiased."""
    kl_in_reward: bool = False
    """Take the KL from the rewards, action by action, instead of adding it to the loss."""
    kl_target: float | None = None
    """KL per token that an adaptive kl_beta aims at (with kl_in_reward); null: kl_beta stays."""
    kl_horizon: int = 10000
    """Episodes over which the adaptive kl_beta moves."""
    entropy_bonus: float = 0.0
    """Weight of the entropy."""
    normalize_advantages: bool = True
    """grpo, pass_at_k, gigpo: divide by the group's standard deviation; gae: whiten over the batch."""
    std_unbiased: bool = True
    """Standard deviation of a group with n - 1 instead of n in the denominator."""
    step_advantage_weight: float = 1.0
    """gigpo: weight of a step's advantage among visits of the same state."""
    advantage_clip: list[float] | None = None
    """[low, high] bounds of advantages."""
    reward_scale: float = 1.0
    """Factor on rewards, after reward_bias."""
    reward_bias: float = 0.0
    """Added to the outcome of an episode."""
    reward_clip: float | None = None
    """Outcomes are clipped to +- this."""
    reward_norm: RewardNorm = RewardNorm.none
    """Shift and scale outcomes to mean 0 and standard deviation 1 over the group or the batch."""
    truncated_episodes: TruncatedEpisodes = TruncatedEpisodes.train
    """Episodes that hit a limit: train on them, mask (no loss, but their outcomes count in their groups) or
    zero_reward."""
    reward_type: RewardLevel = RewardLevel.chunk_level
    """Credit per chunk or per action."""
    logprob_type: TokenLevel = TokenLevel.token_level
    """Level of the probability ratio."""
    entropy_type: TokenLevel = TokenLevel.token_level
    """Level at which entropy is averaged."""
    filter_rewards: list[float] | None = None
    """[low, high]: groups whose mean success lies outside do not enter the update."""
    filter_refills: int = 0
    """Rounds of further groups in place of filtered ones; if none is left after them, the weights stay as they are."""
    max_staleness: int = 0
    """Versions by which the oldest data of an update may lag behind its weights; 0: synchronous."""
    old_logprob: OldLogprob = OldLogprob.rollout
    """Denominator of the ratio: log-probabilities of the rollout, or recomputed by the actor before it trains."""
    behave_weight_threshold: float | None = None
    """Weigh the loss by pi_old / pi_rollout up to this cap (decoupled PPO; with old_logprob=recompute); null: off."""
    behave_weight_mode: WeightMode = WeightMode.mask
    """Above the cap: mask (weight 0) or truncate (weight = cap)."""
    behave_weight_level: WeightLevel = WeightLevel.token
    """One weight per token, or per sample: product (sequence) or geometric mean of its tokens."""
    m2_threshold: float | None = None
    """M2PO: drop the most off-policy tokens until their mean squared log-ratio is below this; null: off."""
    off_policy_masking_delta: float | None = None
    """Drop samples of negative advantage whose mean log pi_rollout - log pi exceeds this; null: off."""
    early_stop_imp_ratio: float | None = None
    """Leave out the rest of an update once the mean ratio of an optimizer step exceeds this; null: never."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
