"""Config keys for `model=lerobot`."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Path, Seconds
from embodyrl.config.shared import Precision
from embodyrl.policies.steering.settings import ResidualSettings

GRID = 8
"""Number of rows and columns to which camera images are averaged for the actor."""
Likelihood = StrEnum("Likelihood", ["none", "dsrl", "residual"])


class LeRobotProcessSettings(ResidualSettings):
    """Config keys for a policy that runs in an installed LeRobot."""

    needs = {"likelihood=dsrl": "noise_bound noise_repeated"}

    path: Path | None = None
    """Folder written by `save_pretrained`: config.json, weights, and the files of both processors."""
    precision: Precision = Precision.fp32
    """Compute precision of the actor (only fp32). The precision of the policy is set by LeRobot."""
    python: str | None = None
    """Python executable of an environment with LeRobot, which runs the policy and its packages; default: this
    interpreter."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names, else the first cameras."""
    likelihood: Likelihood = Likelihood.none
    """Source of log-probabilities for RL. none: evaluation only. dsrl, residual: an actor on the frozen policy chooses
    its initial noise (dsrl) or corrects its chunks (residual)."""
    noise_bound: Annotated[float, Field(gt=0, le=100)] = 1.5
    """dsrl: bound of the initial noise that the actor chooses, -noise_bound..noise_bound."""
    noise_repeated: bool = False
    """dsrl: one noise vector for all actions of a chunk; false: one vector per action."""
    load_timeout_s: Seconds = 600.0
    """Maximum time in seconds for loading the policy."""
    answer_timeout_s: Seconds = 120.0
    """Maximum time in seconds for a reply."""

    @property
    def steers(self) -> bool:
        """True if the policy is frozen and an actor is trained."""
        return self.likelihood is not Likelihood.none

    def problems(self) -> Iterator[str]:
        """Yield an error if the precision is not fp32."""
        yield from super().problems()
        if self.precision is not Precision.fp32:
            yield f"model.precision={self.precision}: the actor computes in fp32; set model.precision=fp32."
