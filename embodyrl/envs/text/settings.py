"""Config keys for conversations."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.envs.settings import EnvSettings, RewardFactor


class TextSettings(EnvSettings):
    """Config keys for a conversation, with data from `data` and rewards from `reward`."""

    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """Maximum replies of an episode; more than one if tools answer in between."""
    tools: list[str] = []
    """Tools that a reply may call: calculator, python, or package.module:function that takes and returns text."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of a tool's answer; use user if the model's chat template has no tool role."""
    reward_coef: RewardFactor = 1.0
    """Factor on every reward."""

    @property
    def max_chunks(self) -> int:
        """Maximum number of replies of an episode."""
        return self.max_turns
