"""The typed key tree. Defaults live here only; YAML groups say what differs.

The string below each field is its documentation: `embodyrl show` and the error messages print it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class RewardLevel(str, Enum):
    chunk_level = "chunk_level"
    action_level = "action_level"


class TokenLevel(str, Enum):
    token_level = "token_level"
    action_level = "action_level"
    chunk_level = "chunk_level"


class Precision(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"


class OnExisting(str, Enum):
    error = "error"
    resume = "resume"
    rename = "rename"


class RolloutMode(str, Enum):
    collocated = "collocated"
    disaggregated = "disaggregated"


class OnEnvCrash(str, Enum):
    restart = "restart"
    fail = "fail"


class OnNonfinite(str, Enum):
    stop = "stop"
    skip = "skip"


class OnVideoError(str, Enum):
    warn = "warn"
    stop = "stop"


class EpisodeFilter(str, Enum):
    success = "success"
    all = "all"


class FrameFormat(str, Enum):
    png = "png"
    mp4 = "mp4"


class RenderProfile(str, Enum):
    full = "full"
    lean = "lean"


@dataclass
class LoggerConfig:
    backends: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Where metrics go."""
    project_name: str = "embodyrl"
    """Project name for hosted loggers and run ids."""


@dataclass
class RunnerConfig:
    output_dir: str = "runs"
    """Parent folder; a run is <output_dir>/<id>/."""
    experiment_name: str | None = None
    """Name of the run folder; default: time, environment, model and algorithm."""
    max_steps: int = 100
    """Training steps."""
    max_epochs: int = -1
    """Passes over the training reset ids; -1: no limit."""
    only_eval: bool = False
    """Evaluate `ckpt` (or the model's own weights) and stop."""
    val_check_interval: int = -1
    """Training steps between validations; also before the first and after the last step; -1: never."""
    save_interval: int = 50
    """Training steps between checkpoints; the last step is always saved; -1: only the last."""
    resume_dir: str | None = None
    """Run folder to continue, or `auto` for the newest run of this experiment."""
    on_existing: OnExisting = OnExisting.error
    """What to do if the run folder exists."""
    deterministic: bool = False
    """Same seed, same numbers, whatever the number of workers (costs inference on padded batches)."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass
class ClusterConfig:
    num_nodes: int = 1
    """Hosts."""
    component_placement: dict[str, str] = field(default_factory=lambda: {"env,rollout,actor": "all"})
    """Devices of each component, for example {"env": "0-3", "rollout,actor": "all"}."""


@dataclass
class LauncherConfig:
    name: str = "local"
    """inline: one process, one thread of control; local: supervised processes on this host."""
    env_workers: str = "auto"
    """Number of env worker processes, or auto: one per core, at most one per slot."""


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
    action_normalization: str = "bounds_q99"
    """Statistics that stand for -1 and 1 of actions and proprioception: bounds_q99 (q01, q99) or bounds (min, max)."""
    precision: Precision = Precision.bf16
    """Compute precision; master weights stay fp32 while training."""
    image_pipeline: str = "rlinf"
    """Preprocessing the checkpoint was trained with: rlinf (bicubic) or official (JPEG, lanczos, 0.9 crop)."""
    append_stop: bool = True
    """Put the STOP token after the action placeholders, as the original training did."""
    rope_bf16_table: bool = False
    """Round the rotary frequencies to bfloat16, as RLinf does; only for checkpoints that were trained so."""
    action_head: str = "discrete"
    """discrete tokens (RL, SFT, eval), or the continuous heads l1 and diffusion (eval)."""
    num_diffusion_steps_inference: int = 50
    """Denoising steps of the diffusion head, at most the 50 of its training."""
    use_film: bool = False
    """The vision towers are modulated by the instruction (FiLM, OFT+; eval)."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that stay as they are: patterns of names, for example [vision_backbone.*]."""
    compile: bool = False
    """Compile the model with torch.compile (slow first steps)."""
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
    """Text generation only."""


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
    value_clip: float | None = 0.2
    """Clip of the value change; null: off."""
    huber_delta: float | None = None
    """Huber loss for the value instead of a square; null: off."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    loss_agg_func: str = "token-mean"
    """How token losses become one number."""
    kl_beta: float = 0.0
    """Weight of the KL to the reference (the initial weights)."""
    kl_penalty_type: str = "low_var_kl"
    """KL estimator: k1, abs, k2, low_var_kl."""
    entropy_bonus: float = 0.0
    """Weight of the entropy."""
    normalize_advantages: bool = True
    """grpo: divide by the group's standard deviation; gae: whiten over the batch."""
    reward_type: RewardLevel = RewardLevel.chunk_level
    """Credit per chunk or per action."""
    logprob_type: TokenLevel = TokenLevel.token_level
    """Level of the probability ratio."""
    entropy_type: TokenLevel = TokenLevel.token_level
    """Level at which entropy is averaged."""
    filter_rewards: list[float] | None = None
    """[low, high]: groups whose mean success lies outside do not enter the update."""
    max_staleness: int = 0
    """0: synchronous."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class RolloutConfig:
    mode: RolloutMode = RolloutMode.collocated
    """collocated: rollout and actor share one process and one copy of the weights."""
    backend: str = "hf"
    """hf: the policy's own module; vllm: language models only."""
    pipeline_stage_num: int = 2
    """Parts of each env worker's slots that alternate between simulation and inference."""
    enable_offload: bool = False
    """Move rollout weights off the device while training."""


