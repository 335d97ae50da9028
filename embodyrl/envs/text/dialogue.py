"""Episodes as dialogues: each observation is a user message, and each reply of the policy is an assistant message."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Never, TypeVar

import numpy as np

from embodyrl.envs.protocol import AfterStep
from embodyrl.envs.settings import NUM_SEEDS
from embodyrl.envs.text.settings import DialogueSettings
from embodyrl.errors import EnvError, NoImageError
from embodyrl.text.messages import Message, join_messages, remove_image_sizes
from embodyrl.types import (
    ActionKind,
    ActionSpec,
    BoolArray,
    ChunkResult,
    EnvSpec,
    FloatArray,
    IntArray,
    SimulatorSpec,
    TextSpec,
)


def truncate_text(text: str, width: int) -> str:
    """Return the longest prefix of a string that fits into `width` UTF-8 bytes."""
    # `ignore` drops a character that the cut has split.
    return text.encode(errors="replace")[:width].decode(errors="ignore")


def create_reply_result(actions: FloatArray, *, parts: int = 0) -> tuple[ChunkResult, IntArray]:
    """Return a result without rewards for replies with token ids `actions` [n, K, 1], and the last token of each [n].

    `parts` is the number of reward components.
    """
    result = ChunkResult.empty(*actions.shape[:2], num_components=parts)
    result.valid[:] = actions[:, :, 0] >= 0
    result.valid[:, 0] = True  # an empty reply is an action, too
    return result, result.valid.sum(axis=1) - 1


class ReplyEnv:
    """Base class of text environments, which have neither images to record nor a scripted expert."""

    task_limit: int | None = None

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec

    def render(self, env_index: int) -> np.ndarray:
        """Raise NoImageError, because there is no image to record."""
        raise NoImageError(f"env '{self.spec.name}' is a text environment without images to record; set video=none.")

    def expert_chunk(self, *_: Any, **__: Any) -> Never:
        """Raise EnvError, because there is no scripted expert."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert; choose another model.")


def build_dialogue_spec(cfg: DialogueSettings, name: str, task: str, prompt_bytes: int) -> EnvSpec:
    """Return the spec of a dialogue: one task, with one initial state per seed.

    `prompt_bytes` is the maximum size of a prompt without the system message.
    """
    return EnvSpec(
        name=name,
        action=ActionSpec(dim=1, kind=ActionKind.text),
        tasks=(task,),
        states_per_task=(NUM_SEEDS,),
        text=TextSpec(
            max_replies=cfg.max_turns,
            roles=tuple(
                (*(("system",) if cfg.prompt else ()), *("user", "assistant") * turns, "user")
                for turns in range(min(cfg.history, 2) + 1)
            ),
            prompt_bytes=len(cfg.prompt.encode()) + prompt_bytes,
        ),
        simulator=SimulatorSpec(may_truncate=True, renders=False),
    )


@dataclass(kw_only=True)
class Dialogue:
    """State of the dialogue in one environment."""

    observation: str = ""
    """Current observation."""
    turns: list[Message] = field(default_factory=list)
    """Messages of earlier turns that the next prompt contains."""
    steps: int = 0
    """Number of executed replies."""
    reply: str = ""
    """Reply of the policy to the current observation."""


class TurnResult(NamedTuple):
    """Reward of one reply, and the flags of the environment after it."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool


D = TypeVar("D", bound=Dialogue)


class DialogueEnv(ReplyEnv, ABC, Generic[D]):
    """Base class of text environments (`TextEnv`) whose prompt contains the last turns.

    An action chunk is a reply; the reward of the reply is assigned to its last token.
    """

    reply_bytes: int
    """Maximum number of bytes of an earlier reply in the prompt."""

    def __init__(self, spec: EnvSpec, cfg: DialogueSettings, dialogues: list[D]) -> None:
        super().__init__(spec)
        self.dialogues = dialogues
        self._prompt, self._max_messages, self._reward_coef = cfg.prompt, 2 * cfg.history, cfg.reward_coef

    @abstractmethod
    def play_turns(self, env_indices: Sequence[int]) -> Iterable[TurnResult]:
        """Execute the reply of each environment and update the observation of its dialogue."""

    def set_replies(self, env_indices: Sequence[int], replies: Sequence[str], cut_off: BoolArray) -> None:
        """Set the replies of the next `step_chunk`; replies that hit the length limit are used unchanged."""
        for env_index, reply in zip(env_indices, replies, strict=True):
            self.dialogues[env_index].reply = reply

    def step_chunk(
        self, env_indices: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Execute the replies of `set_replies`; `actions` [n, K, 1] are their token ids, padded with negative ids."""
        result, last = create_reply_result(actions)
        dialogues = [self.dialogues[env_index] for env_index in env_indices]
        for dialogue in dialogues:
            self._store_turn(dialogue)
        for i, (dialogue, turn) in enumerate(zip(dialogues, self.play_turns(env_indices), strict=True)):
            dialogue.steps += 1
            position = i, last[i]
            result.reward[position] = self._reward_coef * turn.reward
            result.terminated[position], result.success[position] = turn.terminated, turn.success
            reaches_limit = turn.truncated or dialogue.steps >= self.spec.text.max_replies
            result.truncated[position] = reaches_limit and not turn.terminated
        return result

    def _store_turn(self, dialogue: D) -> None:
        """Append the current observation and reply to the earlier turns; keep the last `history` turns."""
        reply_message = Message(role="assistant", content=truncate_text(dialogue.reply, self.reply_bytes))
        turns = [*dialogue.turns, Message(role="user", content=dialogue.observation), reply_message]
        dialogue.turns = turns[-self._max_messages :] if self._max_messages else []

    def instruction(self, env_index: int) -> str:
        """Return the system message, the earlier turns and the current observation as one prompt."""
        dialogue = self.dialogues[env_index]
        system_messages = [Message(role="system", content=self._prompt)] if self._prompt else []
        messages = [*system_messages, *dialogue.turns, Message(role="user", content=dialogue.observation)]
        return remove_image_sizes(join_messages(messages))

    def observe(self, env_indices: Sequence[int], images: Any, state: Any, rows: Any = None) -> None:
        """Do nothing, because the instruction contains the observation."""
