"""Keys of conversations."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.envs.settings import EnvSettings, RewardFactor


class TextSettings(EnvSettings):
    """A conversation; `data` and `reward` say about what and what it earns."""

    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """Replies of one text episode; more than one where tools answer in between."""
    tools: list[str] = []
    """Tools that a text reply may call: calculator, python, or package.module:function of a text."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of a tool's answer; user where the model's chat template has no tool role."""
    reward_coef: RewardFactor = 1.0
    """Factor on every reward."""

    @property
    def max_chunks(self) -> int:
        """Replies of an episode."""
        return self.max_turns
