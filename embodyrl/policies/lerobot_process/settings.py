"""Config keys for `model=lerobot`."""

from collections.abc import Iterator
from enum import StrEnum

from embodyrl.config.settings import Path, Seconds
from embodyrl.config.shared import Precision
from embodyrl.policies.steering.settings import ResidualSettings

GRID = 8
"""Rows and columns of the means of a camera image that the residual actor reads."""
Likelihood = StrEnum("Likelihood", ["none", "residual"])


class LeRobotProcessSettings(ResidualSettings):
    """Config keys for a policy of an installed LeRobot."""

    path: Path | None = None
    """Folder of `save_pretrained`: config.json, weights and the files of both processors."""
    precision: Precision = Precision.fp32
    """Compute precision of the residual actor: fp32. LeRobot determines the policy's precision."""
    python: str | None = None
    """Interpreter that has LeRobot; default: this interpreter. The process runs the code of that environment."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names, else the first cameras."""
    likelihood: Likelihood = Likelihood.none
    """Source of log-probabilities for RL: none (evaluation only), or an actor that corrects the chunks of the frozen
    policy (residual)."""
    load_timeout_s: Seconds = 600.0
    """Time limit for loading the policy."""
    answer_timeout_s: Seconds = 120.0
    """Time limit of a reply."""

    def problems(self) -> Iterator[str]:
        """Yield errors of the precision."""
        yield from super().problems()
        if self.precision is not Precision.fp32:
            yield f"model.precision={self.precision}: the residual actor computes in fp32; set model.precision=fp32."