@dataclass
class FsdpConfig:
    size: int = -1
    """Actor ranks; -1: all devices of the actor's placement."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, more communication)."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


@dataclass
class OptimConfig:
    lr: float = 1.0e-4
    """Learning rate."""
    value_lr: float = 3.0e-3
    """Learning rate of the value head."""
    adam_beta1: float = 0.9
    """AdamW: decay of the gradient mean."""
    adam_beta2: float = 0.999
    """AdamW: decay of the squared gradient."""
    adam_eps: float = 1.0e-5
    """AdamW: added to the denominator."""
    weight_decay: float = 0.0
    """AdamW: decoupled weight decay."""
    clip_grad: float = 1.0
    """Gradient norm limit."""
    schedule: str = "constant"
    """constant, linear or cosine over runner.max_steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""


@dataclass
class ActorConfig:
    micro_batch_size: int = 8
    """Chunk samples per forward."""
    global_batch_size: int = 160
    """Chunk samples per optimizer step."""
    enable_offload: bool = False
    """Move actor weights and optimizer state off the device during rollouts."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class EvalConfig:
    episodes: int | None = None
    """Episodes in total; wins over episodes_per_task."""
    episodes_per_task: int = 10
    """Episodes of each task."""
    sampling_params: EvalSamplingParams = field(default_factory=EvalSamplingParams)


@dataclass
class DataConfig:
    path: str | None = None
    """Folder with demonstrations, as `embodyrl collect` writes them."""
    val_path: str | None = None
    """Folder with demonstrations for validation; default: a share of those in data.path."""
    val_share: float = 0.1
    """Share of the episodes in data.path that is held out for validation; 0: no validation."""
    shuffle: bool = True
    """Draw samples in random order."""
    image_aug: bool = True
    """Random crop, brightness, contrast, saturation and hue, as in the official fine-tuning recipe."""


@dataclass
class CollectConfig:
    out: str | None = None
    """Folder to write demonstrations to; one that is incomplete is continued."""
    episodes: int = 50
    """Episodes to keep, spread evenly over the tasks."""
    filter: EpisodeFilter = EpisodeFilter.success
    """success: keep only episodes that reach their goal; all: keep every episode."""
    images: FrameFormat = FrameFormat.png
    """png: lossless, inside the parquet files; mp4: much smaller, but frames come back slightly changed."""


@dataclass
class CheckpointConfig:
    keep: int = 3
    """Newest checkpoints that stay."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation success (sft: the lowest validation loss)."""


@dataclass
class FaultsConfig:
    on_env_crash: OnEnvCrash = OnEnvCrash.restart
    """restart the env worker (its episodes are dropped and counted) or fail."""
    max_restarts_per_worker: int = 3
    """Restarts of one env worker before the run fails with exit code 4."""
    step_timeout_s: float = 120.0
    """Longest answer of an env worker for one action chunk or reset, per slot."""
    start_timeout_s: float = 600.0
    """Longest start of a worker: imports, simulators, weights."""
    update_timeout_s: float = 3600.0
    """Longest update, checkpoint or scoring pass of the actor."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """stop with exit code 5, or skip the update and count it."""
    on_video_error: OnVideoError = OnVideoError.warn
    """warn and go on, or stop."""


@dataclass
class VideoConfig:
    fps: int = 20
    """Frames per second of recordings."""
    info_on_video: bool = True
    """Overlay instruction, step and success."""
    base_dir: str = "videos"
    """Recordings go to <base_dir>/<run id>/."""


@dataclass
class Config:
    seed: int = 0
    """The one seed; every random stream is derived from it."""
    custom: dict[str, Any] = field(default_factory=dict)
    """Free mapping for your own code; everything else is strict."""
    video: str = "none"
    """none, failures, first:N or all."""
    ckpt: str | None = None
    """Weights to start from: a run, a checkpoint folder, or assets/<name>."""
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    video_cfg: VideoConfig = field(default_factory=VideoConfig)
