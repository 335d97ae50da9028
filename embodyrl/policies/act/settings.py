"""Config keys for ACT."""

from enum import StrEnum

from embodyrl.config.settings import Positive
from embodyrl.policies.lerobot.settings import LeRobotSettings

Likelihood = StrEnum("Likelihood", ["gaussian", "dsrl", "residual"])


class ActSettings(LeRobotSettings):
    """Config keys for ACT in LeRobot's layout."""

    needs = {"likelihood=gaussian": "action_std"}

    likelihood: Likelihood = Likelihood.gaussian
    """Source of log-probabilities for RL: a Gaussian around the chunk (gaussian). With dsrl and residual the model is
    frozen, and an actor learns with algorithm=sac to choose the latent, or to correct the chunk."""
    action_std: Positive = 0.1
    """gaussian: standard deviation of normalized actions."""
    temporal_ensemble: bool = False
    """Temporal ensembling: pass whole chunks to an environment that averages them (env.ensemble_chunk); evaluation
    only."""
