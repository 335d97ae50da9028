"""Config keys for pi0, pi0.5 and SmolVLA."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Count
from embodyrl.policies.flow.settings import FlowSettings, GreedyStart
from embodyrl.policies.settings import AdapterSettings

Normalization = StrEnum("Normalization", ["mean_std", "quantiles"])


class VlaSettings(FlowSettings, AdapterSettings):
    """Config keys for pi0 and SmolVLA, whose state is a token."""

    greedy_start: GreedyStart = GreedyStart.random
    """Initial noise of greedy actions. random: Gaussian noise as in published evaluations, seeded by a hash of the
    observation; zero: no noise."""
    num_images_in_input: Annotated[int, Field(ge=1, le=64)] = 2
    """Number N of camera images per inference: the environment's first N cameras are used as the first N cameras of
    the checkpoint; the checkpoint's remaining cameras are masked."""
    horizon: Count | None = None
    """H: number of actions per chunk, of which num_action_chunks are executed; default: the horizon of the
    checkpoint."""
    normalization: Normalization = Normalization.mean_std
    """Normalization of states and actions: mean_std (pi0, SmolVLA) or quantiles (q01 and q99 map to -1 and 1)."""
    unnorm_key: str | None = None
    """Key of the normalization statistics (robot or data set) if a checkpoint has several."""
    delta_dims: Annotated[int, Field(ge=0, le=32)] = 0
    """Number of leading action dimensions that are relative to the state; 6 for openpi's pi0_libero."""
    train_expert_only: bool = True
    """Train the action expert and its input and output projections; false: also train the vision-language model.
    With is_lora, adapters are added to the same parts."""


class Pi05Settings(VlaSettings):
    """Config keys for pi0.5, whose state is text or unused."""

    normalization: Normalization = Normalization.quantiles
    """Normalization of states and actions: quantiles (pi0.5; q01 and q99 map to -1 and 1) or mean_std."""
    state_in_prompt: bool = True
    """Write the state into the prompt; false: ignore the state, as in openpi's pi05_libero."""


def reads_state(cfg: VlaSettings) -> bool:
    """Return True if the model reads the state; pi0.5 can ignore the state."""
    return not isinstance(cfg, Pi05Settings) or cfg.state_in_prompt
