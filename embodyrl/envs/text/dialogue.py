"""Episodes as dialogues: each observation is a user message, and each reply of the policy is an assistant message."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Never, Protocol, TypeVar

import numpy as np

from embodyrl.envs.text.environment import truncate_text
from embodyrl.errors import EnvError, NoImageError
from embodyrl.text.messages import Message, join_messages
from embodyrl.types import BoolArray, EnvSpec


class DialogueSettings(Protocol):
    """Interface of settings that determine the prompt of a dialogue."""

    prompt: str
    """System message; empty: no system message."""
    history: int
    """Number of earlier turns (observation and reply) in the prompt."""


@dataclass(kw_only=True)
class Dialogue:
    """State of the dialogue in one environment."""

    observation: str = ""
    """Current observation."""
    turns: list[Message] = field(default_factory=list)
    """Messages of earlier turns that the next prompt contains."""
    steps: int = 0
    reply: str = ""


D = TypeVar("D", bound=Dialogue)


class DialogueEnv(Generic[D]):
    """Base class of text environments whose prompt contains the last turns."""

    task_limit: int | None = None
    reply_bytes: int
    """Maximum number of bytes of an earlier reply in the prompt."""

    def __init__(self, spec: EnvSpec, cfg: DialogueSettings, dialogues: list[D]) -> None:
        self.spec, self.dialogues = spec, dialogues
        self._prompt, self._max_messages = cfg.prompt, 2 * cfg.history

    def set_replies(self, env_indices: Sequence[int], replies: Sequence[str], cut_off: BoolArray) -> None:
        """Set the replies of the next `step_chunk`; replies that hit the length limit are used unchanged."""
        for env_index, reply in zip(env_indices, replies, strict=True):
            self.dialogues[env_index].reply = reply

    def store_turn(self, dialogue: D) -> None:
        """Append the current observation and reply to the earlier turns; keep the last `history` turns."""
        reply_message = Message(role="assistant", content=truncate_text(dialogue.reply, self.reply_bytes))
        turns = [*dialogue.turns, Message(role="user", content=dialogue.observation), reply_message]
        dialogue.turns = turns[-self._max_messages :] if self._max_messages else []

    def instruction(self, env_index: int) -> str:
        """Return the system message, the earlier turns and the current observation as one prompt."""
        dialogue = self.dialogues[env_index]
        system_messages = [Message(role="system", content=self._prompt)] if self._prompt else []
        return join_messages([*system_messages, *dialogue.turns, Message(role="user", content=dialogue.observation)])

    def observe(self, env_indices: Sequence[int], images: Any, state: Any, rows: Any = None) -> None:
        """Do nothing, because the instruction contains the observation."""

    def render(self, env_index: int) -> np.ndarray:
        """Raise NoImageError, because there is no image."""
        raise NoImageError(f"env '{self.spec.name}' is a text environment without images; set video=none.")

    def expert_chunk(self, *_: Any, **__: Any) -> Never:
        """Raise EnvError, because there is no scripted expert."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert; choose another model.")
