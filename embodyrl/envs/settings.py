"""Config keys that environments share; the keys of a single environment are declared in its folder."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr

from embodyrl.config.settings import ChangesStateIds, Constraint, Count, Positive, Settings, valid_if
from embodyrl.registry import closest

if TYPE_CHECKING:
    from embodyrl.types import EnvSpec

RenderProfile = StrEnum("RenderProfile", ["full", "lean"])


_IS_RANGE = valid_if(lambda v: len(v) == 2 and 0 <= v[0] <= v[1])
_IS_DELAY_RANGE = valid_if(lambda v: len(v) == 2 and 0 <= v[0] <= v[1] <= 1000)
_ARE_TASK_IDS = valid_if(lambda v: v and min(v) >= 0 and len(set(v)) == len(v))
NUM_SEEDS = 100_000
"""Number of initial states of an environment whose reset ids are seeds."""
RewardFactor = Annotated[
    float, Field(ge=-(10**6), le=10**6), valid_if(bool), Constraint("different from 0 (0 removes every reward)")
]
EnvCount = Annotated[int, Field(ge=1, le=65536)]


class EnvSplit(Settings):
    """Config keys for training or evaluation episodes."""

    total_num_envs: EnvCount = 8
    """Total number of environments, which run episodes in parallel."""
    ignore_terminations: bool = False
    """If true, episodes continue after the task is completed or failed, until max_episode_steps."""
    max_episode_steps: Count = 512
    """Time limit in env steps; reaching it truncates the episode."""
    task_ids: Annotated[list[int], _ARE_TASK_IDS, Constraint("a list of different task numbers, [0,1]")] | None = None
    """Task ids to use; default: all."""
    state_ids: Annotated[list[int], _IS_RANGE, Constraint("[first,last] with 0 <= first <= last")] | None = None
    """Range [first, last] of the initial states of each task that this split uses; default: all."""

    def time_limit(self, env: "EnvSpec") -> int:
        """Return the smaller one of `max_episode_steps` and the environment's own time limit, in env steps."""
        return min(self.max_episode_steps, env.max_episode_steps if env.simulator.may_truncate else 10**9)


class TrainSplit(EnvSplit):
    """Config keys for training episodes."""

    task_weights: (
        Annotated[list[Positive], Field(min_length=2), Constraint("a list of two or more numbers above 0, [1,0.5]")]
        | None
    ) = None
    """Relative sampling frequency of the selected tasks; null: uniform."""

    auto_reset: bool = True
    """If true, an environment starts its next episode when one ends; false: one episode per environment and epoch."""
    continue_episodes: bool = False
    """If true, unfinished episodes continue in the next training step (only for algorithms that count env steps, such
    as GAE). Every episode then starts from a separate initial state."""
    use_fixed_reset_state_ids: bool = True
    """If true, all episodes of a group, and all episodes of an environment in a rollout epoch, have the same initial
    state."""
    max_steps_per_rollout_epoch: Count | None = None
    """Env steps per environment and rollout epoch for algorithms that count env steps, such as GAE; default:
    max_episode_steps."""


class ControlSettings(Settings):
    """Config keys for the timing of actions."""

    latency_steps: Annotated[
        Annotated[list[int], _IS_DELAY_RANGE] | Annotated[int, Field(ge=0, le=1000)],
        Constraint("a number from 0 to 1000, or [low,high] with 0 <= low <= high"),
    ] = 0
    """Number of env steps between an observation and the first action of its chunk; meanwhile the previous chunk
    continues. [low,high]: sampled uniformly for each chunk. The first chunk of an episode has no delay."""

    @property
    def delay(self) -> tuple[int, int]:
        """Smallest and largest `latency_steps`."""
        steps = self.latency_steps
        return (steps, steps) if isinstance(steps, int) else (steps[0], steps[1])


