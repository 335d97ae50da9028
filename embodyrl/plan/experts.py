"""Interface of the experts of DAgger, which label or correct the episodes of a round."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from embodyrl.plan.schema import Config
from embodyrl.registry import load


class Expert(Protocol):
    """Source of expert actions for DAgger; one instance is used for all rounds."""

    scripted: ClassVar[bool]
    """True if the environment's scripted expert labels the states."""
    target_actors: ClassVar[tuple[str, ...]]
    """Actors whose actions are the targets of SFT (`data.actors`); empty: all actors."""

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


EXPERTS = {
    "human": "embodyrl.play.human:HumanExpert",
    "scripted": "embodyrl.commands.dagger:ScriptedExpert",
}
"""Import paths of the built-in experts, by name."""


def find_expert(name: str) -> type[Expert]:
    """Return the class of the expert `dagger.expert`: a name of `EXPERTS` or an import path.

    Raises:
        UnknownNameError: there is no such expert.
    """
    return load(name, "dagger.expert", wants="a class with collect, on_step and close", fits=_is_expert, names=EXPERTS)


def _is_expert(value: Any) -> bool:
    return isinstance(value, type) and all(hasattr(value, name) for name in ("collect", "on_step", "close"))
