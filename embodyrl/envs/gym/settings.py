"""Keys of Gymnasium environments."""

from typing import Annotated, Any

from embodyrl.config.settings import NumbersStates
from embodyrl.envs.settings import EnvSettings, RewardSettings


class GymSettings(EnvSettings, RewardSettings):
    """Any Gymnasium environment."""

    id: Annotated[str | None, NumbersStates] = None
    """Environment id, or package.module:Class."""
    kwargs: Annotated[dict[str, Any], NumbersStates] = {}
    """Passed to the environment's constructor."""
    wrappers: Annotated[list[str | dict[str, Any]], NumbersStates] = []
    """Wrappers, innermost first: package.module:attr of a callable env -> env, or {name: package.module:attr, k: v}."""

    @property
    def wrapped(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of each wrapper."""
        named = [{"name": item} if isinstance(item, str) else item for item in self.wrappers]
        return [(str(item.get("name", "")), {k: v for k, v in item.items() if k != "name"}) for item in named]
