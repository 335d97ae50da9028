"""Data classes passed between modules: frozen and keyword-only, with numpy arrays, or torch tensors if gradients are
needed.

Shapes: N environments, T chunk steps, K actions per chunk, A action dims, L = K*A action tokens, V value outputs per
chunk (1 or K), B samples, C cameras, H W image, S state dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

# Aliases for authors of environments and models.
from embodyrl.specs import ActionKind as ActionKind
from embodyrl.specs import ActionSpec as ActionSpec
from embodyrl.specs import BenchmarkSpec as BenchmarkSpec
from embodyrl.specs import CameraSpec as CameraSpec
from embodyrl.specs import Control as Control
from embodyrl.specs import EnvCosts as EnvCosts
from embodyrl.specs import EnvSpec as EnvSpec
from embodyrl.specs import ExpertSpec as ExpertSpec
from embodyrl.specs import GoalSpec as GoalSpec
from embodyrl.specs import GripperConvention as GripperConvention
from embodyrl.specs import InputSpec as InputSpec
from embodyrl.specs import PolicyCosts as PolicyCosts
from embodyrl.specs import PolicySpec as PolicySpec
from embodyrl.specs import RewardSpec as RewardSpec
from embodyrl.specs import SimulatorSpec as SimulatorSpec
from embodyrl.specs import SteeringSpec as SteeringSpec
from embodyrl.specs import TextSpec as TextSpec

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]


ROWS_AT_A_TIME = 32
"""Maximum number of samples of a forward pass without gradients, for values or log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Batch of observations without preprocessing; images are raw uint8 frames."""

    images: ByteArray
    """[B, C, H, W, 3] uint8 images in the simulator's orientation."""
    state: FloatArray
    """[B, S] proprioceptive state."""
    instructions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instructions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationOut:
    """Writable views into shared memory, to which one environment writes its observation."""

    images: ByteArray
    """[C, H, W, 3] uint8 view."""
    state: FloatArray
    """[S] float32 view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """Initial state and limits of an episode in an environment."""

    reset_id: int
    seed: int
    max_episode_steps: int
    ignore_terminations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """Result of one action chunk of n environments; arrays are [n, K]. Entries with `valid` False were not executed."""

    reward: FloatArray
    terminated: BoolArray
    """True if the episode ended in a terminal state, so that its return does not bootstrap."""
    truncated: BoolArray
    """True if a limit ended the episode: the step limit without termination, or the token limit of the last reply."""
    valid: BoolArray
    success: BoolArray
    """True if the goal is reached after this action."""
    components: FloatArray | None = None
    """[n, C] reward components of the chunk, in the order of `RewardSpec.components`."""
    reward_errors: dict[int, str] = field(default_factory=dict)
    """Reward errors by environment; an unknown reward counts as 0."""

    @classmethod
    def empty(cls, num_envs: int, num_actions: int, *, num_components: int = 0) -> Self:
        """Return a result whose entries are all 0 or False."""
        terminated, truncated, valid, success = np.zeros((4, num_envs, num_actions), np.bool_)
        return cls(
            reward=np.zeros((num_envs, num_actions), np.float32),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            success=success,
            components=np.zeros((num_envs, num_components), np.float32),
        )

    @property
    def done(self) -> BoolArray:
        """[n] mask of environments whose episode ended inside this chunk."""
        return np.asarray((self.terminated | self.truncated).any(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """One planned episode; all episodes of a step are planned before the step starts."""

    episode_id: int
    """Index in the step's episode list."""
    reset_id: int
    task_id: int
    group_id: int
    member: int
    seed: int
    """Seed of the simulator's randomness; equal for all members of a group."""
    noise_seed: int
    """Seed of the action noise; different for every episode."""


