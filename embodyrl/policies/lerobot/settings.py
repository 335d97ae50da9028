"""Common keys of LeRobot's imitation policies and their actors. Does not import torch."""

from typing import Annotated

from pydantic import Field

from embodyrl.config.shared import Precision
from embodyrl.policies.lerobot.config import LeRobotConfig
from embodyrl.policies.steering.settings import ResidualSettings
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
    """With likelihood=dsrl: bound of the noise or latent that the actor chooses, -noise_bound..noise_bound."""


def get_chunk_shape(config: LeRobotConfig) -> ChunkShape:
    """Return the chunk sizes of a config: predicted actions, executed actions and action dimension."""
    width = config.action_dim
    return ChunkShape(horizon=config.horizon_length, width=width, executed=config.n_action_steps, action_dim=width)
