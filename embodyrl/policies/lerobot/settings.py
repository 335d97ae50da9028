"""Common keys of LeRobot's imitation policies and their actors. Does not import torch."""

from typing import Annotated

from pydantic import Field

from embodyrl.config.shared import Precision
from embodyrl.policies.lerobot.config import LeRobotConfig
from embodyrl.policies.steering.settings import ResidualSettings, SteeringShape
from embodyrl.policies.vla.records import ChunkShape


class LeRobotSettings(ResidualSettings):
    """Config keys for a policy in LeRobot's layout."""

    keys_by_condition = {"likelihood=dsrl": "noise_bound"}

    precision: Precision = Precision.fp32
    """Compute precision; only fp32 is supported."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names."""
    unnorm_key: str | None = None
    """Key (robot) of the normalization statistics, if an older checkpoint has statistics of several robots."""
    noise_bound: Annotated[float, Field(gt=0, le=100)] = 1.5
    """dsrl: bound of the noise or latent that the actor chooses, -noise_bound..noise_bound."""


def chunk_shape(config: LeRobotConfig) -> ChunkShape:
    """Return the chunk sizes of a config: predicted actions, executed actions and action dimension."""
    width = config.action_dim
    return ChunkShape(horizon=config.horizon_length, width=width, executed=config.n_action_steps, action_dim=width)


def steering_shape(cfg: LeRobotSettings, config: LeRobotConfig, features: int, num_actor_values: int) -> SteeringShape:
    """Return the input and output sizes of the actor for a frozen model with `features` features.

    `num_actor_values`: number of values that the DSRL actor chooses per chunk.
    """
    if cfg.is_residual:
        return SteeringShape.for_residual(cfg, features, config.action_dim)
    return SteeringShape.for_noise(features, num_actor_values, actions=config.n_action_steps, bound=cfg.noise_bound)
