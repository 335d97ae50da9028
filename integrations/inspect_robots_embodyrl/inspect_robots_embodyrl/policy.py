"""A policy of embodyrl as a policy of inspect-robots."""

import time
from typing import Any

import numpy as np
from inspect_robots.policy import PolicyBase, PolicyConfig, PolicyInfo
from inspect_robots.scene import Scene
from inspect_robots.types import Action, ActionChunk, Observation

import embodyrl
from inspect_robots_embodyrl.spaces import CONTROL_HZ, STATE, action_space, observation_space, upright, words


class EmbodyrlPolicy(PolicyBase):
    """Greedy policy that returns chunks of K actions in the environment's units."""

    def __init__(self, run: str, overrides: str | list[str] = "") -> None:
        """Load the policy.

        Args:
            run: a run, a checkpoint or a model folder.
            overrides: overrides as for `embodyrl eval`, separated by spaces; a folder needs env= and model=.

        Raises:
            ConfigError: the policy does not fit its environment.
            CheckpointError: the path contains no usable weights.
        """
        self._loaded = embodyrl.load_policy(run, *words(overrides))
        self._layout, spec = self._loaded.run_plan.env, self._loaded.policy.spec
        self._reads = spec.inputs
        self._instruction: str | None = None
        self.config = PolicyConfig(action_horizon=spec.num_action_chunks, replan_interval=spec.num_action_chunks)
        self.info = PolicyInfo(
            name=f"embodyrl/{spec.name}",
            action_space=action_space(self._layout),
            observation_space=observation_space(
                self._layout, images=spec.inputs.num_images > 0, state=spec.inputs.state
            ),
            control_hz=CONTROL_HZ,
            checkpoint=run,
        )

    def reset(self, scene: Scene) -> None:
        """Remember the scene's instruction for observations without one."""
        self._instruction = scene.instruction

    def act(self, observation: Observation) -> ActionChunk:
        """Return the next K actions."""
        started = time.perf_counter()
        seen: dict[str, Any] = {"instruction": observation.instruction or self._instruction}
        if self._reads.num_images:
            frames = np.stack([observation.images[name] for name in self._layout.cameras.names])
            seen["images"] = upright(frames, self._layout)
        if self._reads.state:
            seen["state"] = observation.state[STATE]
        chunk = self._loaded.act(seen)
        return ActionChunk(
            [Action(np.asarray(row, np.float64)) for row in chunk],
            control_hz=CONTROL_HZ,
            inference_latency_s=time.perf_counter() - started,
        )
