"""Config keys of the command `recap`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Count, Path, Positive, Settings

LabelSource = StrEnum("LabelSource", ["advantage", "shuffled"])


class RecapSettings(Settings):
    """Config keys for rounds of collection, value training, labels and SFT (RECAP, arXiv 2511.14759)."""

    out: Path
    """Output folder: episodes, labels, runs and the report; the same command resumes an incomplete RECAP run."""
    rounds: Count = 2
    """Number of rounds. Each round trains the initial weights on the data of all rounds so far."""
    advantage_steps: Annotated[int, Field(ge=1, le=10**6)] | None = 50
    """Number N of env steps in the N-step advantage: N rewards plus the value after N env steps.
    null: all rewards of the episode (Monte Carlo)."""
    positive_share: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Fraction of frames labelled "positive" in each task: the frames with the highest advantages."""
    failure_penalty: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Penalty for a failed episode, as a multiple of the longest episode of its task.
    With values below 1, the end of a failure can have a higher return than the start of a success."""
    labels: LabelSource = LabelSource.advantage
    """Source of the labels. advantage: rank of the advantage. shuffled: the same labels, shuffled within each task, as
    a control."""
    value_steps: Count = 400
    """Number of optimizer steps of each value model, whose inputs are features of the initial policy."""
    value_batch_size: Count = 128
    """Number of frames per optimizer step of a value model."""
    value_lr: Positive = 1e-3
    """Learning rate of the value models."""
    value_folds: Annotated[int, Field(ge=1, le=20)] = 2
    """Number of value models. Each model predicts values of episodes that it did not train on.
    1: one model, which also predicts values of its training episodes."""
    evaluate: bool = True
    """Evaluate the initial policy and the policy of each round on env.eval."""
