"""Config keys for the training loop: run length, processes, and responses to failures."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from embodyrl.config.settings import Count, CountOrAll, Must, Name, Path, Positive, Settings, Share, only

RolloutMode = StrEnum("RolloutMode", ["collocated", "disaggregated"])
OnExisting = StrEnum("OnExisting", ["error", "resume", "rename"])
OnSaveError = StrEnum("OnSaveError", ["continue", "stop"])
KeptEpisodes = StrEnum("KeptEpisodes", ["none", "all", "failures", "successes"])

VideoChoice = Annotated[
    str,
    Field(pattern=r"^(none|failures|all|(first|changed):[1-9]\d{0,5})$"),
    Must("one of none, failures, first:N, changed:N, all"),
]


_DIFFERENT = only(lambda names: len(set(names)) == len(names))


class LoggerSettings(Settings):
    """Config keys for metric loggers."""

    backends: Annotated[list[str], _DIFFERENT, Must("a list of different names, for example [console,jsonl,wandb]")] = [
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

    needs = {"experiment_name": "on_existing", "keep_episodes!=none": "keep_episodes_gb"}

    output_dir: Path = "runs"
    """Parent folder; a run is <output_dir>/<id>/."""
    experiment_name: Name | None = None
    """Name of the run folder; default: time, environment, model and algorithm."""
    on_existing: OnExisting = OnExisting.error
    """If the run folder exists: error, resume the run, or rename the new run."""
    max_steps: Count = 100
    """Number of training steps."""
    max_epochs: CountOrAll = -1
    """Number of passes over the training reset ids; -1: no limit."""
    only_eval: bool = False
    """Evaluate `ckpt` (or the model's own weights) and stop."""
    val_check_interval: CountOrAll = -1
    """Number of training steps between validations; also before the first and after the last step; -1: never."""
    val_suites: Annotated[list[str], _DIFFERENT, Must("a list of different names")] = []
    """Suites to evaluate in addition to the chosen suite, in evaluations and validations:
    [object,swap,lan,task,camera,robot,noise,language] and base for LIBERO, [colours,positions,phrasings]
    for tabletop, or [all]."""
    save_interval: CountOrAll = 50
    """Number of training steps between checkpoints; the last step is always saved; -1: only the last."""
    resume_dir: Path | None = None
    """Run folder to continue, or `auto` for the newest run of this experiment."""
    keep_episodes: KeptEpisodes = KeptEpisodes.none
    """Episodes of training or evaluation to keep as a data set in <run>/episodes: none, all, failures or successes."""
    keep_episodes_gb: Positive = 10.0
    """Maximum size of the kept episodes in GB; later episodes are not kept."""
    deterministic: bool = False
    """Bit-for-bit equal results for the same seed and any number of workers; inference uses padded batches."""
    trace: bool = False
    """Write a timeline of the processes to <run>/logs/attempt_<n>/trace.json, for ui.perfetto.dev or chrome://tracing."""
    logger: LoggerSettings = LoggerSettings()


class VllmSettings(Settings):
    """Arguments of the vLLM engine started by `rollout.backend=vllm`; null: chosen by the plan or by vLLM."""

    gpu_memory_utilization: Share | None = None
    """Fraction of GPU memory for vLLM; default: the memory that the run plan leaves free."""
    max_model_len: Count | None = None
    """Maximum tokens of prompt and reply; default: the limit of the model."""
    max_num_seqs: Count | None = None
    """Maximum number of concurrent sequences."""
    max_num_batched_tokens: Count | None = None
    """Maximum tokens per forward pass."""
    enable_prefix_caching: bool | None = None
    """Cache the keys and values of common prompt prefixes."""
    enable_chunked_prefill: bool | None = None
    """Split the prefill of long prompts into chunks and interleave them with decoding."""
    enforce_eager: bool | None = None
    """Disable CUDA graphs, which needs less memory and is slower."""
    enable_sleep_mode: bool | None = None
    """Free the engine's GPU memory during updates; default: on if the KV cache of all slots and training do not fit
    together."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that are set, under vLLM's names."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class RolloutSettings(Settings):
    """Config keys for inference during rollouts."""

    needs = {
        "backend=vllm": " ".join(f"vllm.{name}" for name in VllmSettings.model_fields),
        "backend=server": "url served_model",
        "mode=disaggregated": "num_workers",
    }

    mode: RolloutMode = RolloutMode.collocated
    """collocated: rollout and actor share one process and one copy of the weights; disaggregated: separate rollout
    processes, which receive new weights between two chunks."""
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of rollout processes with rollout.mode=disaggregated."""
    backend: Literal["hf", "vllm", "server"] = "hf"
    """Inference engine: hf (the policy's own module), or for language models vllm or server (an OpenAI-style
    completions server)."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$"), Must("an address such as http://host:8000/v1")] | None = None
    """backend=server: URL of the completions server, with /v1."""
    served_model: str | None = None
    """backend=server: model name on the server; default: the server's first model."""
    vllm: VllmSettings = VllmSettings()
    logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Language models: for each token of a reply, also record the n most probable tokens with their
    log-probabilities."""
    chunk_overlap: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Number of actions at the end of a chunk that the next chunk replaces: the policy acts every
    model.num_action_chunks - chunk_overlap env steps; default: the largest env.control.latency_steps."""
    pipeline_stage_num: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of stages into which each env worker's slots are divided, to overlap simulation and inference."""

    @property
    def acting_processes(self) -> int:
        """Number of processes that only run inference for rollouts; 0: training processes also act."""
        return self.num_workers if self.mode is RolloutMode.disaggregated else 0

    def problems(self) -> Iterator[str]:
        """Yield an error for a server without an address."""
        yield from super().problems()
        if self.backend == "server" and self.url is None:
            yield "rollout.backend=server: rollout.url is not set; for example rollout.url=http://127.0.0.1:8000/v1."


class EvalSamplingSettings(Settings):
    """Config keys for action sampling in evaluations and recordings."""

    do_sample: bool = False
    """Sample actions; false: greedy actions."""
    temperature: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Temperature of sampled evaluation; default: the temperature of training."""


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


class EvalSettings(Settings):
    """Config keys for evaluation episodes and their action sampling."""

    needs = {
        "episodes=null or protocol.name": "episodes_per_task",
        "sampling_params.do_sample": "samples sampling_params.temperature",
    }

    episodes: Annotated[int, Field(ge=1, le=10**7)] | None = None
    """Total number of episodes; overrides episodes_per_task."""
    episodes_per_task: Count = 10
    """Number of episodes per task."""
    protocol: ProtocolSettings = ProtocolSettings()
    baseline: Path | None = None
    """Run folder of an earlier evaluation: common episodes are compared in pairs, suite by suite."""
    samples: Count = 1
    """Sampled episodes per initial state; above 1, eval/pass_at_n is the fraction of states with a success."""
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
    """Continue training once the files are written; hashing, syncing and renaming continue in the background."""
    on_error: OnSaveError = OnSaveError["continue"]
    """Response to a failed intermediate checkpoint (full disk): continue with a warning, or stop."""