class EarlierPart(NamedTuple):
    """Summary of the part of a cut episode that earlier training steps executed.

    The current training step continues the episode.
    """

    spec: EpisodeSpec  # spec of the episode's start
    length: int
    episode_return: float
    success_once: bool
    components: Any = 0.0  # [C] sums of the reward parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished or cut episode: indices of its records in shared memory, and the data that algorithms need."""

    spec: EpisodeSpec
    records: IntArray  # [T] arena records, one per chunk step
    reward: FloatArray
    """[T, K] reward per action. This and the next two fields are 0 or False for actions that were not executed."""
    valid: BoolArray
    success: BoolArray
    value: FloatArray
    """[T, V] value estimates during the rollout."""
    bootstrap_value: FloatArray
    """[1] value after the last executed action; 0 if the episode terminated, empty without a value head."""
    terminated: bool
    truncated: bool
    """True if the time limit or the chunk-step quota ended the episode; the return then includes a bootstrap value."""
    cut: bool = False
    """True if the quota of chunk steps cut the episode, which is then excluded from success statistics."""
    counted: bool = True
    """True if statistics include the episode: at its start, the remaining quota sufficed for an episode of maximum
    length. Statistics of all episodes would over-represent short episodes."""
    final_record: int = -1
    """Arena record of the observation after the last chunk; -1 if not kept."""
    earlier: EarlierPart | None = None
    """Part before this step, if the episode continues a cut episode."""
    instruction: str = ""
    components: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[T, C] reward components of each chunk."""
    action: FloatArray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    """[T, K, A] chosen actions, executed where `valid`."""
    top: ByteArray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    """[T, bytes] encoded `PolicyOutput.top` of each chunk; [T, 0] if not requested."""
    duration_s: float = 0.0
    video: str | None = None
    solved_at_reset: bool = False
    """True if the goal was already reached before the first action."""

    @property
    def length(self) -> int:
        """Number of executed env steps."""
        return int(np.count_nonzero(self.valid))

    @property
    def episode_return(self) -> float:
        """Sum of the rewards of executed actions."""
        return float(self.reward[self.valid].sum())

    @property
    def summary(self) -> EarlierPart:
        """Summary of the episode so far, including earlier training steps."""
        spec, length, total_return, success, components = self.earlier or EarlierPart(self.spec, 0, 0.0, False)
        totals = length + self.length, total_return + self.episode_return, success or self.success_once
        return EarlierPart(spec, *totals, components + self.components.sum(axis=0))

    @property
    def success_once(self) -> bool:
        """True if any executed action reached the goal."""
        return bool(self.success[self.valid].any())

    @property
    def success_at_end(self) -> bool:
        """True if the goal was reached after the last executed action."""
        return bool(self.success[self.valid][-1]) if self.valid.any() else False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """Training batch of one step: advantages [B, K], returns and masks of B samples (action chunks)."""

    records: IntArray
    episode: IntArray
    """[B] episode id of each sample; `records` are the arena records of the samples."""
    advantage: FloatArray
    returns: FloatArray
    """[B, V] value targets."""
    valid: BoolArray
    """[B, K] True for executed actions."""
    has_signal: bool
    """False if the gradient of the whole batch is exactly zero, so there is no update."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """Policy output for B observations: one chunk each, as numpy arrays; `tokens` [B, L], `value` [B, V]."""

    actions: FloatArray
    """[B, K, A] actions in the units of the training data, not normalized; gripper as in `PolicySpec.gripper`."""
    tokens: IntArray
    logprob: FloatArray
    """[B, L] log-probability of each token under the sampling distribution (temperature included)."""
    value: FloatArray
    replies: tuple[str, ...] = ()
    """Text of each chunk; empty without text."""
    top: tuple[str, ...] = ()
    """JSON of each reply: [[text, log-probability], ...] for each token; the sampled token is first, then the most
    probable tokens."""
    cut_off: BoolArray | None = None
    """[B] True for replies that hit the token limit; None without replies."""
    cost: IntArray | None = None
    """[B] number of tokens of prompt and reply, for micro-batches of equal cost; None: equal costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyScores:
    """Log-probabilities [B, L], entropies [B, L] and values [B, V] of given tokens, with gradients (torch, fp32)."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationLoss:
    """Imitation loss [B] with gradients, and accuracy (torch, fp32, on the policy's device)."""

    loss: torch.Tensor
    accuracy: torch.Tensor
    """[B] fraction of the chunk's dimensions whose greedy bin or category equals the target."""
    error: torch.Tensor | None = None
    """[B] mean absolute error of greedy actions, in the actions' units; for actions without categories, logged instead
    of `accuracy`."""
