"""Config keys for small actor-critic networks."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Constraint, Count
from embodyrl.policies.settings import WeightSettings


class ActorCriticSettings(WeightSettings):
    """Config keys for small actor-critic networks."""

    keys_by_condition = {"squashed=false and num_action_chunks!=1": "noise_correlation"}

    hidden_sizes: Annotated[list[Count], Field(min_length=1), Constraint("a list of widths, for example [64,64]")] = [
        64,
        64,
    ]
    """Widths of the hidden layers (mlp, cnn) of the policy and value networks."""
    activation: Literal["tanh", "relu"] | None = None
    """Activation of the hidden layers; default: tanh, or relu with images."""
    log_std_init: Annotated[float, Field(ge=-20, le=2)] | None = None
    """Initial log standard deviation of continuous actions, relative to half the action range; default: in SFT, the log
    standard deviation of each dimension of the demonstrations; otherwise 0."""
    ortho_init: bool = True
    """Orthogonal initialization, with a small gain in the policy's last layer; false: PyTorch's default."""
    noise_correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Correlation of the exploration noise of consecutive actions in a chunk, for continuous actions."""
    normalize_state: bool | None = None
    """Normalize states with running statistics, which are saved with the weights; default: true for continuous actions.
    """
    squashed: bool = False
    """Sample continuous actions as the tanh of a Gaussian with state-dependent standard deviation, as in SAC."""
