"""Environment in which a policy and a person act in turn, and functions that load the policy and the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from embodyrl.api.acting import LoadedPolicy, build_policy_of_config, compose_policy_config
from embodyrl.api.environment import SingleEnv, build_env_of_plan
from embodyrl.controls import get_controls, get_neutral_action, inputs_to_action
from embodyrl.data.layout import Actor
from embodyrl.errors import ConfigError
from embodyrl.plan.config import apply_overrides
from embodyrl.plan.schema import Config
from embodyrl.play.recording import Recording, Step
from embodyrl.types import FloatArray

_JPEG_QUALITY = 90
"""JPEG quality of the images of the page and of recorded videos."""
_MAX_REWIND_STEPS = 2000
"""Maximum number of env steps that `rewind` can undo."""
_MAX_INSTRUCTION_LENGTH = 200
"""Maximum length of an instruction, in characters."""
_WITH_VIDEO = {"video": "all"}
"""Value that makes the environment render images."""
_WITHOUT_TIME_LIMIT = {"env.eval.max_episode_steps": 100_000}
"""Value that removes the time limit of an episode, because the user ends the episode."""
_IGNORE_TERMINATIONS = {"env.eval.ignore_terminations": True}
"""Value that continues an episode after success; not used for recorded episodes."""


class Scene:
    """One environment with one episode at a time; each action comes from the policy or from a person."""

    def __init__(
        self,
        policy: LoadedPolicy,
        env: SingleEnv,
        recording: Recording | None = None,
        reset_ids: Sequence[int] = (),
    ) -> None:
        """Start the first episode of `reset_ids`, or an episode of any task if `reset_ids` is empty."""
        self.policy, self.env = policy, env
        self.controls = get_controls(env.layout.action)
        self.can_rewind = env.layout.simulator.saves_state
        self.frame_number = 0
        """Counter that increases with every change of the scene; the page compares it with its last image."""
        self.num_recorded = 0
        """Number of recorded episodes."""
        self.num_finished = 0
        """Number of finished episodes of `reset_ids`."""
        self._recording, self._reset_ids = recording, tuple(reset_ids)
        self._remaining_actions: list[FloatArray] = []
        """Actions [A] of the policy's current chunk that were not executed yet."""
        self._steps: list[Step] = []
        self._states: list[Any] = []
        self._episodes = 0
        self.start_episode()

    @property
    def is_recorded(self) -> bool:
        """True if episodes are recorded."""
        return self._recording is not None

    @property
    def remaining(self) -> int:
        """Number of episodes of `reset_ids` that are not finished."""
        return len(self._reset_ids) - self.num_finished

    def start_episode(self, task: int = -1) -> None:
        """Record the current episode, and start another episode.

        If the scene has a list of `reset_ids`, the next id in the list is used; otherwise, an initial state of `task`
        (-1: any task).

        Raises:
            ValueError: the environment has no such task.
        """
        if task >= len(self.env.layout.tasks):
            raise ValueError(f"'task' must be below {len(self.env.layout.tasks)}, the number of tasks")
        self.finish_episode()
        options = {"task": task} if task >= 0 else None
        if self._reset_ids:
            self.num_finished += self._episodes > self.num_finished
            if not self.remaining:
                self.frame_number += 1
                return
            options = {"reset_id": self._reset_ids[self.num_finished]}
        self._options, self.instruction_override = options, ""
        self._episodes += 1
        self._reset()

    def _reset(self) -> None:
        self._observation, info = self.env.reset(seed=self._episodes, options=self._options)
        self.start: dict[str, int] = info
        self._last_action = get_neutral_action(self.env.layout.action)
        self._remaining_actions.clear()
        self._steps = []
        self._states = [self.env.save_state()] if self.can_rewind else []
        self.has_ended = False
        self._render()

    def finish_episode(self) -> None:
        """End the current episode, and append its steps to the recording, if any."""
        steps = self._steps
        if self._recording is not None and steps:
            self._recording.append(steps, self.start)
            self.num_recorded += 1
        self._steps = []
        self.has_ended = True
        # Last, because an error here must not record the episode again.
        if self._recording is not None and steps:
            self._recording.record_video(steps)

    def restart(self) -> None:
        """Discard the current episode, and start it again from its initial state."""
        self._reset()

    def rewind(self, steps: int) -> None:
        """Discard the last `steps` env steps, and restore the simulator state before them."""
        saved = [step for step, state in enumerate(self._states) if state is not None]
        if not saved or saved[0] == len(self._steps):
            raise ValueError("The episode cannot be rewound, because no earlier state of the simulator is saved")
        first = max(saved[0], len(self._steps) - steps)
        self._observation = self.env.load_state(self._states[first])
        del self._steps[first:], self._states[first + 1 :]
        self._last_action = self._steps[-1].action if self._steps else get_neutral_action(self.env.layout.action)
        self._remaining_actions.clear()
        self.has_ended = False
        self._render()

    def set_instruction(self, instruction: str) -> None:
        """Set the instruction for the next actions of the policy; empty: the instruction of the task.

        Raises:
            ValueError: episodes are recorded, which requires the instruction of the task.
        """
        if self._recording is not None:
            raise ValueError(
                "the instruction of a recorded episode cannot be changed; run `embodyrl play` without --record"
            )
        self.instruction_override = " ".join(instruction.split())[:_MAX_INSTRUCTION_LENGTH]
        self._remaining_actions.clear()
        self.frame_number += 1

    def advance(self, amounts: Mapping[int, float] | None) -> None:
        """Execute one env step, with a person's inputs `amounts` (see `inputs_to_action`) or, if None, with the policy.

        An action of a person discards the rest of the policy's chunk. When the policy takes over again, it infers a new
        chunk from the current observation.
        """
        if self.has_ended:
            return
        if amounts is None:
            if not self._remaining_actions:
                self._remaining_actions = [
                    *self.policy.act(self._observation, instruction=self.instruction_override or None)
                ]
            action, actor = self._remaining_actions.pop(0), Actor.policy
        else:
            self._remaining_actions.clear()
            action, actor = inputs_to_action(self.env.layout.action, amounts, self._last_action), Actor.person
        observation = self._observation
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        self._last_action = np.asarray(action, np.float32).reshape(-1)
        self.has_ended = terminated or truncated
        self._render()
        if not self.is_recorded:  # an episode without a time limit would fill the memory
            observation = {"instruction": observation["instruction"]}
        step = Step(
            observation=observation,
            action=self._last_action,
            reward=reward,
            success=info["success"],
            actor=actor,
            frame_jpeg=self.frame_jpeg if self.is_recorded else b"",
        )
        self._steps.append(step)
        if self.can_rewind:
            self._states.append(self.env.save_state())
            if len(self._states) > _MAX_REWIND_STEPS + 1:
                self._states[-_MAX_REWIND_STEPS - 2] = None

    def _render(self) -> None:
        frame = np.ascontiguousarray(self.env.render())
        self.frame_jpeg: bytes = simplejpeg.encode_jpeg(frame, _JPEG_QUALITY, "RGB")
        """Last rendered frame as JPEG."""
        self.frame_number += 1

    def get_state(self) -> dict[str, Any]:
        """Return the state of the episode, which the page shows next to the image."""
        last = self._steps[-1] if self._steps else None
        return {
            "task": self.start["task"],
            "reset_id": self.start["reset_id"],
            "instruction": self.instruction_override or self._observation["instruction"],
            "steps": len(self._steps),
            "by_person": sum(step.actor == Actor.person for step in self._steps),
            "actor": "" if last is None else last.actor.name,
            "success": any(step.success for step in self._steps),
            "over": self.has_ended,
            "kept": self.num_recorded,
            "assigned": self.num_finished,
            "remaining": self.remaining,
        }


def load_policy_with_env(
    run: Path, trust: Sequence[str] = (), *, records: bool = False
) -> tuple[LoadedPolicy, SingleEnv]:
    """Load the policy of a run and build its environment, if possible with video frames and without a time limit.

    `records`: True if episodes are recorded; recorded episodes end after success.
    """
    cfg = compose_policy_config(run, trust)
    no_limits = _WITHOUT_TIME_LIMIT if records else _WITHOUT_TIME_LIMIT | _IGNORE_TERMINATIONS
    for values in (_WITH_VIDEO | no_limits, _WITH_VIDEO):
        with suppress(ConfigError):  # the environment rejects ignore_terminations or videos
            return _load(apply_overrides(cfg, values))
    return _load(cfg)


def _load(cfg: Config) -> tuple[LoadedPolicy, SingleEnv]:
    """Load a policy and its environment without an inference delay, because the page executes one action per step."""
    policy = build_policy_of_config(cfg)
    env_settings = policy.run_plan.env_settings.without_delay()
    return policy, build_env_of_plan(replace(policy.run_plan, env_settings=env_settings))
