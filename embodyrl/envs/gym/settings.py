"""Keys of Gymnasium environments."""

from typing import Any

from embodyrl.envs.settings import EnvSettings, RewardSettings


class GymSettings(EnvSettings, RewardSettings):
    """Any Gymnasium environment."""

    id: str | None = None
    """Environment id, or package.module:Class."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor."""
    wrappers: list[str | dict[str, Any]] = []
    """Wrappers, innermost first: package.module:attr of a callable env -> env, or {name: package.module:attr, k: v}."""

    @property
    def wrapped(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of each wrapper."""
        named = [{"name": item} if isinstance(item, str) else item for item in self.wrappers]
        return [(str(item.get("name", "")), {k: v for k, v in item.items() if k != "name"}) for item in named]