class EnvSettings(Settings):
    """Config keys of every environment: its name, and its training and evaluation episodes."""

    env_type: Annotated[str, ChangesStateIds]
    """Name of a registered environment, or package.module:attr."""
    train: TrainSplit = TrainSplit()
    eval: EnvSplit = EnvSplit()

    program_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that accept a Hugging Face repository (`owner/name@revision`) whose code the environment executes."""

    former_values: ClassVar[Mapping[str, Any]] = {}
    """Values for saved configs without these keys: the fixed behavior of the versions that wrote the configs."""

    # Private: derived from the command, not a key.
    _used_splits: tuple[str, ...] = PrivateAttr(("train", "eval"))

    @property
    def splits(self) -> dict[str, EnvSplit]:
        """Splits whose episodes the command runs, by name."""
        return {name: getattr(self, name) for name in self._used_splits}

    def set_splits(self, splits: tuple[str, ...]) -> None:
        """Set the splits whose episodes the command runs, while the config is loaded."""
        self._used_splits = splits

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols: the key `id` if set, else `env_type`."""
        return getattr(self, "id", None) or self.env_type

    @property
    def max_chunks(self) -> int:
        """Maximum number of chunks per episode; 0 if the episode length is limited in env steps instead."""
        return 0

    @property
    def delay(self) -> tuple[int, int]:
        """Smallest and largest number of env steps between an observation and the first action of its chunk."""
        control: ControlSettings | None = getattr(self, "control", None)
        return (0, 0) if control is None else control.delay

    def without_delay(self) -> Self:
        """Return the settings without an inference delay."""
        return self.model_copy(update={"control": ControlSettings()}) if self.delay[1] else self

    @property
    def longest_episode(self) -> int:
        """Largest `max_episode_steps` of the splits."""
        return max(split.max_episode_steps for split in self.splits.values())


class RewardSettings(Settings):
    """Config keys of simulators: reward, action delay, observation history and temporal ensembling."""

    keys_by_condition = {"ensemble_chunk": "ensemble_coeff"}

    control: ControlSettings = ControlSettings()

    use_rel_reward: bool = True
    """If true, the reward is the difference between consecutive simulator rewards, so that the return is the last
    reward."""
    reward_coef: RewardFactor = 1.0
    """Factor that multiplies all rewards."""
    history: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of env steps in an observation, oldest first. The first observation of an episode is repeated. With values
    above 1, images are rendered at every env step."""
    ensemble_chunk: Count | None = None
    """Number of actions per chunk for temporal ensembling: the environment executes the weighted average of all actions
    that were predicted for a step. null: no ensembling."""
    ensemble_coeff: Annotated[float, Field(ge=-100, le=100)] = 0.01
    """Coefficient m of the ensembling weights exp(-m i); i = 0 is the oldest chunk."""

    def problems(self) -> Iterator[str]:
        """Yield an error if temporal ensembling is combined with a delay."""
        yield from super().problems()
        if self.ensemble_chunk is not None and self.control.delay[1]:
            yield (
                f"env.control.latency_steps={self.control.latency_steps}: temporal ensembling supports no delay. "
                "Set it to 0, or remove env.ensemble_chunk."
            )


class InitParams(Settings):
    """Config keys for cameras."""

    camera_heights: Annotated[int, Field(ge=1, le=8192)] = 256
    """Height of every camera image in pixels."""
    camera_widths: Annotated[int, Field(ge=1, le=8192)] = 256
    """Width of every camera image in pixels."""
    camera_names: list[str] = ["agentview"]
    """Cameras to render for the policy, in the order of its image inputs; each camera costs rendering time."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every camera image in pixels."""
        return self.camera_heights, self.camera_widths


class CameraSettings(Settings):
    """Config keys for an environment with cameras."""

    init_params: InitParams = InitParams()

    def camera_problems(self, available: Collection[str] | None = None) -> Iterator[str]:
        """Yield errors about selected cameras that occur twice or are not in `available`."""
        names = self.init_params.camera_names
        for name in names:
            if available is not None and name not in available:
                yield (
                    f"env.init_params.camera_names: '{name}' is not a camera of this environment."
                    f"{closest(name, available)} Known: {', '.join(available)}."
                )
        if len(set(names)) < len(names):
            yield f"env.init_params.camera_names={list(names)} contains a camera twice. Remove the duplicate."

    def with_cameras(self, names: Sequence[str]) -> Self:
        """Return the settings with the given cameras only."""
        return self.model_copy(update={"init_params": self.init_params.model_copy(update={"camera_names": [*names]})})
