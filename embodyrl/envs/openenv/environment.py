"""Text environment on an OpenEnv server: the prompt contains the observation, and the reply is the action."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embodyrl.envs.openenv.session import Session
from embodyrl.envs.openenv.settings import OpenEnvSettings
from embodyrl.envs.text.dialogue import Dialogue, DialogueEnv, TurnResult, truncate_text
from embodyrl.errors import EnvError
from embodyrl.types import EnvSpec, EpisodeStart


class OpenEnv(DialogueEnv[Dialogue]):
    """Text environment on an OpenEnv server: each reply is an action.

    Each environment has a separate session, which begins with the first episode of the environment.
    """

    reply_bytes = 1 << 12

    def __init__(self, spec: EnvSpec, cfg: OpenEnvSettings, action_key: str, num_envs: int) -> None:
        super().__init__(spec, cfg, [Dialogue() for _ in range(num_envs)])
        self._cfg, self._action_key = cfg, action_key
        self._sessions: dict[int, Session] = {}

    def reset(self, env_indices: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start an episode in each environment; the reset id is the seed of the episode.

        Raises:
            EnvError: see `Session`.
        """
        for env_index in env_indices:
            if env_index not in self._sessions:
                self._sessions[env_index] = Session(self._cfg)
        # Send all requests before the first result is read, so that the server can work on them in parallel.
        for env_index, start in zip(env_indices, starts, strict=True):
            self._sessions[env_index].send("reset", {"seed": start.reset_id})
        for env_index in env_indices:
            self.dialogues[env_index] = Dialogue(
                observation=self._format_observation(self._sessions[env_index].receive().observation)
            )

    def play_turns(self, env_indices: Sequence[int]) -> Iterator[TurnResult]:
        """Send each reply to the server as an action.

        Raises:
            EnvError: see `Session`.
        """
        for env_index in env_indices:
            self._sessions[env_index].send(
                "step", {**self._cfg.action, self._action_key: self.dialogues[env_index].reply}
            )
        for env_index in env_indices:
            turn = self._sessions[env_index].receive()
            self.dialogues[env_index].observation = self._format_observation(turn.observation)
            yield TurnResult(turn.reward, turn.done, False, turn.reward >= self._cfg.success_reward)

    def close(self) -> None:
        """End the sessions; idempotent."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _format_observation(self, observation: Mapping[str, Any]) -> str:
        """Return the observation as text for the prompt, truncated to `env.observation_bytes`."""
        value: Any = {name: item for name, item in observation.items() if name != "metadata"}
        for part in (self._cfg.observation_key or "").split(".") if self._cfg.observation_key else ():
            if not isinstance(value, Mapping) or part not in value:
                names = ", ".join(observation)
                raise EnvError(
                    f"env.observation_key={self._cfg.observation_key} does not exist in the observations of "
                    f"{self._cfg.url}. Choose one of: {names}."
                )
            value = value[part]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return truncate_text(text, self._cfg.observation_bytes)
