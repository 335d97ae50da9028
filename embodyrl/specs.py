"""Specs of environments and policies, which the run plan compares before a worker starts."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class GripperConvention:
    """Gripper convention: the value that opens, the value that closes, and the index in the action."""

    open: float
    closed: float
    index: int = -1
    binary: bool = False
    """True if only the sign of the value has an effect; values are then rounded to `open` or `closed`."""


def convert_gripper(
    actions: npt.NDArray[np.float32], source: GripperConvention | None, target: GripperConvention | None
) -> None:
    """Convert the gripper dimension of actions [..., A] in place from the policy's to the environment's convention."""
    if source is None or target is None:
        return
    openness = (actions[..., source.index] - source.closed) / (source.open - source.closed)
    if target.binary:
        openness = (openness > 0.5).astype(actions.dtype)
    actions[..., target.index] = target.closed + openness * (target.open - target.closed)


class ActionKind(StrEnum):
    """Kind of an action space."""

    box = "box"
    """One real number per dimension."""
    discrete = "discrete"
    """One category id."""
    multi_discrete = "multi_discrete"
    """One category id per dimension."""
    text = "text"
    """Token ids of the policy's tokenizer (-1: padding); the text of the reply is a separate record field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Key or gamepad input with which a person sets one dimension of an action."""

    label: str
    index: int
    """Index of the action dimension that the input sets; 0 if actions are categories."""
    value: float
    """Value of the dimension while the input is fully pressed."""
    key: str = ""
    """Keyboard key as a browser's `KeyboardEvent.code`, for example ArrowLeft."""
    pad: str = ""
    """Gamepad input in the standard mapping: a button (button3), or an axis and its direction (axis0-, axis0+)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpec:
    """Action space of an environment. Actions [A] are float32 for every kind of space."""

    dim: int
    """A: number of action dimensions."""
    kind: ActionKind = ActionKind.box
    sizes: tuple[int, ...] = ()
    """Number of categories of each dimension, ids from 0; empty for `box`."""
    low: tuple[float, ...] = ()
    """`box`: minimum of each dimension, possibly -inf; empty: -1."""
    high: tuple[float, ...] = ()
    """`box`: maximum of each dimension, possibly inf; empty: 1."""
    gripper: GripperConvention | None = None
    controls: tuple[Control, ...] | None = field(default=None, compare=False)
    """Key and gamepad inputs; None: default keys; empty: a person cannot control the environment."""
    neutral: tuple[float, ...] = field(default=(), compare=False)
    """Action while no key is pressed; empty: zeros, or the nearest bound. The gripper keeps its last command."""

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Minimum and maximum of each action dimension."""
        if self.kind is ActionKind.box:
            return self.low or (-1.0,) * self.dim, self.high or (1.0,) * self.dim
        return (0.0,) * len(self.sizes), tuple(size - 1.0 for size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraSpec:
    """Camera images of an observation [C, H, W, 3]."""

    names: tuple[str, ...] = ()
    """Camera names in the order of the image axis C."""
    size: tuple[int, int] = (0, 0)
    """Height and width, pixels."""
    grey: bool = False
    """True if the three color channels are equal."""
    rotation_deg: int = 0
    """Rotation (0 or 180) that brings a stored frame to the orientation of the benchmark's published datasets."""
    needed: bool = False
    """True if the state vector does not describe the scene, so that a policy needs images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSpec:
    """State columns of achieved and desired goals, for environments that can compute rewards for relabeled goals."""

    achieved: tuple[int, int]
    """State columns of the achieved goal: first column, and one past the last."""
    desired: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Scripted expert of an environment."""

    tasks: tuple[int, ...] = ()
    """Ids of the tasks that the expert solves."""
    reacts: bool = True
    """True if the expert acts on the current state; False: it follows a fixed plan and cannot label other states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Rewards of an environment."""

    components: tuple[str, ...] = ()
    """Names of the reward components, which are logged separately."""
    weights: tuple[float, ...] = ()
    """Weight of each component in the reward."""
    cameras: int = 0
    """Number of cameras that the reward uses, counted from the first; independent of the policy's cameras."""
    factor: float = 1.0
    """Factor that multiplies every reward in training; reported returns are divided by this factor."""
    reports_success: bool = True
    """True if the environment reports success; False: evaluations report the return instead."""
    success: str = "from the environment"
    """Source of success for the banner, for example "info['is_success']"; or "unknown", with the keys of info."""
    dense: bool = False
    """True if steps without success earn a positive reward, so that a policy may earn more if it avoids success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """Instructions and conversations of an environment."""

    instructed: bool = True
    """True if `EnvSpec.tasks` contains language instructions; False if it contains only task names."""
    prompt_bytes: int = 0
    """Number of UTF-8 bytes of the longest instruction; 0: the longest instruction in `EnvSpec.tasks`."""
    prompt_tokens: int = 0
    """Number of tokens of the longest instruction, without earlier replies; 0: estimated from `prompt_bytes`."""
    roles: tuple[tuple[str, ...], ...] = ()
    """Role sequences that occur in the run's conversations, for example (system, user)."""
    max_replies: int = 0
    """Maximum number of replies (chunks) per conversation; 0: the limit applies to env steps, not replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSpec:
    """Execution properties of the simulators of an env worker."""

    lockstep: bool = False
    """True if the environments of a worker are one batched simulator, which steps all environments in one call."""
    on_gpu: bool | None = None
    """True if env workers compute or render on a GPU; None: unknown, so each worker has a visible GPU."""
    renders: bool = True
    """True if the environment can render frames for recordings and `embodyrl play`."""
    saves_state: bool = False
    """True if the state of an environment can be saved and loaded (`Simulators.save`)."""
    may_truncate: bool = False
    """True if the environment may truncate an episode at any step; False: only the run's time limit truncates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec:
    """Properties of a published benchmark."""

    suites: tuple[str, ...] = ()
    """Suite of each task in evaluations of several suites: first the training suite, then its variants."""
    held_out: int = 0
    """Number of the last initial states of each task that are held out for evaluation, unless `state_ids` is set."""
    unnorm_key: str | None = None
    """Key of the action statistics in the published `dataset_statistics.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """Declaration of an environment; checked against the `PolicySpec` before any worker starts."""

    name: str
    action: ActionSpec
    tasks: tuple[str, ...]
    """Language instruction of each task id."""
    states_per_task: tuple[int, ...]
    """Number of fixed initial states of each task. A reset id is the index of a state over all tasks."""
    instructions: tuple[str, ...] = ()
    """Instruction of each reset id, if initial states of a task have different instructions."""
    seeded_tasks: tuple[int, ...] = ()
    """Tasks whose episodes also depend on the seed; for other tasks, the reset id determines the episode."""
    cameras: CameraSpec = CameraSpec()
    state_dim: int = 0
    history: int = 1
    """Number of observation steps in the images and the state, oldest first."""
    goal: GoalSpec | None = None
    expert: ExpertSpec = ExpertSpec()
    reward: RewardSpec = RewardSpec()
    text: TextSpec = TextSpec()
    simulator: SimulatorSpec = SimulatorSpec()
    benchmark: BenchmarkSpec = BenchmarkSpec()
    max_episode_steps: int = 0
    """Time limit of the benchmark in env steps."""
    longest_demonstration: int = field(default=0, compare=False)
    """Number of env steps of the longest demonstration in SFT; 0: unknown."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Warnings for the banner, one line each; excluded from comparisons, because they may quote observations."""

    def get_suite(self, task_id: int) -> str:
        """Return the name of a task's suite."""
        return self.benchmark.suites[task_id] if self.benchmark.suites else self.name

    @property
    def limits_replies(self) -> bool:
        """True if truncation means that a reply reached the token limit; False: the environment has another limit."""
        return self.action.kind is ActionKind.text and not self.simulator.may_truncate

    @property
    def num_reset_ids(self) -> int:
        """Number of initial states of all tasks."""
        return sum(self.states_per_task)

    def task_of(self, reset_id: int) -> tuple[int, int]:
        """Split a reset id into (task id, initial state index)."""
        index = int(reset_id)
        for task, count in enumerate(self.states_per_task):
            if 0 <= index < count:
                return task, index
            index -= count
        raise ValueError(f"reset_id={reset_id}: env '{self.name}' has only reset ids 0 to {self.num_reset_ids - 1}.")

    def get_reset_ids(self, task_id: int) -> range:
        """Return all reset ids of one task."""
        if not 0 <= task_id < len(self.tasks):
            raise ValueError(f"task_id={task_id}: env '{self.name}' has only tasks 0 to {len(self.tasks) - 1}.")
        return range(start := sum(self.states_per_task[:task_id]), start + self.states_per_task[task_id])


def image_names(count: int) -> tuple[str, ...]:
    """Return the camera names for `count` images in a prompt: image_0, image_1, ..."""
    return tuple(f"image_{index}" for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Fields of an observation that a policy uses."""

    num_images: int = 0
    """Number of camera images that the policy uses, counted from the first camera."""
    state: bool = False
    instructions: bool = False
    rotates_images: bool = False
    """True if the policy rotates frames by `CameraSpec.rotation_deg`."""
    resized: int = 0
    """Side in pixels of the square images that `resize` of the policy returns; 0: the policy has no such method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeringSpec:
    """Training of a small actor network that steers a policy with frozen weights."""

    key: str
    """Config setting, key=value, that freezes the policy's weights."""
    is_residual: bool
    """True if the actor corrects actions, so that it can learn from demonstrations; False: the actor chooses noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Declaration of a policy: its inputs, its outputs and its training options."""

    name: str
    num_action_chunks: int
    """K: number of actions per chunk."""
    action_dim: int
    """A: number of action dimensions."""
    tokens_per_chunk: int
    """L: number of sampled tokens per chunk (K*A for discrete OpenVLA-OFT)."""
    scored: int = 0
    """P: number of log-probabilities per action (dimensions with constant statistics have none); 0: one per token."""
    imitated: int = 0
    """H: number of actions per chunk in SFT, if larger than K; 0: SFT uses K actions."""
    reply_bytes: int = 0
    """Maximum number of UTF-8 bytes of a chunk's text; 0: the policy outputs no text."""
    value_dim: int = 0
    """V: number of values per chunk: 0 (no value head), 1 (chunk level) or K (action level)."""
    inputs: InputSpec = InputSpec()
    observed_steps: int = 1
    """Number of observation steps that the policy reads, see `EnvSpec.history`; 0: any number."""
    gripper: GripperConvention | None = None
    action_kinds: frozenset[ActionKind] = frozenset({ActionKind.box})
    """Kinds of supported action spaces."""
    untrainable: str = ""
    """Reason why RL cannot train the policy; empty: RL is supported."""
    scripted: bool = False
    """True if the environment's scripted expert chooses the actions, step by step."""
    is_stochastic: bool = True
    """True if sampled actions differ from greedy actions."""
    differentiable: bool = False
    """True if sampled actions are a differentiable function of the weights (`SoftActor`)."""
    regresses: bool = False
    """True if greedy actions are a differentiable function of the weights (`RegressionActor`)."""
    steering: SteeringSpec | None = None
    can_be_reward_model: bool = False
    """True if a trained value head of this policy can be used as a reward model (`reward.path`)."""
    warnings: tuple[str, ...] = ()
    """Warnings for the banner about valid but possibly unintended settings, one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCosts:
    """Estimated memory and time that an environment needs; 0: unknown or negligible."""

    task_bytes: int = 0
    """Upper estimate of the bytes per loaded task, which limits the number of loaded tasks; 0: negligible."""
    host_bytes: tuple[int, int] = (0, 0)
    """Memory of an env worker in bytes, in addition to its process: fixed, and per environment (with `task_bytes`: per
    task)."""
    gpu_bytes: tuple[int, int] = (0, 0)
    """GPU memory of an env worker in bytes: fixed, and per environment (with `task_bytes`: per task)."""
    chunk_s: float = 0.0
    """CPU seconds for simulating and rendering a chunk of 8 actions; 0: unknown or negligible."""
    gpu_s: float = 0.0
    """Seconds per chunk in which rendering occupies the GPU; processes that share the GPU render in turn."""
    chunk_name: str = ""
    """Name under which `tools/gpu_check` stores the measured chunk time; empty: the time is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCosts:
    """Estimated number of parameters, memory and compute of a policy; 0: unknown."""

    SHARED_FRACTION = 0.5
    """Equal prompts are computed once, in a separate pass, if deduplication leaves at most this fraction of tokens."""
    MAPPED_BYTES = 2**22
    """On CPUs, malloc returns freed tensors of a language model to the system if they have at least this size."""
    FRAGMENTED_FRACTION = 0.8
    """Additional memory per byte of smaller tensors, which malloc does not reuse completely (measured: 0.7 to 0.9)."""
    num_parameters: int = 0
    num_trained: int | None = None
    """Number of additional trained parameters (adapters); None: all parameters are trained."""
    activation_bytes: int = 0
    """Number of bytes that the forward pass of a sample stores for the backward pass."""
    shared_bytes: tuple[int, int] = (0, 0)
    """Bytes per sample and per distinct prompt if equal prompts are computed only once; (0, 0): not supported."""
    tensor_fractions: tuple[tuple[int, float], ...] = ()
    """Models that return large blocks to the system on CPUs (`MAPPED_BYTES`): (bytes per token of a tensor, fraction of
    the activations in tensors of this size)."""
    recomputed_bytes: int = 0
    """Bytes stored with actor.gradient_checkpointing: the inputs of all layers."""
    largest_layer: tuple[int, int] = (0, 0)
    """Largest repeated layer: number of parameters, and bytes per sample that its recomputation stores."""
    outside_layers: int = 0
    """Number of parameters outside the repeated layers: embeddings, output matrix, projectors."""
    logit_bytes: tuple[int, int] = (0, 0)
    """Bytes of the logits that log-probabilities need: per sample, and the maximum held at once."""
    output_gradient_bytes: tuple[int, int] = (0, 0)
    """Bytes of the gradient of the output matrix for log-probabilities: (without, with) gradient checkpointing."""
    inference_bytes: int = 0
    """Bytes per sample of an inference batch: activations of the widest layer, or the KV cache of replies."""
    sample_tokens: int = 1
    """Number of tokens of the longest sample, as in `Record.cost`."""
    reply_tokens: int = 1
    """Number of tokens after the prompt in the longest sample."""
    forward_flops: float = 0.0
    """FLOPs of the forward pass of one sample."""
    act_passes: int = 1
    """Number of forward passes per batch of chunks; each pass reads all weights."""
    steering_features: int = 0
    """F: number of features per observation in the replay buffer, if frozen weights are steered."""

    def estimate_activation_bytes(self, samples: float, prompts: float) -> int:
        """Return the bytes of activations that `samples` samples with `prompts` distinct prompts store for backward.

        The samples have replies of full length. If the longest prompts are computed once each, shorter prompts may not
        be, and may need more memory: the maximum is returned.
        """
        if not self._shares_prompts(samples, prompts):
            return int(samples * self.activation_bytes)
        # Number of tokens of the longest prompts whose sharing leaves more than SHARED_FRACTION of the tokens.
        repeated = self.SHARED_FRACTION * samples - prompts
        width = samples * ((1 - self.SHARED_FRACTION) * self.reply_tokens - 1) / repeated if repeated > 0 else 0.0
        separate = samples * self.activation_bytes * (max(0.0, width) + self.reply_tokens) / self.sample_tokens
        sample_bytes, prompt_bytes = self.shared_bytes
        return int(max(samples * sample_bytes + prompts * prompt_bytes, separate))

    def estimate_fragmented_bytes(self, samples: float, prompts: float) -> int:
        """Return the bytes between activation tensors that malloc cannot reuse (heap fragmentation on CPUs)."""
        tokens = samples * (self.reply_tokens - 1 if self._shares_prompts(samples, prompts) else self.sample_tokens)
        sizes = self.tensor_fractions or ((0, 1.0),)
        small = sum(fraction for size, fraction in sizes if tokens * size < self.MAPPED_BYTES)
        return int(self.FRAGMENTED_FRACTION * small * self.estimate_activation_bytes(samples, prompts))

    def _shares_prompts(self, samples: float, prompts: float) -> bool:
        remaining_tokens = prompts * (self.sample_tokens - self.reply_tokens) + samples * (self.reply_tokens - 1)
        return bool(self.shared_bytes[0]) and remaining_tokens <= self.SHARED_FRACTION * samples * self.sample_tokens

    def estimate_logprob_bytes(self, samples: float) -> tuple[int, int]:
        """Return the bytes for log-probabilities and their output-matrix gradient: (without, with) checkpointing."""
        sample_bytes, max_bytes = self.logit_bytes
        without_checkpointing, with_checkpointing = (
            max(min(int(samples * sample_bytes), max_bytes) + matrix, 2 * matrix)
            for matrix in self.output_gradient_bytes
        )
        return without_checkpointing, with_checkpointing
