"""Config keys for JAX environments."""

from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import ChangesStateIds
from embodyrl.envs.settings import EnvSettings, RewardSettings


class FunctionalSettings(EnvSettings, RewardSettings):
    """Config keys for JAX environments."""

    id: Annotated[str | None, ChangesStateIds] = None
    """Environment: gymnax:NAME, brax:NAME or playground:NAME (for example brax:ant), or package.module:attr of a
    function that returns an environment with reset(key) and step(state, action)."""
    kwargs: Annotated[dict[str, Any], ChangesStateIds] = {}
    """Keyword arguments of the environment's constructor."""
    success_key: Annotated[str, Field(min_length=1)] | None = None
    """Key of the success value in a state's metrics or info; a value above 0 is a success. null: the environment
    reports no success, and evaluations report returns."""
