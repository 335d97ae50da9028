"""Config keys for functional environments."""

from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import NumbersStates
from embodyrl.envs.settings import EnvSettings, RewardSettings


class FunctionalSettings(EnvSettings, RewardSettings):
    """Settings of JAX environments."""

    id: Annotated[str | None, NumbersStates] = None
    """gymnax:CartPole-v1, brax:ant, playground:CartpoleBalance, or package.module:attr of a function that returns an
    environment with reset(key) and step(state, action)."""
    kwargs: Annotated[dict[str, Any], NumbersStates] = {}
    """Keyword arguments of the environment's constructor."""
    success_key: Annotated[str, Field(min_length=1)] | None = None
    """Key in the metrics or the info of a state; a value above 0 is success.
    null: no success, so the return is the result."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return self.id or self.env_type
