"""Config keys for ACT."""

from enum import StrEnum

from embodyrl.config.settings import Positive
from embodyrl.policies.lerobot.settings import LeRobotSettings

Likelihood = StrEnum("Likelihood", ["gaussian", "dsrl", "residual"])


class ActSettings(LeRobotSettings):
    """Config keys for ACT in LeRobot's layout."""

    keys_by_condition = {"likelihood=gaussian and temporal_ensemble=false": "action_std"}

    likelihood: Likelihood = Likelihood.gaussian
    """Source of log-probabilities for RL. gaussian: a Gaussian around the chunk. dsrl, residual: the model is frozen,
    and algorithm=sac trains an actor that chooses the latent (dsrl) or corrects the chunk (residual)."""
    action_std: Positive = 0.1
    """With likelihood=gaussian: standard deviation of the noise that is added to normalized actions."""
    temporal_ensemble: bool = False
    """Temporal ensembling (evaluation only): pass whole chunks to an environment that averages overlapping chunks (see
    env.ensemble_chunk)."""
