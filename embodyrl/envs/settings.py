"""Keys that environments share; what only one of them reads stands in its own folder."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, PrivateAttr

from embodyrl.config.settings import Count, Must, NumbersStates, Positive, Settings, only

RenderProfile = StrEnum("RenderProfile", ["full", "lean"])


_RANGE = only(lambda v: len(v) == 2 and 0 <= v[0] <= v[1])
_TASKS = only(lambda v: v and min(v) >= 0 and len(set(v)) == len(v))
RewardFactor = Annotated[
    float, Field(ge=-(10**6), le=10**6), only(bool), Must("different from 0 (0 removes every reward)")
]
Slots = Annotated[int, Field(ge=1, le=65536)]


class EnvSplit(Settings):
    """Episodes of one kind, training or evaluation."""

    total_num_envs: Slots = 8
    """Env slots."""
    ignore_terminations: bool = False
    """Go on after success until max_episode_steps."""
    max_episode_steps: Count = 512
    """Time limit in env steps; reaching it truncates the episode."""
    task_ids: Annotated[list[int], _TASKS, Must("a list of different task numbers, [0,1]")] | None = None
    """Tasks to use; default all."""
    state_ids: Annotated[list[int], _RANGE, Must("[first,last] with 0 <= first <= last")] | None = None
    """[first, last]: initial states of each task that this split may use; default all."""


class TrainSplit(EnvSplit):
    """Episodes to train on."""

    task_weights: (
        Annotated[list[Positive], Field(min_length=2), Must("a list of two or more numbers above 0, [1,0.5]")] | None
    ) = None
    """How often groups are of each of the selected tasks, in relation to each other; null: equally often."""

    auto_reset: bool = True
    """An ended slot starts its next episode at once; false: one episode per slot and rollout epoch."""
    continue_episodes: bool = False
    """Where the algorithm counts steps (GAE): an episode that the end of a step cuts goes on in the next one, and
    every episode begins in a state of its own."""
    use_fixed_reset_state_ids: bool = True
    """Members of a group, and all episodes of a slot within one rollout epoch, share one reset id."""
    max_steps_per_rollout_epoch: Count | None = None
    """Env steps per slot and rollout epoch where the algorithm counts steps (GAE); default max_episode_steps."""


class EnvSettings(Settings):
    """What every environment has: its name and its splits."""

    env_type: Annotated[str, NumbersStates]
    """Which adapter: a registered name or package.module:attr."""
    train: TrainSplit = TrainSplit()
    eval: EnvSplit = EnvSplit()

    # Private: it follows from the command and is no key.
    _played: tuple[str, ...] = PrivateAttr(("train", "eval"))

    @property
    def splits(self) -> dict[str, EnvSplit]:
        """The splits whose episodes the command plays, by name."""
        return {name: getattr(self, name) for name in self._played}

    @property
    def title(self) -> str:
        """Name of the environment, by which evaluation protocols list it (`EnvSpec.name`)."""
        return self.env_type

    @property
    def max_chunks(self) -> int:
        """Replies of an episode, where its length counts in chunks; 0: it counts in env steps."""
        return 0

    @property
    def longest_episode(self) -> int:
        """Largest `max_episode_steps` of the splits."""
        return max(split.max_episode_steps for split in self.splits.values())


class RewardSettings(Settings):
    """What is done to the reward of every simulator."""

    use_rel_reward: bool = True
    """Reward is the change of the simulator's reward, so that a return telescopes to its last value."""
    reward_coef: RewardFactor = 1.0
    """Factor on every reward."""


class InitParams(Settings):
    """Cameras."""

    camera_heights: Annotated[int, Field(ge=1, le=8192)] = 256
    """Height of every camera image, pixels."""
    camera_widths: Annotated[int, Field(ge=1, le=8192)] = 256
    """Width of every camera image, pixels."""
    camera_names: list[str] = ["agentview"]
    """Cameras that are rendered for the policy, in the order of its image inputs; each one costs rendering time."""


class CameraSettings(Settings):
    """An environment with cameras."""

    init_params: InitParams = InitParams()

    def with_cameras(self, names: Sequence[str]) -> Self:
        """Return the environment with these cameras only."""
        return self.model_copy(update={"init_params": self.init_params.model_copy(update={"camera_names": [*names]})})
