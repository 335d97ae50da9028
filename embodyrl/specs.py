"""Declarations of environments and policies before any worker starts; joined by `plan/run_plan.py`.

Their sizes (bytes, FLOPs and seconds) are used to plan a run's memory and throughput.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Declared size of a policy; 0: unknown."""

    num_parameters: int = 0
    num_trained: int | None = None
    """Trained parameters in addition (adapters); None: all parameters are trained."""
    activation_bytes: int = 0
    """Approximate bytes that one sample's forward pass stores for its backward pass."""
    recomputed_bytes: int = 0
    """The same with actor.gradient_checkpointing: the inputs of all layers."""
    largest_layer: tuple[int, int] = (0, 0)
    """Largest repeated layer: parameters, and bytes stored while it is recomputed for a sample."""
    outside_layers: int = 0
    """Parameters outside the repeated layers: embeddings, output matrix, projectors."""
    scoring_bytes: tuple[int, int] = (0, 0)
    """Bytes for scoring, independent of the number of samples: logits of a whole vocabulary; the same with recomputed
    layers."""
    acting_bytes: int = 0
    """Approximate bytes per sample for inference: the widest layer, or keys and values of replies."""
    sample_tokens: int = 1
    """Tokens of the longest sample, as in `Record.cost`."""
    forward_flops: float = 0.0
    """FLOPs of one sample's forward pass."""
    act_passes: int = 1
    """Forward passes for a batch of chunks, each of which reads all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFootprint:
    """Declared size of an environment; 0: unknown or negligible."""

    task_bytes: int = 0
    """Approximate memory of one loaded task, if a worker can hold only some of them; 0: negligible."""
    gpu_bytes: tuple[int, int] = (0, 0)
    """Approximate GPU memory of an env worker: fixed, and per slot (with `task_bytes` per task)."""
    chunk_s: float = 0.0
    """Approximate CPU seconds for a chunk of 8 actions with rendering; 0: unknown or negligible."""


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
    """Policy-specific token ids (-1: none); their text is stored separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpace:
    """Action space [A] of an environment. All actions are stored as float32."""

    kind: ActionKind
    sizes: tuple[int, ...] = ()
    """Number of categories of each dimension, ids from 0; empty for `box`."""
    low: tuple[float, ...] = ()
    """Lower bound of each dimension, possibly -inf; only for `box`."""
    high: tuple[float, ...] = ()
    """Upper bound of each dimension, possibly inf; only for `box`."""

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Smallest and largest number of each dimension, for all kinds."""
        return self.low or (0.0,) * len(self.sizes), self.high or tuple(size - 1.0 for size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec(EnvFootprint):
    """Declaration of an environment; joined with a `PolicySpec` before any worker starts."""

    name: str
    action_dim: int
    tasks: tuple[str, ...]
    """Language instruction of each task id."""
    instructed: bool = True
    """False: the environment has no instructions, and `tasks` are names."""
    states_per_task: tuple[int, ...]
    """Number of fixed initial states of each task; reset ids count through them task by task."""
    cameras: tuple[str, ...] = ()  # names, in the order of the image axis C
    image_size: tuple[int, int] = (0, 0)
    """Height and width of every camera image, pixels."""
    grey: bool = False  # the three colours of every camera image are equal
    image_rotation_deg: int = 0
    """Rotation (0 or 180) that brings a stored frame to the orientation of the public data sets of this benchmark."""
    state_dim: int = 0
    gripper: GripperConvention | None = None
    unnorm_key: str | None = None
    """Key of the public statistics of this benchmark (`dataset_statistics.json`)."""
    achieved_goal: tuple[int, int] = (0, 0)  # where in the state it lies: first column, and one past the last
    desired_goal: tuple[int, int] = (0, 0)
    """Like `achieved_goal`; (0, 0): rewards of other goals are unknown (`envs.protocol.GoalFactory`)."""
    max_episode_steps: int = 0  # the benchmark's own horizon, env steps
    expert_tasks: tuple[int, ...] = ()  # for which a scripted expert exists
    expert_reacts: bool = True  # reacts to the state, for any earlier actions; False: follows a plan
    action_space: ActionSpace | None = None  # None: real numbers, by convention within -1..1
    may_truncate: bool = False
    """The environment may truncate an episode itself, at any step; false: only the run's own time limit does."""
    lockstep: bool = False
    """The slots of a worker are one batched simulator, which steps all slots together."""
    doubts: tuple[str, ...] = field(default=(), compare=False)
    """Warnings for the banner, one line each; they may quote observations, so equal specs may differ here."""
    roles: tuple[tuple[str, ...], ...] = ()  # sequences of roles that the conversations of a run have
    draws: bool = True  # images for people exist: recordings, `embodyrl play`
    on_gpu: bool | None = None  # env workers compute or render on a GPU; None: unknown, so each has access to one
    max_chunks: int = 0
    """Chunks of the longest episode, if their number is limited instead of that of env steps; 0: it is not."""
    prompt_bytes: int = 0
    """UTF-8 bytes of the longest instruction; 0: those of `tasks`."""
    seeded_tasks: tuple[int, ...] = ()
    """Tasks whose episodes also depend on their seed; in all others the reset id determines everything."""
    reports_success: bool = True
    """False: success is unknown, so the return is the metric."""
    state_suffices: bool = True
    """The state contains all relevant information; False: some is visible in images only."""
    held_out: int = 0  # n last initial states of a task are for evaluation, unless `state_ids` says otherwise
    components: tuple[str, ...] = ()
    """Names of the parts of the reward that are logged separately."""
    component_weights: tuple[float, ...] = ()  # what each part counts in the reward
    rewarded_cameras: int = 0
    """The reward uses the first n cameras, independent of the policy."""
    suites: tuple[str, ...] = ()
    """Suite of each task, if evaluations cover several; all have the tasks of the first, the only one for training."""
    instructions: tuple[str, ...] = ()  # of each reset id, if they differ between initial states of a task
    reward_factor: float = 1.0
    """Factor that was applied to every reward for training; reported returns exclude it."""

    def suite_of(self, task_id: int) -> str:
        """Return the suite of a task."""
        return self.suites[task_id] if self.suites else self.name

    @property
    def action_kind(self) -> ActionKind:
        """Kind of the action space."""
        return self.action_space.kind if self.action_space else ActionKind.box

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
    """Return the cameras of an environment whose prompts contain images."""
    return tuple(f"image_{i}" for i in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec(Footprint):
    """Declaration of a policy: inputs, outputs and size."""

    name: str
    num_action_chunks: int
    action_dim: int
    tokens_per_chunk: int
    """L: number of sampled tokens of one chunk (K*A for discrete OpenVLA-OFT)."""
    imitated: int = 0
    """H: actions per imitation target, if more than are executed; 0: K."""
    value_dim: int = 0
    """V: 0 without a value head, 1 (chunk level) or K (action level)."""
    num_images: int = 0
    uses_state: bool = False
    turns_images: bool = False
    """The policy rotates frames by `EnvSpec.image_rotation_deg` before inference."""
    reads_instructions: bool = False
    gripper: GripperConvention | None = None
    untrainable: str = ""
    """Reason why RL cannot train the policy; empty: it can."""
    warmup_steps: int = 0
    """Default warm-up of RL in optimizer steps, without actor.optim.warmup_steps."""
    scored: int = 0  # log-probabilities per action, if fewer than tokens; 0: one per token
    takes_noise: bool = True  # sampling differs from greedy actions
    scripted: bool = False
    """The environment's scripted expert chooses the actions, step by step; the policy's actions are ignored."""
    action_kinds: frozenset[ActionKind] = frozenset({ActionKind.box})
    """Supported kinds of action spaces."""
    draws_with_gradients: bool = False
    """Sampled actions are a differentiable function of the weights (`policies.protocol.SoftActor`)."""
    steers: str = ""
    """Key and value that freeze the model and train an actor on it; empty: no such actor."""
    corrects: bool = False  # the actor outputs a difference of actions, which demonstrations contain, too
    steering_features: int = 0  # F: features that are stored per observation for an actor on a frozen model
    doubts: tuple[str, ...] = ()
    """Warnings about probably unintended settings, one line each; shown in the banner."""
    reply_bytes: int = 0
    """UTF-8 bytes stored of a chunk's text; 0: there is no text."""
    rates: bool = False
    """Its value head, trained alone, is a reward model for `reward.path`."""
