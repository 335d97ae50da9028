"""Interface of the experts of DAgger, which label or correct the episodes of a round."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from embodyrl.plan.schema import Config
from embodyrl.registry import Registry, takes


class Expert(Protocol):
    """Source of expert actions for DAgger; one instance is used for all rounds."""

    scripted: ClassVar[bool]
    """True if the environment's scripted expert labels the states."""
    authors: ClassVar[tuple[str, ...]]
    """Authors whose actions are imitated (`data.actors`); empty: all authors."""

    def __init__(self, cfg: Config) -> None: ...

    def collect(self, cfg: Config) -> None:
        """Record the episodes of one round in `collect.out`; resume an incomplete round."""
        ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Show the progress of the SFT of a round; return True to end the training."""
        ...

    def close(self) -> None:
        """Free the resources of the expert; idempotent."""
        ...


EXPERTS: Registry[type[Expert]] = Registry(
    "expert",
    group="embodyrl.dagger_experts",
    wants="a class whose argument is the config (embodyrl.extensions.demonstrations.experts.Expert)",
    fits=takes(1),
)
