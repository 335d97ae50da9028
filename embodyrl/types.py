"""Records that cross seams: frozen, keyword-only, numpy (torch only where gradients flow).

Shapes: N env slots, T chunk steps, K actions per chunk, A action dims, L = K*A action tokens, V value outputs per chunk
(1 or K), B samples, C cameras, H W image, S state dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embodyrl.footprint import EnvFootprint, Footprint

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GripperConvention:
    """What a gripper command means: the value that opens, the value that closes, and its place in the action."""

    open: float
    closed: float
    index: int = -1
    binary: bool = False
    """The receiver acts on the sign only; the sender's value is snapped to `open` or `closed`."""


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
    doubts: tuple[str, ...] = ()  # what works, but is hardly meant, a line each; the banner says it
    draws: bool = True  # there are pictures for people: recordings, `embodyrl play`
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
    held_out: int = 0  # so many last initial states of a task are for evaluation, unless `state_ids` says otherwise
    components: tuple[str, ...] = ()
    """Names of the parts of the reward that are logged one by one."""
    component_weights: tuple[float, ...] = ()  # what each part counts in the reward
    rewarded_cameras: int = 0
    """The reward looks at the first so many, whatever the policy reads."""
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
    """The cameras of an environment whose prompts show pictures."""
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
    reply_bytes: int = 0
    """UTF-8 bytes kept of what a chunk says in words; 0: it says nothing."""
    rates: bool = False
    """Its value head, trained alone, is a reward model that `reward.path` can name."""


ROWS_AT_A_TIME = 32
"""Samples of a forward pass that values or scores what others have written, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A batch of observations as stored: raw uint8 images, never preprocessed."""

    images: ByteArray
    """[B, C, H, W, 3] uint8, simulator orientation."""
    state: FloatArray
    """[B, S] proprioception."""
    instructions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instructions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationOut:
    """Where an environment writes one slot's observation: views into the arena."""

    images: ByteArray
    """[C, H, W, 3] uint8 view."""
    state: FloatArray
    """[S] float32 view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """How one slot begins an episode."""

    reset_id: int
    seed: int
    max_episode_steps: int
    ignore_terminations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """Outcome of one action chunk for n slots; arrays are [n, K]. Entries where `valid` is False were not executed."""

    reward: FloatArray
    terminated: BoolArray
    """The episode is over and nothing follows that a value could stand for."""
    truncated: BoolArray
    """A limit ended the episode: on steps, and then it is not `terminated`; or on the tokens of the last reply."""
    valid: BoolArray
    success: BoolArray
    """The task's goal holds after this action."""
    components: FloatArray | None = None
    """[n, C] the parts of the chunk's reward, in the order of `EnvSpec.components`."""
    unjudged: dict[int, str] = field(default_factory=dict)
    """By slot: why the reward is not known and counts as 0."""

    @property
    def done(self) -> BoolArray:
        """[n] the episode of this slot ended inside this chunk."""
        return np.asarray((self.terminated | self.truncated).any(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """One planned episode. The list of a step is fixed before the step starts."""

    episode_id: int
    """Index in the step's list; it keys the action noise."""
    reset_id: int
    task_id: int
    group_id: int
    member: int
    seed: int
    """Seed of the simulator's own randomness; equal for all members of a group."""
    noise_seed: int
    """Seed of the action noise; different for every episode."""


class EarlierPart(NamedTuple):
    """An episode until a training step cut it; the next step goes on with it."""

    spec: EpisodeSpec  # as it began
    length: int
    episode_return: float
    success_once: bool
    components: Any = 0.0  # [C] sums of the parts of the reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished (or cut) episode: a list of arena records and what the algorithm needs of them."""

    spec: EpisodeSpec
    records: IntArray  # [T] of the arena, one of each chunk step
    reward: FloatArray
    """[T, K] shaped reward per action, like the next two; 0 where not valid."""
    valid: BoolArray
    success: BoolArray
    value: FloatArray
    bootstrap_value: FloatArray
    """[V] value of the observation after the last chunk, 0 where terminated; `value` [T, V]: estimates while acting."""
    terminated: bool
    truncated: bool
    """Ended by the time limit, or cut by the step's quota: the return bootstraps."""
    cut: bool = False
    """Cut by the quota of chunk steps: not an episode of the success statistics."""
    counted: bool = True
    """The quota left at its beginning sufficed for the longest episode; of others only short ones reach their end."""
    final_record: int = -1
    """Arena record of the observation after the last chunk; -1 if not kept."""
    earlier: EarlierPart | None = None
    """What came before in steps of the run that cut it, if it went on."""
    instruction: str = ""
    components: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[T, C] parts of the reward of each chunk."""
    action: FloatArray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    """[T, K, A] what was chosen, executed where `valid`."""
    top: ByteArray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    """[T, bytes] `PolicyOutput.top` of each chunk; T x 0 where it was not asked for."""
    duration_s: float = 0.0
    video: str | None = None

    @property
    def length(self) -> int:
        """Executed env steps."""
        return int(self.valid.sum())

    @property
    def episode_return(self) -> float:
        """Sum of the rewards of executed actions."""
        return float(self.reward[self.valid].sum())

    @property
    def whole(self) -> EarlierPart:
        """All of it so far, with what earlier training steps saw."""
        spec, length, earned, success, parts = self.earlier or EarlierPart(self.spec, 0, 0.0, False)
        more = length + self.length, earned + self.episode_return, success or self.success_once
        return EarlierPart(spec, *more, parts + self.components.sum(axis=0))

    @property
    def success_once(self) -> bool:
        """Whether any executed action reached the goal."""
        return bool(self.success[self.valid].any())

    @property
    def success_at_end(self) -> bool:
        """Whether the goal held after the last executed action."""
        return bool(self.success[self.valid][-1]) if self.valid.any() else False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """Advantages [B, K] and weights of one training step, aligned with a flat list of B chunk samples."""

    records: IntArray
    episode: IntArray
    """[B] episode id of each sample; `records`: its arena record."""
    advantage: FloatArray
    returns: FloatArray
    """[B, V] value targets."""
    valid: BoolArray
    """[B, K] actions that were executed."""
    has_signal: bool
    """False: the gradient of the whole batch is exactly zero, so no update is made."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """One chunk for each of B observations (CPU numpy, ready for the arena): tokens [B, L], value [B, V]."""

    actions: FloatArray
    """[B, K, A] in the units of the policy's training data (un-normalised; gripper per `PolicySpec.gripper`)."""
    tokens: IntArray
    logprob: FloatArray
    """[B, L] log-probability of each token under the sampling distribution (temperature included)."""
    value: FloatArray
    replies: tuple[str, ...] = ()
    """What each chunk says in words; empty for actions that say nothing."""
    top: tuple[str, ...] = ()
    """JSON of each reply: for each token [[text, log-probability], ...], itself first, then the most probable ones."""
    cut_off: BoolArray | None = None
    """[B] replies that the limit on tokens ended, if there are replies."""
    cost: IntArray | None = None
    """[B] tokens read and written, for micro-batches of equal work; None: all samples cost the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyScores:
    """Differentiable quantities of given tokens (torch, fp32, on the policy's device): [B, L], [B, L] and [B, V]."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationScores:
    """How well given actions are imitated (torch, fp32, on the policy's device); loss [B] with gradients."""

    loss: torch.Tensor
    accuracy: torch.Tensor
    """[B] share of the chunk's numbers whose bin or category is the given one's when acting greedily."""
