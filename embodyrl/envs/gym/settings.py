"""Keys of Gymnasium environments."""

from typing import Any

from embodyrl.envs.settings import EnvSettings, RewardSettings


class GymSettings(EnvSettings, RewardSettings):
    """Any Gymnasium environment."""

    id: str | None = None
    """Environment id, or package.module:Class."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor."""
    wrappers: list[str] = []
    """Wrappers around a Gymnasium environment, innermost first: package.module:attr of a callable env -> env."""
