"""Keys of conversations."""

from typing import Annotated

from pydantic import Field

from embodyrl.envs.settings import EnvSettings, RewardFactor


class TextSettings(EnvSettings):
    """A conversation; `data` and `reward` say about what and what it earns."""

    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """Replies of one text episode; more than one where tools answer in between."""
    tools: list[str] = []
    """Tools that a text reply may call: calculator, python, or package.module:function of a text."""
    reward_coef: RewardFactor = 1.0
    """Factor on every reward."""
