"""What environments and policies declare before any worker starts; joined by `plan/run_plan.py`.

Their sizes (bytes, FLOPs and seconds) are what a run's memory and rates are planned from.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a policy declares about its size; zeros where it says nothing."""

    num_parameters: int = 0
    num_trained: int | None = None
    """Parameters beside them that training changes (adapters); None: it changes them all."""
    activation_bytes: int = 0
    """What one sample's forward pass keeps in memory for its backward pass, about."""
    recomputed_bytes: int = 0
    """The same with actor.gradient_checkpointing: the inputs of all layers."""
    largest_layer: tuple[int, int] = (0, 0)
    """Of the repeated layers: parameters, and what recomputing it for a sample keeps, bytes."""
    outside_layers: int = 0
    """Parameters outside the repeated layers: embeddings, output matrix, projectors."""
    scoring_bytes: tuple[int, int] = (0, 0)
    """What scoring takes once, however many samples: logits of a whole vocabulary; the same, layers recomputed."""
    acting_bytes: int = 0
    """What acting takes for each sample of its batch, about: the widest layer, or keys and values of replies."""
    sample_tokens: int = 1
    """Tokens of the longest sample, as `Record.cost` counts them."""
    forward_flops: float = 0.0
    """Of one sample's forward pass."""
    act_passes: int = 1
    """Forward passes, each of which reads all weights, for a batch of chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFootprint:
    """What an environment declares about its size; zeros where it says nothing, or where it is no matter."""

    task_bytes: int = 0
    """Memory that one loaded task takes, roughly, where a worker can only hold some of them; 0: no matter."""
    gpu_bytes: tuple[int, int] = (0, 0)
    """Its memory that an env worker takes, roughly: by itself, and for each slot (with `task_bytes` each task)."""
    chunk_s: float = 0.0
    """Seconds of one core for a chunk of 8 actions with its drawing, roughly; 0: not known, or no matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GripperConvention:
    """What a gripper command means: the value that opens, the value that closes, and its place in the action."""

    open: float
    closed: float
    index: int = -1
    binary: bool = False
    """The receiver acts on the sign only; the sender's value is snapped to `open` or `closed`."""


def convert_gripper(
    actions: npt.NDArray[np.float32], source: GripperConvention | None, target: GripperConvention | None
) -> None:
    """Rewrite the gripper dimension of actions [..., A] in place from the policy's meaning to the environment's."""
    if source is None or target is None:
        return
    openness = (actions[..., source.index] - source.closed) / (source.open - source.closed)
    if target.binary:
        openness = (openness > 0.5).astype(actions.dtype)
    actions[..., target.index] = target.closed + openness * (target.open - target.closed)


