"""Config keys for the training loop, loggers, rollouts, evaluation and checkpoints."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from embodyrl.config.settings import Constraint, Count, CountOrAll, Name, Path, Positive, Settings, Share, valid_if

RolloutMode = StrEnum("RolloutMode", ["collocated", "disaggregated"])
OnExisting = StrEnum("OnExisting", ["error", "resume", "rename"])
OnSaveError = StrEnum("OnSaveError", ["continue", "stop"])
KeptEpisodes = StrEnum("KeptEpisodes", ["none", "all", "failures", "successes"])

VideoChoice = Annotated[
    str,
    Field(pattern=r"^(none|failures|all|(first|changed):[1-9]\d{0,5})$"),
    Constraint("one of none, failures, first:N, changed:N, all"),
]


_DISTINCT = valid_if(lambda names: len(set(names)) == len(names))


class LoggerSettings(Settings):
    """Config keys for metric loggers."""

    backends: Annotated[
        list[str], _DISTINCT, Constraint("a list of different names, for example [console,jsonl,wandb]")
    ] = [
        "console",
        "jsonl",
        "tensorboard",
    ]
    """Metric loggers: console, jsonl, tensorboard, wandb, swanlab, mlflow, trackio, or package.module:attr."""
    project_name: Name = "embodyrl"
    """Project name for hosted loggers."""
    offline: bool = False
    """Hosted loggers (wandb, swanlab, mlflow) write local files and contact no server. trackio always writes local
    files."""


class RunnerSettings(Settings):
    """Config keys for the training loop: output folder, run length, and intervals of validations and checkpoints."""

    keys_by_condition = {"experiment_name": "on_existing", "keep_episodes!=none": "keep_episodes_gb"}

    output_dir: Path = "runs"
    """Parent folder of the run folders: a run writes to <output_dir>/<id>/."""
    experiment_name: Name | None = None
    """Name of the run folder; default: time, command, and environment or data set."""
    on_existing: OnExisting = OnExisting.error
    """Action when the run folder exists: error, resume (continue the run), or rename (choose a new name)."""
    max_steps: Count = 100
    """Number of training steps."""
    max_epochs: CountOrAll = -1
    """Maximum number of passes over the initial states of training (SFT: over the samples); -1: no limit."""
    only_eval: bool = False
    """Only evaluate `ckpt` (or the model's own weights), as `embodyrl eval` does."""
    val_check_interval: CountOrAll = -1
    """Number of training steps between validations, which also run before the first and after the last step; -1: no
    validation."""
    val_suites: Annotated[list[str], _DISTINCT, Constraint("a list of different names")] = []
    """Additional suites for evaluations and validations, as a list, or [all]. LIBERO: base, object, swap, lan, task,
    camera, robot, noise, language. Tabletop: colors, positions, phrasings."""
    save_interval: CountOrAll = 50
    """Number of training steps between checkpoints; the last step, and a step after five minutes without a checkpoint,
    are also saved. -1: only the last step."""
    resume_dir: Path | None = None
    """Folder of the run to resume, or `auto` for the newest run of this experiment."""
    keep_episodes: KeptEpisodes = KeptEpisodes.none
    """Episodes of training or evaluation to keep as a data set in <run>/episodes: none, all, failures or successes."""
    keep_episodes_gb: Positive = 10.0
    """Maximum total size of the kept episodes in GB; later episodes are not kept."""
    deterministic: bool = False
    """Produce bit-for-bit equal results for the same seed and any number of workers. Inference batches are padded."""
    trace: bool = False
    """Write a timeline of the processes to <run>/logs/attempt_<n>/trace.json, for ui.perfetto.dev or chrome://tracing."""
    profile: Count | None = None
    """Training step, counted from the start of the process, whose Python functions and torch operators are recorded;
    implies runner.trace=true. Not available with launcher=ray."""
    logger: LoggerSettings = LoggerSettings()


class VllmSettings(Settings):
    """Arguments of the vLLM engine started by `rollout.backend=vllm`; null: default of embodyrl or of vLLM."""

    gpu_memory_utilization: Share | None = None
    """Fraction of GPU memory for vLLM; default: the memory that the rest of the run does not need."""
    max_model_len: Count | None = None
    """Maximum number of tokens of prompt and reply together; default: the model's limit."""
    max_num_seqs: Count | None = None
    """Maximum number of concurrent sequences."""
    max_num_batched_tokens: Count | None = None
    """Maximum number of tokens per forward pass."""
    enable_prefix_caching: bool | None = None
    """Cache the keys and values of common prompt prefixes."""
    enable_chunked_prefill: bool | None = None
    """Split the prefill of long prompts into chunks and interleave them with decoding."""
    enforce_eager: bool | None = None
    """Disable CUDA graphs, which saves memory at the cost of speed."""
    enable_sleep_mode: bool | None = None
    """Free the engine's GPU memory during updates; default: on if the KV cache of all environments and training do not
    fit together."""

    tensor_parallel_size: Annotated[Literal[1], Constraint("1; more needs rollout.backend=server")] | None = None
    """Number of GPUs per model: 1, because the engine runs inside a process with one GPU; for more, use
    rollout.backend=server and `vllm serve --tensor-parallel-size`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the vLLM engine that are set, by name."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class RolloutSettings(Settings):
    """Config keys for inference during rollouts."""

    keys_by_condition = {
        "backend=vllm": " ".join(f"vllm.{name}" for name in VllmSettings.model_fields),
        "backend=server": "url served_model",
        "mode=disaggregated": "num_workers",
    }

    mode: RolloutMode = RolloutMode.collocated
    """Processes of rollouts. collocated: the training processes, with the same weights. disaggregated: separate
    processes, which receive new weights between two chunks."""
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of rollout processes with rollout.mode=disaggregated."""
    backend: Literal["hf", "vllm", "server"] = "hf"
    """Inference engine: hf (the policy's own module), or for language models vllm or server (an OpenAI-style
    completions server)."""
    url: (
        Annotated[str, Field(pattern=r"^https?://\S+$"), Constraint("an address such as http://host:8000/v1")] | None
    ) = None
    """With rollout.backend=server: URL of the completions server, including /v1."""
    served_model: str | None = None
    """With rollout.backend=server: model name on the server; default: the server's first model."""
    vllm: VllmSettings = VllmSettings()
    logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Language models: for each token of a reply, also record the n most probable tokens with their
    log-probabilities."""
    pipeline_stage_num: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of stages into which each env worker's environments are divided, to overlap simulation and inference."""

    @property
    def processes(self) -> int:
        """Number of processes that only run inference for rollouts; 0: training processes also run inference."""
        return self.num_workers if self.mode is RolloutMode.disaggregated else 0

    def problems(self) -> Iterator[str]:
        """Yield an error if the backend is a server without a URL."""
        yield from super().problems()
        if self.backend == "server" and self.url is None:
            yield "rollout.backend=server needs a URL, for example rollout.url=http://127.0.0.1:8000/v1."


class EvalSamplingSettings(Settings):
    """Config keys for action sampling in evaluations and recordings."""

    do_sample: bool = False
    """Sample actions in evaluations; false: choose greedy actions."""
    temperature: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Sampling temperature of evaluations; default: the training temperature."""


class ProtocolSettings(Settings):
    """A published evaluation protocol, as defined by the files of conf/eval."""

    name: Name | None = None
    """Name of the evaluation protocol in results."""
    settings: list[str] = []
    """Settings of the protocol as key=value; values from the command line override them, and the result lists the
    differences."""
    horizons: dict[str, int] = {}
    """Time limit in env steps by environment or suite; other environments and suites are rejected."""
    departures: list[str] = []
    """Known differences between evaluations by embodyrl and the published protocol."""
    sources: list[str] = []
    """Papers or repositories from which the values of the protocol are taken."""
    settled: bool = False
    """Internal: True after the settings of the protocol are applied."""

    def horizon(self, env: str) -> int | None:
        """Return the time limit in env steps of the longest prefix of an environment's name; None: not covered."""
        matches = [name for name in self.horizons if env == name or env.startswith(f"{name}_")]
        return self.horizons[max(matches, key=len)] if matches else None


class EvalSettings(Settings):
    """Config keys for evaluation episodes and their action sampling."""

    keys_by_condition = {
        "episodes=null or protocol.name": "episodes_per_task",
        "sampling_params.do_sample": "samples sampling_params.temperature",
    }

    episodes: Annotated[int, Field(ge=1, le=10**7)] | None = None
    """Total number of evaluation episodes; overrides episodes_per_task."""
    episodes_per_task: Count = 10
    """Number of evaluation episodes per task."""
    protocol: ProtocolSettings = ProtocolSettings()
    samples: Count = 1
    """Number of sampled episodes per initial state. Above 1, eval/pass_at_n is the fraction of initial states with a
    success."""
    show_replies: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of conversations to print after each evaluation of a language model."""
    sampling_params: EvalSamplingSettings = EvalSamplingSettings()


class CheckpointSettings(Settings):
    """Config keys for checkpoint retention."""

    keep: Count = 3
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation success (sft: the lowest validation loss)."""
    async_save: bool = False
    """Finish checkpoints in the background: once the files are written, training continues during hashing, syncing and
    renaming."""
    on_error: OnSaveError = OnSaveError["continue"]
    """Action when an intermediate checkpoint cannot be written (full disk): continue with a warning, or stop."""
