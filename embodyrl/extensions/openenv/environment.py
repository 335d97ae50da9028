"""Text environment on an OpenEnv server: the prompt contains the observation, and the reply is the action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import numpy as np

from embodyrl.conversation import Message, join_messages
from embodyrl.envs.protocol import AfterStep
from embodyrl.envs.text.environment import begin_replies, clip
from embodyrl.errors import EnvError
from embodyrl.extensions.openenv.session import Session
from embodyrl.extensions.openenv.settings import OpenEnvSettings
from embodyrl.types import BoolArray, ChunkResult, EnvSpec, EpisodeStart, FloatArray

REPLY_BYTES = 1 << 12
"""Maximum bytes of an earlier reply in the prompt; the server receives the whole reply."""


@dataclass
class _Episode:
    """Current episode of one slot."""

    seen: str = ""
    turns: list[Message] = field(default_factory=list)
    steps: int = 0
    reply: str = ""


class OpenEnv:
    """Implements `TextEnv`: a chunk is a reply, whose last token gets the reward of the step.

    Each slot has its own session, which begins with its first episode.
    """

    task_limit: int | None = None

    def __init__(self, spec: EnvSpec, cfg: OpenEnvSettings, action_key: str, num_slots: int) -> None:
        self.spec, self._cfg, self._key = spec, cfg, action_key
        self._sessions: dict[int, Session] = {}
        self._episodes = [_Episode() for _ in range(num_slots)]

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start an episode in each slot; the reset id is the seed of the episode.

        Raises:
            EnvError: see `Session`.
        """
        for slot in slots:
            if slot not in self._sessions:
                self._sessions[slot] = Session(self._cfg)
        # All slots at once, so that the server can work on them in parallel.
        for slot, start in zip(slots, starts, strict=True):
            self._sessions[slot].send("reset", {"seed": start.reset_id})
        for slot in slots:
            self._episodes[slot] = _Episode(seen=self._tell(self._sessions[slot].receive().observation))

    def set_replies(self, slots: Sequence[int], replies: Sequence[str], cut_off: BoolArray) -> None:
        """Set the replies of the next `step_chunk`; a reply that hit the length limit is sent unchanged."""
        for slot, reply in zip(slots, replies, strict=True):
            self._episodes[slot].reply = reply

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Send each reply to the server as an action; `actions` [n, K, 1] are token ids (negative: padding).

        Raises:
            EnvError: see `Session`.
        """
        result, last = begin_replies(actions)
        for slot in slots:
            self._sessions[slot].send("step", {**self._cfg.action, self._key: self._episodes[slot].reply})
        for i, slot in enumerate(slots):
            turn, episode, at = self._sessions[slot].receive(), self._episodes[slot], (i, last[i])
            said = [
                Message(role="user", content=episode.seen),
                Message(role="assistant", content=clip(episode.reply, REPLY_BYTES)),
            ]
            kept = 2 * self._cfg.history
            episode.turns = [*episode.turns, *said][-kept:] if kept else []
            episode.seen, episode.steps = self._tell(turn.observation), episode.steps + 1
            result.reward[at] = self._cfg.reward_coef * turn.reward
            result.success[at] = turn.reward >= self._cfg.success_reward
            result.terminated[at] = turn.done
            result.truncated[at] = not turn.done and episode.steps >= self.spec.text.max_replies
        return result

    def instruction(self, slot: int) -> str:
        """Return the prompt: `env.prompt`, the last `env.history` turns, and the current observation."""
        rules = [Message(role="system", content=self._cfg.prompt)] if self._cfg.prompt else []
        episode = self._episodes[slot]
        return join_messages([*rules, *episode.turns, Message(role="user", content=episode.seen)])

    def observe(self, slots: Sequence[int], images: Any, state: Any, rows: Any = None) -> None:
        """Write nothing: the observation is in the instruction."""

    def render(self, slot: int) -> np.ndarray:
        """Raise an error: there is no image."""
        raise EnvError(f"env '{self.spec.name}' is a text environment; set video=none.")

    def expert_chunk(self, *_: Any, **__: Any) -> Never:
        """Raise an error: there is no scripted expert."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert; choose another model.")

    def close(self) -> None:
        """End the sessions; idempotent."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _tell(self, observation: Mapping[str, Any]) -> str:
        """Return the observation as text for the prompt, cut to `env.observation_bytes`."""
        found: Any = {name: value for name, value in observation.items() if name != "metadata"}
        for part in (self._cfg.observation_key or "").split(".") if self._cfg.observation_key else ():
            if not isinstance(found, Mapping) or part not in found:
                names = ", ".join(observation)
                raise EnvError(
                    f"env.observation_key={self._cfg.observation_key} does not exist in an observation of "
                    f"{self._cfg.url}. Fields: {names}."
                )
            found = found[part]
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        return clip(text, self._cfg.observation_bytes)
