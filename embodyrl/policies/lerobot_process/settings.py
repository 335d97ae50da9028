"""Config keys for `model=lerobot`."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Path, Seconds
from embodyrl.config.shared import Precision
from embodyrl.policies.steering.settings import ResidualSettings

GRID = 8
"""Rows and columns of the means of a camera image that the actor reads."""
Likelihood = StrEnum("Likelihood", ["none", "dsrl", "residual"])


class LeRobotProcessSettings(ResidualSettings):
    """Config keys for a policy of an installed LeRobot."""

    needs = {"likelihood=dsrl": "noise_bound noise_repeated"}

    path: Path | None = None
    """Folder of `save_pretrained`: config.json, weights and the files of both processors."""
    precision: Precision = Precision.fp32
    """Compute precision of the actor: fp32. LeRobot determines the policy's precision."""
    python: str | None = None
    """Python executable with LeRobot installed; default: this interpreter. Code of its packages runs."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names, else the first cameras."""
    likelihood: Likelihood = Likelihood.none
    """Source of log-probabilities for RL: none (evaluation only), or an actor on the frozen policy that selects its
    initial noise (dsrl) or corrects its chunks (residual)."""
    noise_bound: Annotated[float, Field(gt=0, le=100)] = 1.5
    """dsrl: limit of the selected noise, -noise_bound..noise_bound."""
    noise_repeated: bool = False
    """dsrl: one noise vector for all actions of a chunk; false: one vector per action."""
    load_timeout_s: Seconds = 600.0
    """Time limit for loading the policy."""
    answer_timeout_s: Seconds = 120.0
    """Time limit of a reply."""

    @property
    def steers(self) -> bool:
        """True if the policy is frozen and an actor is trained."""
        return self.likelihood is not Likelihood.none

    def problems(self) -> Iterator[str]:
        """Yield an error if the precision is not fp32."""
        yield from super().problems()
        if self.precision is not Precision.fp32:
            yield f"model.precision={self.precision}: the actor computes in fp32; set model.precision=fp32."
