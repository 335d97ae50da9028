"""Config keys for conversations."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.envs.settings import EnvSettings, RewardFactor


class TextSettings(EnvSettings):
    """Config keys for conversations; the section `data` contains the prompts, and `reward` the reward functions."""

    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """Maximum number of replies per episode; values above 1 need tools."""
    tools: list[str] = []
    """Tools that a reply may call: calculator, python, or package.module:function that takes and returns a string (at
    most 1024 bytes, or the number in its attribute answer_bytes)."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of a tool's answer; use user if the model's chat template has no tool role."""
    reward_coef: RewardFactor = 1.0
    """Factor that multiplies all rewards."""

    @property
    def max_chunks(self) -> int:
        """Maximum number of replies of an episode."""
        return self.max_turns
