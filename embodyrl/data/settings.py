"""Config keys for demonstrations and for SFT objectives."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from embodyrl.config.settings import Constraint, Count, Path, Positive, Seconds, Settings, valid_if
from embodyrl.text.settings import DataSettings

OpenAndClosed = Annotated[list[float], valid_if(lambda v: len(set(v)) == len(v) == 2), Constraint("[open,closed]")]
GripperIndex = Annotated[int, Field(ge=-1000, lt=1000)]


class DemonstrationSettings(DataSettings):
    """Config keys for robot demonstrations."""

    more: list[Path] = []
    """Additional folders of demonstrations of the same environment, combined with data.path."""
    action_key: str = "action"
    """Column of the actions.
    Like state_key, cameras, gripper, gripper_index and image_rotation_deg, this key applies only to data sets that
    embodyrl did not record."""
    state_key: str = "observation.state"
    """Column of the state."""
    cameras: dict[str, str] = {}
    """Column of each camera to read, for example {front: observation.image}; default: all columns named
    observation.images.<camera>. Use the camera names of the environment."""
    gripper: OpenAndClosed | None = None
    """Action values that open and close the gripper, for example [1,0].
    Without this key, the policy is rejected in environments that declare a gripper."""
    gripper_index: GripperIndex = -1
    """Index of the gripper in the action vector."""
    image_rotation_deg: Literal[0, 180] = 0
    """Rotation in degrees that turns the stored frames upright."""
    history: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of observation steps per sample, oldest first, for policies with n_obs_steps; the action chunk begins at
    the oldest step."""
    skip_nonfinite: bool = False
    """If true, skip episodes with NaN or infinite numbers; if false, report an error."""
    actors: list[Literal["policy", "expert", "person", "unknown"]] = []
    """Train only on chunks whose actions all come from these sources (policy, expert, person or unknown); default: all
    chunks. unknown: third-party data or data without recorded sources."""
    keys_by_condition = {"gripper": "gripper_index"}

    image_aug: bool = True
    """Augment images by random crop, brightness, contrast, saturation and hue, like OpenVLA's fine-tuning recipe."""


Objective = StrEnum("Objective", ["imitation", "dpo", "preference", "success"])
PAIRED = (Objective.dpo, Objective.preference)


class ObjectiveSettings(Settings):
    """Config keys for the SFT objective."""

    learner: ClassVar[str] = "embodyrl.learners.imitation:ImitationLearner"
    """Import path (package.module:class) of the SFT learner."""
    keys_by_condition = {
        "name=dpo": "beta reference_path",
        "name=dpo|preference": "label_smoothing",
    }

    name: Objective = Objective.imitation
    """imitation: cross-entropy or regression on actions and answers. dpo: DPO on pairs of answers, or on pairs of
    episodes with the same initial state, chunk by chunk. preference, success: train a value head as a reward model
    (reward.path), from pairs of answers or from success labels of video frames."""
    beta: Positive = 0.1
    """With objective.name=dpo: coefficient of the log-ratios; larger values keep the policy closer to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With objective.name=dpo or preference: assumed fraction of pairs with a wrong label."""
    reference_path: Path | None = None
    """With objective.name=dpo: weights of the reference; default: the initial weights."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the policy with a reference policy."""
        return self.name is Objective.dpo

    @property
    def needs_text_pairs(self) -> bool:
        """True if the data must be rows of text with two answers."""
        return self.name in PAIRED

    @property
    def trains_reward_model(self) -> bool:
        """True if a value head is trained as a reward model."""
        return self.name in (Objective.preference, Objective.success)


EpisodeFilter = StrEnum("EpisodeFilter", ["success", "all"])
FrameFormat = StrEnum("FrameFormat", ["png", "mp4"])
Labels = StrEnum("Labels", ["executed", "expert"])


class DaggerSettings(Settings):
    """Config keys for DAgger."""

    rounds: Count = 3
    """Number of rounds. In each round, an expert labels states visited by the policy, and SFT runs on all labels."""
    expert: str = "scripted"
    """scripted: the environment's expert labels every state that the policy visits. human: a person corrects failed
    episodes in the browser. package.module:class: a custom expert."""
    corrections: Count = 20
    """Maximum number of episodes that a person corrects in each round, the most uncertain first."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Local port of the page for corrections; 0: any free port."""
    correction_timeout_s: Seconds = 3600.0
    """Time in seconds without input on the page after which the command exits; run the same command again to resume."""
    keys_by_condition = {"expert!=scripted": "corrections port correction_timeout_s"}


class CollectSettings(Settings):
    """Config keys for the collection of demonstrations."""

    out: Path | None = None
    """Output folder of the demonstrations; an incomplete collection is resumed."""
    episodes: Count = 50
    """Number of episodes to record, distributed evenly over the tasks."""
    filter: EpisodeFilter = EpisodeFilter.success
    """success: keep only episodes that reach their goal; all: keep every episode."""
    labels: Labels = Labels.executed
    """executed: record the executed actions (of a scripted expert: before model.expert_noise is added). expert: record
    the expert's actions for the same states."""
    images: FrameFormat = FrameFormat.png
    """Format of the images. png: lossless, inside the parquet files; mp4: lossy, but much smaller."""
