"""Config keys for conversations."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Index
from embodyrl.envs.settings import EnvSettings, RewardFactor

Turns = Annotated[int, Field(ge=1, le=1000)]


class ReplySettings(EnvSettings):
    """Config keys of all text environments."""

    max_turns: Turns = 1
    """Maximum number of replies per episode."""
    reward_coef: RewardFactor = 1.0
    """Factor that multiplies all rewards."""

    @property
    def max_chunks(self) -> int:
        """Maximum number of replies of an episode."""
        return self.max_turns


class TextSettings(ReplySettings):
    """Config keys for conversations; the section `data` contains the prompts, and `reward` the reward functions."""

    max_turns: Turns = 1
    """Maximum number of replies per episode; values above 1 need tools."""
    tools: list[str] = []
    """Tools that a reply may call: calculator, python, or package.module:function that takes and returns a string (at
    most 1024 bytes, or the number in its attribute answer_bytes)."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of a tool's answer; use user if the model's chat template has no tool role."""


class DialogueSettings(ReplySettings):
    """Config keys of text environments whose prompt contains earlier turns."""

    prompt: str = ""
    """System message at the start of every prompt, such as the rules of a game."""
    history: Index = 0
    """Number of earlier turns in the prompt, in addition to the current observation."""
