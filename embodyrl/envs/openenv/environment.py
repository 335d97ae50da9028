"""Text environment on an OpenEnv server: the prompt contains the observation, and the reply is the action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from embodyrl.envs.openenv.session import Session
from embodyrl.envs.openenv.settings import OpenEnvSettings
from embodyrl.envs.protocol import AfterStep
from embodyrl.envs.text.dialogue import Dialogue, DialogueEnv
from embodyrl.envs.text.environment import create_reply_result, truncate_text
from embodyrl.errors import EnvError
from embodyrl.types import ChunkResult, EnvSpec, EpisodeStart, FloatArray


class OpenEnv(DialogueEnv[Dialogue]):
    """`TextEnv` on an OpenEnv server: each reply is an action, and its last token gets the reward of the step.

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
        # All environments at once, so that the server can work on them in parallel.
        for env_index, start in zip(env_indices, starts, strict=True):
            self._sessions[env_index].send("reset", {"seed": start.reset_id})
        for env_index in env_indices:
            self.dialogues[env_index] = Dialogue(
                observation=self._format_observation(self._sessions[env_index].receive().observation)
            )

    def step_chunk(
        self, env_indices: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Send each reply to the server as an action; `actions` [n, K, 1] are token ids (negative: padding).

        Raises:
            EnvError: see `Session`.
        """
        result, last = create_reply_result(actions)
        for env_index in env_indices:
            self._sessions[env_index].send(
                "step", {**self._cfg.action, self._action_key: self.dialogues[env_index].reply}
            )
        for i, env_index in enumerate(env_indices):
            turn, episode, position = self._sessions[env_index].receive(), self.dialogues[env_index], (i, last[i])
            self.store_turn(episode)
            episode.observation, episode.steps = self._format_observation(turn.observation), episode.steps + 1
            result.reward[position] = self._cfg.reward_coef * turn.reward
            result.success[position] = turn.reward >= self._cfg.success_reward
            result.terminated[position] = turn.done
            result.truncated[position] = not turn.done and episode.steps >= self.spec.text.max_replies
        return result

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
