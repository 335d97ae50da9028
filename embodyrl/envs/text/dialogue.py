"""Episodes as dialogues: each observation is a user message, each reply of the policy an assistant message."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Never, Protocol, TypeVar

import numpy as np

from embodyrl.envs.text.environment import clip
from embodyrl.errors import EnvError, NoImageError
from embodyrl.extensions.conversation import Message, join_messages
from embodyrl.types import BoolArray, EnvSpec


class DialogueSettings(Protocol):
    """Settings that determine the prompt of a dialogue."""

    prompt: str
    """System message; empty: none."""
    history: int
    """Number of earlier turns in the prompt."""


@dataclass(kw_only=True)
class Dialogue:
    """Dialogue of one slot."""

    seen: str = ""
    """Current observation."""
    turns: list[Message] = field(default_factory=list)
    """Earlier observations and replies that the next prompt contains."""
    steps: int = 0
    reply: str = ""


D = TypeVar("D", bound=Dialogue)


class DialogueEnv(Generic[D]):
    """Base class of text environments whose prompt contains the last turns; they have no images and no expert."""

    task_limit: int | None = None
    reply_bytes: int
    """Maximum bytes of an earlier reply in the prompt."""

    def __init__(self, spec: EnvSpec, cfg: DialogueSettings, dialogues: list[D]) -> None:
        self.spec, self.dialogues = spec, dialogues
        self._prompt, self._kept = cfg.prompt, 2 * cfg.history

    def set_replies(self, slots: Sequence[int], replies: Sequence[str], cut_off: BoolArray) -> None:
        """Set the replies of the next `step_chunk`; replies that hit the length limit are used unchanged."""
        for slot, reply in zip(slots, replies, strict=True):
            self.dialogues[slot].reply = reply

    def remember(self, dialogue: D) -> None:
        """Append the current observation and reply to the earlier turns, of which `history` are kept."""
        said = Message(role="assistant", content=clip(dialogue.reply, self.reply_bytes))
        turns = [*dialogue.turns, Message(role="user", content=dialogue.seen), said]
        dialogue.turns = turns[-self._kept :] if self._kept else []

    def instruction(self, slot: int) -> str:
        """Return the system message, the earlier turns and the current observation as one instruction."""
        dialogue = self.dialogues[slot]
        rules = [Message(role="system", content=self._prompt)] if self._prompt else []
        return join_messages([*rules, *dialogue.turns, Message(role="user", content=dialogue.seen)])

    def observe(self, slots: Sequence[int], images: Any, state: Any, rows: Any = None) -> None:
        """Write nothing: the observation is in the instruction."""

    def render(self, slot: int) -> np.ndarray:
        """Raise an error: there is no image."""
        raise NoImageError(f"env '{self.spec.name}' is a text environment; set video=none.")

    def expert_chunk(self, *_: Any, **__: Any) -> Never:
        """Raise an error: there is no scripted expert."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert; choose another model.")
