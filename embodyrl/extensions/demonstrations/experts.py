"""Experts of DAgger: sources of the labels of a round."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from embodyrl.plan.schema import Config
from embodyrl.registry import Registry, takes


class Expert(Protocol):
    """Source of labels, open during all rounds."""

    scripted: ClassVar[bool]
    """True if the environment's scripted expert labels the states."""
    authors: ClassVar[tuple[str, ...]]
    """Authors of the actions to imitate (`data.actors`); empty: all actions."""

    def __init__(self, cfg: Config) -> None: ...

    def collect(self, cfg: Config) -> None:
        """Record one round of episodes into `collect.out`; an incomplete round is continued."""
        ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Show the progress of the training after a round."""
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