class ActionKind(StrEnum):
    """What the numbers of an action mean."""

    box = "box"
    """Real numbers."""
    discrete = "discrete"
    """One category id."""
    multi_discrete = "multi_discrete"
    """One category id per dimension."""
    text = "text"
    """Tokens that only the policy can read (-1: none); what they say in words goes beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpace:
    """Which actions [A] an environment takes. They travel as float32 whatever their kind."""

    kind: ActionKind
    sizes: tuple[int, ...] = ()
    """Number of categories of each dimension, ids from 0; empty for `box`."""
    low: tuple[float, ...] = ()
    """Smallest value of each dimension, maybe -inf; empty but for `box`."""
    high: tuple[float, ...] = ()
    """Largest value of each dimension, maybe inf; empty but for `box`."""

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Smallest and largest number of each dimension, whatever their kind."""
        return self.low or (0.0,) * len(self.sizes), self.high or tuple(size - 1.0 for size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec(EnvFootprint):
    """What an environment declares; joined with a `PolicySpec` before any worker starts."""

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
    """Likewise; (0, 0): nobody can tell what other goals would have earned (`envs.protocol.GoalFactory`)."""
    max_episode_steps: int = 0  # the benchmark's own horizon, env steps
    expert_tasks: tuple[int, ...] = ()  # for which a scripted expert exists
    expert_reacts: bool = True  # to where things are, whoever chose the actions so far; false: it follows a plan
    action_space: ActionSpace | None = None  # None: real numbers, by convention within -1..1
    may_truncate: bool = False
    """The environment may truncate an episode itself, at any step; false: only the run's own time limit does."""
    lockstep: bool = False
    """The slots of a worker are one batched simulator, which steps them all at once."""
    doubts: tuple[str, ...] = field(default=(), compare=False)
    """Warnings of the banner, a line each; they may quote observations, so that two equal specs have different ones."""
    roles: tuple[tuple[str, ...], ...] = ()  # sequences of roles that the conversations of a run have
    draws: bool = True  # there are images for people: recordings, `embodyrl play`
    on_gpu: bool | None = None  # env workers compute or draw on a GPU; None: nobody knows, so each sees one
    max_chunks: int = 0
    """Chunks of the longest episode, where their number and not that of env steps is limited; 0: env steps are."""
    prompt_bytes: int = 0
    """UTF-8 bytes of the longest instruction; 0: those of `tasks`."""
    seeded_tasks: tuple[int, ...] = ()
    """Tasks whose episodes depend on their seed too; of all others a reset id decides everything."""
    reports_success: bool = True
    """False: no step says that a goal is reached, so the return is what counts."""
    state_suffices: bool = True
    """The state alone tells what a policy must know; false: what matters is seen by the cameras only."""
    held_out: int = 0  # n last initial states of a task are for evaluation, unless `state_ids` says otherwise
    components: tuple[str, ...] = ()
    """Names of the parts of the reward that are logged one by one."""
    component_weights: tuple[float, ...] = ()  # what each part counts in the reward
    rewarded_cameras: int = 0
    """The reward looks at the first n, whatever the policy reads."""
    suites: tuple[str, ...] = ()
    """Suite of each task where evaluations cover several, all with the tasks of the first, the only one to train on."""
    instructions: tuple[str, ...] = ()  # of each reset id, where initial states of a task are told differently
    reward_factor: float = 1.0
    """What every reward was multiplied by for learning; reported returns are without it."""

    def suite_of(self, task_id: int) -> str:
        """Name of the suite that a task belongs to."""
        return self.suites[task_id] if self.suites else self.name

    @property
    def action_kind(self) -> ActionKind:
        """What kind of numbers an action is."""
        return self.action_space.kind if self.action_space else ActionKind.box

    @property
    def num_reset_ids(self) -> int:
        """Initial states of all tasks together."""
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
        """All reset ids of one task."""
        if not 0 <= task_id < len(self.tasks):
            raise ValueError(f"task id {task_id} is outside 0..{len(self.tasks) - 1} of env '{self.name}'.")
        return range(start := sum(self.states_per_task[:task_id]), start + self.states_per_task[task_id])


def picture_names(count: int) -> tuple[str, ...]:
    """The cameras of an environment whose prompts show images."""
    return tuple(f"image_{i}" for i in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec(Footprint):
    """What a policy declares about its inputs and outputs, and what it takes."""

    name: str
    num_action_chunks: int
    action_dim: int
    tokens_per_chunk: int
    """L: number of sampled tokens of one chunk (K*A for discrete OpenVLA-OFT)."""
    imitated: int = 0
    """H: actions that imitation shows it at a time, where they are more than it executes; 0: K."""
    value_dim: int = 0
    """V: 0 without a value head, 1 (chunk level) or K (action level)."""
    num_images: int = 0
    uses_state: bool = False
    turns_images: bool = False
    """It turns frames by `EnvSpec.image_rotation_deg` before it reads them."""
    reads_instructions: bool = False
    gripper: GripperConvention | None = None
    untrainable: str = ""
    """Why RL cannot train it; empty: it can, for its actions are drawn with probabilities."""
    warmup_steps: int = 0
    """Optimizer steps of warm-up in reinforcement learning where actor.optim.warmup_steps is not set."""
    scored: int = 0  # log-probabilities of an action, where it has more tokens than these; 0: one of each token
    takes_noise: bool = True  # sampling differs from acting greedily
    scripted: bool = False
    """The environment's own expert chooses the actions, step by step; the policy only marks the wish."""
    action_kinds: frozenset[ActionKind] = frozenset({ActionKind.box})
    """Kinds of action spaces that it can act in."""
    draws_with_gradients: bool = False
    """Drawn actions depend on the weights as a differentiable function (`policies.protocol.SoftActor`)."""
    steers: str = ""
    """Key and value by which frozen weights act and only what steers them is trained; empty: not so."""
    corrects: bool = False  # what steers is a difference of actions, which demonstrations tell too
    steering_features: int = 0  # F: numbers that are kept of an observation where it steers
    doubts: tuple[str, ...] = ()
    """What works, but may not be meant, a line each; printed in the banner."""
    reply_bytes: int = 0
    """UTF-8 bytes kept of what a chunk says in words; 0: it says nothing."""
    rates: bool = False
    """Its value head, trained alone, is a reward model that `reward.path` can name."""
