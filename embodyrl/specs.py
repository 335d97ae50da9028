"""Declarations of environments and policies, which the run plan joins before any worker starts."""

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
    """The receiver uses the sign only; the sender's value is snapped to `open` or `closed`."""


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
    """Real numbers."""
    discrete = "discrete"
    """One category id."""
    multi_discrete = "multi_discrete"
    """One category id per dimension."""
    text = "text"
    """Tokens that only the policy can read (-1: none); the text of the reply is a separate field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpec:
    """Actions [A] of an environment, passed as float32 for every kind."""

    dim: int
    """A: numbers of an action."""
    kind: ActionKind = ActionKind.box
    sizes: tuple[int, ...] = ()
    """Number of categories of each dimension, ids from 0; empty for `box`."""
    low: tuple[float, ...] = ()
    """`box`: smallest value of each dimension, maybe -inf; empty: -1."""
    high: tuple[float, ...] = ()
    """`box`: largest value of each dimension, maybe inf; empty: 1."""
    gripper: GripperConvention | None = None

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Smallest and largest number of each dimension, for every kind."""
        if self.kind is ActionKind.box:
            return self.low or (-1.0,) * self.dim, self.high or (1.0,) * self.dim
        return (0.0,) * len(self.sizes), tuple(size - 1.0 for size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraSpec:
    """Camera images of an observation [C, H, W, 3]."""

    names: tuple[str, ...] = ()
    """In the order of the image axis C."""
    size: tuple[int, int] = (0, 0)
    """Height and width, pixels."""
    grey: bool = False
    """The three colour channels are equal."""
    rotation_deg: int = 0
    """Rotation (0 or 180) that brings a stored frame to the orientation of the benchmark's public datasets."""
    needed: bool = False
    """The state does not describe the scene without images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSpec:
    """Columns of the state that contain goals, where a `GoalFactory` can compute rewards of other goals."""

    achieved: tuple[int, int]
    """First column, and one past the last."""
    desired: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Scripted expert of an environment."""

    tasks: tuple[int, ...] = ()
    """Task ids that it solves."""
    reacts: bool = True
    """Acts on the present state; false: follows a fixed plan, so it cannot label another policy's actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Rewards of an environment."""

    components: tuple[str, ...] = ()
    """Names of the terms that are logged separately."""
    weights: tuple[float, ...] = ()
    """Weight of each term in the reward."""
    cameras: int = 0
    """Number of cameras, from the first, that the reward reads; independent of the policy's cameras."""
    factor: float = 1.0
    """Factor of every reward for learning; reported returns are divided by it."""
    reports_success: bool = True
    """False: no step reports success, so the return is the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """Instructions and conversations of an environment."""

    instructed: bool = True
    """False: the environment has no instructions, and `EnvSpec.tasks` are names."""
    prompt_bytes: int = 0
    """UTF-8 bytes of the longest instruction; 0: the longest of `EnvSpec.tasks`."""
    roles: tuple[tuple[str, ...], ...] = ()
    """Sequences of roles of the conversations of a run."""
    max_replies: int = 0
    """Replies (chunks) of the longest conversation; 0: env steps are limited instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSpec:
    """Execution properties of the simulators of an env worker."""

    lockstep: bool = False
    """The slots of a worker are one batched simulator, which steps all slots in one call."""
    on_gpu: bool | None = None
    """Env workers compute or render on a GPU; None: unknown, so a GPU is visible to each."""
    renders: bool = True
    """The environment can render frames for recordings and `embodyrl play`."""
    may_truncate: bool = False
    """The environment may truncate an episode itself, at any step; false: only the run's time limit does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec:
    """Properties of a published benchmark."""

    suites: tuple[str, ...] = ()
    """Suite of each task where evaluations cover several, all with the tasks of the first, the training suite."""
    held_out: int = 0
    """Number of initial states, from the last of each task, for evaluation, unless `state_ids` selects others."""
    unnorm_key: str | None = None
    """Key of the public statistics (`dataset_statistics.json`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """Declaration of an environment; joined with a `PolicySpec` before any worker starts."""

    name: str
    action: ActionSpec
    tasks: tuple[str, ...]
    """Language instruction of each task id."""
    states_per_task: tuple[int, ...]
    """Number of fixed initial states of each task; reset ids count through them task by task."""
    instructions: tuple[str, ...] = ()
    """Instruction of each reset id, where initial states of a task have different ones."""
    seeded_tasks: tuple[int, ...] = ()
    """Tasks whose episodes depend on their seed too; of other tasks, the reset id determines the episode."""
    cameras: CameraSpec = CameraSpec()
    state_dim: int = 0
    goal: GoalSpec | None = None
    expert: ExpertSpec = ExpertSpec()
    reward: RewardSpec = RewardSpec()
    text: TextSpec = TextSpec()
    simulator: SimulatorSpec = SimulatorSpec()
    benchmark: BenchmarkSpec = BenchmarkSpec()
    max_episode_steps: int = 0
    """The benchmark's own horizon, env steps."""
    doubts: tuple[str, ...] = field(default=(), compare=False)
    """Warnings of the banner, a line each; they may quote observations, so equal specs may have different ones."""

    def suite_of(self, task_id: int) -> str:
        """Return the name of a task's suite."""
        return self.benchmark.suites[task_id] if self.benchmark.suites else self.name

    @property
    def num_reset_ids(self) -> int:
        """Number of initial states of all tasks."""
        return sum(self.states_per_task)

    def task_of(self, reset_id: int) -> tuple[int, int]:
        """Split a reset id into (task id, initial state index)."""
        rest = int(reset_id)
        for task, count in enumerate(self.states_per_task):
            if 0 <= rest < count:
                return task, rest
            rest -= count
        raise ValueError(f"reset id {reset_id} is outside 0..{self.num_reset_ids - 1} of env '{self.name}'.")

    def reset_ids_of(self, task_id: int) -> range:
        """Return all reset ids of one task."""
        if not 0 <= task_id < len(self.tasks):
            raise ValueError(f"task id {task_id} is outside 0..{len(self.tasks) - 1} of env '{self.name}'.")
        return range(start := sum(self.states_per_task[:task_id]), start + self.states_per_task[task_id])


def picture_names(count: int) -> tuple[str, ...]:
    """Return the camera names of an environment whose prompts contain images."""
    return tuple(f"image_{i}" for i in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Parts of an observation that a policy reads."""

    num_images: int = 0
    """Camera images, from the first."""
    state: bool = False
    instructions: bool = False
    rotates_images: bool = False
    """The policy rotates frames by `CameraSpec.rotation_deg` before it reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeringSpec:
    """Training of a small actor that steers frozen weights."""

    key: str
    """Key and value that freeze the weights."""
    corrects: bool
    """The actor corrects actions, which demonstrations contain too; false: it chooses noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Declaration of a policy: its inputs, its outputs and its training options."""

    name: str
    num_action_chunks: int
    """K: actions of a chunk."""
    action_dim: int
    """A: numbers of an action."""
    tokens_per_chunk: int
    """L: sampled tokens of a chunk (K*A for discrete OpenVLA-OFT)."""
    scored: int = 0
    """P: log-probabilities of an action, where it has more tokens than these; 0: one of each token."""
    imitated: int = 0
    """H: actions of a chunk in SFT, where they are more than it executes; 0: K."""
    reply_bytes: int = 0
    """UTF-8 bytes that are kept of a chunk's text; 0: it has none."""
    value_dim: int = 0
    """V: 0 without a value head, 1 (chunk level) or K (action level)."""
    inputs: InputSpec = InputSpec()
    gripper: GripperConvention | None = None

    action_kinds: frozenset[ActionKind] = frozenset({ActionKind.box})
    """Kinds of action spaces that it can act in."""
    untrainable: str = ""
    """Why RL cannot train it; empty: it can, for its actions are sampled with probabilities."""
    scripted: bool = False
    """The environment's own expert chooses the actions, step by step; the policy only requests that."""
    takes_noise: bool = True
    """Sampling differs from acting greedily."""
    differentiable: bool = False
    """Sampled actions are a differentiable function of the weights (`policies.protocol.SoftActor`)."""
    steering: SteeringSpec | None = None
    rates: bool = False
    """A trained value head of this policy is a reward model for `reward.path`."""
    doubts: tuple[str, ...] = ()
    """Warnings of the banner, a line each: settings that work, but may not be meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCosts:
    """Estimated memory and time of an environment; zeros where unknown or negligible."""

    task_bytes: int = 0
    """Memory of a loaded task, where a worker can hold only some of them; 0: negligible."""
    gpu_bytes: tuple[int, int] = (0, 0)
    """GPU memory of an env worker: fixed, and per slot (with `task_bytes` per task)."""
    chunk_s: float = 0.0
    """Core seconds of a chunk of 8 actions with rendering; 0: unknown or negligible."""
    chunk_name: str = ""
    """Name under which `embodyrl doctor --gpu` measures that time; empty: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCosts:
    """Estimated size, memory and work of a policy; zeros where unknown."""

    num_parameters: int = 0
    num_trained: int | None = None
    """Parameters, additional to them, that training changes (adapters); None: it changes all of them."""
    activation_bytes: int = 0
    """Bytes that the forward pass of a sample keeps for its backward pass."""
    recomputed_bytes: int = 0
    """The same with actor.gradient_checkpointing: the inputs of all layers."""
    largest_layer: tuple[int, int] = (0, 0)
    """Largest repeated layer: parameters, and bytes that its recomputation keeps for a sample."""
    outside_layers: int = 0
    """Parameters outside the repeated layers: embeddings, output matrix, projectors."""
    scoring_bytes: tuple[int, int] = (0, 0)
    """Bytes of log-probabilities, independent of the batch: logits of a vocabulary; the same with recomputed layers."""
    acting_bytes: int = 0
    """Bytes of acting per sample of a batch: the widest layer, or keys and values of replies."""
    sample_tokens: int = 1
    """Tokens of the longest sample, as `Record.cost` counts them."""
    forward_flops: float = 0.0
    """FLOPs of the forward pass of a sample."""
    act_passes: int = 1
    """Forward passes, each of which reads all weights, for a batch of chunks."""
    steering_features: int = 0
    """F: numbers that the replay buffer keeps of an observation where frozen weights are steered."""
