"""Keys of pi0, pi0.5 and SmolVLA."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Count
from embodyrl.policies.flow.settings import FlowSettings, GreedyStart
from embodyrl.policies.settings import AdapterSettings

Normalization = StrEnum("Normalization", ["mean_std", "quantiles"])


class VlaSettings(FlowSettings, AdapterSettings):
    """pi0 and SmolVLA: the state is a token."""

    greedy_start: GreedyStart = GreedyStart.random
    """Where greedy acting begins: at noise drawn from the observation's bytes (random: as published evaluations draw
    it, and still the same for the same observation), or in the middle of the noise (zero)."""
    num_images_in_input: Annotated[int, Field(ge=1, le=64)] = 2
    """Camera images per query, in the order of the checkpoint's own; further ones are missing and masked."""
    horizon: Count | None = None
    """H: actions of a chunk, of which num_action_chunks are executed; default: the checkpoint's."""
    normalization: Normalization = Normalization.mean_std
    """Statistics that scale states and actions: mean_std (pi0, SmolVLA) or quantiles (q01 and q99 are -1 and 1)."""
    unnorm_key: str | None = None
    """Robot or data set whose statistics apply, where a checkpoint has those of several."""
    delta_dims: Annotated[int, Field(ge=0, le=32)] = 0
    """So many first numbers of an action are relative to those of the state; openpi's pi0_libero has 6."""
    train_expert_only: bool = True
    """Train the action expert and the projections of its inputs and outputs; false: the vision-language model too.
    With is_lora the same parts get adapters instead."""

    def problems(self) -> Iterator[str]:
        """No more actions are executed than there are."""
        yield from super().problems()
        if self.horizon is not None and self.num_action_chunks > self.horizon:
            yield (
                f"model.num_action_chunks={self.num_action_chunks} executes more than the model.horizon={self.horizon} "
                "actions of a chunk; lower it."
            )


class Pi05Settings(VlaSettings):
    """pi0.5: the state is text, or nothing."""

    normalization: Normalization = Normalization.quantiles
    """Statistics that scale states and actions: quantiles (q01 and q99 are -1 and 1: pi0.5) or mean_std."""
    state_in_prompt: bool = True
    """Write the state into the prompt; false: as openpi's pi05_libero, which reads no state at all."""
