"""The typed key tree. Defaults live here only; YAML groups say what differs.

The string below each field is its documentation: `embodyrl show` and the error messages print it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from embodyrl.config.components import (  # re-exported: the schema is one import for its readers
    AlgorithmConfig,
    EnvConfig,
    EnvSplitConfig,
    EvalSamplingParams,
    InitParams,
    LoraConfig,
    ModelConfig,
    ObsMode,
    OldLogprob,
    Precision,
    RenderProfile,
    RewardLevel,
    RewardNorm,
    SamplingParams,
    SimBackend,
    TokenLevel,
    TruncatedEpisodes,
    WeightLevel,
    WeightMode,
)

RolloutMode = StrEnum("RolloutMode", ["collocated", "disaggregated"])
OnExisting = StrEnum("OnExisting", ["error", "resume", "rename"])
OnEnvCrash = StrEnum("OnEnvCrash", ["restart", "fail"])
OnNonfinite = StrEnum("OnNonfinite", ["stop", "skip"])
OnSaveError = StrEnum("OnSaveError", ["continue", "stop"])
OnVideoError = StrEnum("OnVideoError", ["warn", "stop"])
EpisodeFilter = StrEnum("EpisodeFilter", ["success", "all"])
FrameFormat = StrEnum("FrameFormat", ["png", "mp4"])


@dataclass
class LoggerConfig:
    backends: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Where metrics go: console, jsonl, tensorboard, wandb, swanlab, mlflow, trackio, or package.module:attr."""
    project_name: str = "embodyrl"
    """Project name for hosted loggers."""
    offline: bool = False
    """Hosted loggers write files and contact no server (wandb, swanlab, mlflow; trackio always does)."""


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
    trace: bool = False
    """Write who worked when to <run>/logs/attempt_<n>/trace.json, for ui.perfetto.dev or chrome://tracing."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass
class ClusterConfig:
    num_nodes: int = 1
    """Hosts."""
    component_placement: dict[str, str] = field(
        default_factory=lambda: {"env": "all", "rollout": "all", "actor": "all"}
    )
    """Nodes of each component with launcher=ray, for example {env:1-3,rollout:0,actor:0}; 0: the driver's."""


@dataclass
class LauncherConfig:
    name: str = "local"
    """inline: one process, one thread of control; local: supervised processes on this host; ray: a cluster."""
    env_workers: str = "auto"
    """Number of env worker processes, or auto: one per core, at most one per slot."""


@dataclass
class RolloutConfig:
    mode: RolloutMode = RolloutMode.collocated
    """collocated: rollout and actor share one process and one copy of the weights; disaggregated: other processes act,
    and new weights are copied to them between two chunks."""
    num_workers: int = 1
    """Processes that act with rollout.mode=disaggregated."""
    backend: str = "hf"
    """hf: the policy's own module; vllm: language models only."""
    pipeline_stage_num: int = 2
    """Parts of each env worker's slots that alternate between simulation and inference."""
    enable_offload: bool = False
    """Move rollout weights off the device while training."""
    dump: bool = False
    """Write what the first update, and the first after each checkpoint, is given, for `embodyrl replay`."""


@dataclass
class FsdpConfig:
    size: int = -1
    """Actor ranks; -1: one per GPU of this host, or one without GPUs and where only one works."""
    shard_size: int = -1
    """Ranks that share one copy of the weights, the others replicate it (HSDP); -1: all ranks; 1: replicas only."""
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
    """constant, linear, cosine, or wsd (constant, linear over the last tenth), over runner.max_steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""


@dataclass
class ActorConfig:
    micro_batch_size: int = 8
    """Chunk samples per forward."""
    global_batch_size: int = 160
    """Chunk samples per optimizer step."""
    max_tokens_per_mbs: int | None = None
    """Text: tokens per forward, padding included, in place of micro_batch_size; samples are sorted by length."""
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
    standard: bool = False
    """The benchmark's own protocol: every initial state of every task once, and its own horizon."""
    sampling_params: EvalSamplingParams = field(default_factory=EvalSamplingParams)


@dataclass
class DataConfig:
    path: str | None = None
    """Folder of demonstrations, as `embodyrl collect` writes it; text: a .jsonl or .parquet file, a folder of them, or
    package.module:function."""
    val_path: str | None = None
    """The same for validation; default: a share of what is in data.path."""
    val_share: float = 0.1
    """Share of the episodes in data.path that is held out for validation; 0: no validation."""
    shuffle: bool = True
    """Draw samples in random order."""
    image_aug: bool = True
    """Random crop, brightness, contrast, saturation and hue, as in the official fine-tuning recipe."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the function of data.path=package.module:function, which returns rows."""
    prompt_key: str = "prompt"
    """Column of what is asked: text, or a list of messages with role and content."""
    answer_key: str = "answer"
    """Column of what an answer is judged by, and what `embodyrl sft` imitates."""
    answer_pattern: str | None = None
    """Regular expression whose first group is the reference within the answer column, for example '#### (.+)'."""
    prompt_template: str = "{prompt}"
    """Text around each prompt."""
    system_prompt: str | None = None
    """System message in front of each prompt."""
    max_prompt_length: int | None = 512
    """Longer prompts, in tokens of the model without its chat template, are left out; null: all stay."""


@dataclass
class RewardConfig:
    name: str | None = None
    """Reward of a text answer that also decides success (at least 1); docs/text.md lists them."""
    path: str | None = None
    """Another reward, or the only one: package.module:function of (prompt, response, reference) -> number or named
    numbers, an http address that is asked, or the folder of a reward model."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each reward by name, 1 where none is given; names not chosen above are added."""
    overlong_buffer: int = 0
    """Tokens below max_new_tokens in which a penalty grows from 0 to overlong_penalty; 0: none."""
    overlong_penalty: float = 1.0
    """Penalty of an answer that is cut off at max_new_tokens."""
    timeout_s: float = 5.0
    """Longest time for one answer; then it earns 0 and is counted."""
    workers: int = 1
    """Processes per env worker that judge answers."""


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
    async_save: bool = False
    """Go on training once the files are written, while they are hashed, synced to the disk and moved into place."""
    on_error: OnSaveError = OnSaveError["continue"]
    """A checkpoint on the way cannot be written (full disk): warn and continue, or stop. The last one must succeed."""


@dataclass
class FaultsConfig:
    on_env_crash: OnEnvCrash = OnEnvCrash.restart
    """restart the env worker (its running episodes are played again) or fail."""
    max_restarts_per_worker: int = 3
    """Restarts of one env worker before the run fails with exit code 4; also attempts at an episode that kills it."""
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
    trust: bool = False
    """The config of the run that is resumed or whose weights are used may name code (package.module:attr) and servers;
    counts only where it is typed."""
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
    reward: RewardConfig = field(default_factory=RewardConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    video_cfg: VideoConfig = field(default_factory=VideoConfig)
