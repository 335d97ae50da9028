"""Keys of small actor-critic networks."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Count, Must
from embodyrl.policies.settings import WeightSettings


class ActorCriticSettings(WeightSettings):
    """Small networks."""

    hidden_sizes: Annotated[list[Count], Field(min_length=1), Must("a list of widths, for example [64,64]")] = [
        64,
        64,
    ]
    """Widths of the hidden layers (mlp, cnn), of the policy's and of the value's network."""
    activation: Literal["tanh", "relu"] | None = None
    """Between the hidden layers; default tanh, with images relu."""
    log_std_init: Annotated[float, Field(ge=-20, le=2)] = 0.0
    """Real-valued actions: logarithm of the standard deviation at first, in shares of half the action range."""
    ortho_init: bool = True
    """Begin with orthogonal weights and the policy's last layer near 0; false: as torch begins layers."""
    noise_correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Real-valued actions: correlation of the exploration of one action with that of the next in the same chunk."""
    normalize_state: bool | None = None
    """Shift and scale states by running statistics of training, which the weights keep; default with real actions."""
    squashed: bool = False
    """Real-valued actions: tanh of a Gaussian whose spread depends on the observation too, as SAC wants it."""
