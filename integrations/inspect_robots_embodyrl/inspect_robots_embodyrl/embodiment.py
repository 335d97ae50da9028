"""An environment of embodyrl as an embodiment of inspect-robots."""

from typing import Any

import numpy as np
from inspect_robots.embodiment import PRIVILEGED_SUCCESS, RESETTABLE, SEEDABLE, EmbodimentBase, EmbodimentInfo
from inspect_robots.scene import Scene
from inspect_robots.types import Action, Observation, StepResult

import embodyrl
from inspect_robots_embodyrl.spaces import CONTROL_HZ, STATE, action_space, observation_space, upright, words


class EmbodyrlEmbodiment(EmbodimentBase):
    """One simulator of embodyrl; images are upright."""

    def __init__(self, env: str = "tabletop", overrides: str | list[str] = "") -> None:
        """Build the simulator.

        Args:
            env: option of `env=`, for example libero_object.
            overrides: overrides as for `embodyrl eval`, separated by spaces.

        Raises:
            ValueError: the actions are not displacements of an end effector.
            ConfigError: unknown environment or setting.
        """
        self._env = embodyrl.make_env(env, *words(overrides))
        self._layout = self._env.layout
        self.info = EmbodimentInfo(
            name=f"embodyrl/{self._layout.name}",
            action_space=action_space(self._layout),
            observation_space=observation_space(self._layout),
            control_hz=CONTROL_HZ,
            is_simulated=True,
            capabilities=frozenset({SEEDABLE, RESETTABLE, PRIVILEGED_SUCCESS}),
            environment_id=f"embodyrl {embodyrl.__version__}",
        )

    def reset(self, scene: Scene, *, seed: int | None = None) -> Observation:
        """Start the episode of the scene's metadata, or an episode of the seed."""
        episode = scene.metadata.get("episode")
        options = {} if episode is None else {"episode": int(episode)}
        return self._observation(self._env.reset(seed=seed, options=options)[0])

    def step(self, action: Action) -> StepResult:
        """Execute one action."""
        seen, reward, terminated, truncated, info = self._env.step(np.asarray(action.data, np.float32))
        return StepResult(
            observation=self._observation(seen),
            reward=reward,
            terminated=terminated,
            termination_reason="success" if terminated and info["success"] else None,
            truncated=truncated,
            info=info,
        )

    def close(self) -> None:
        """Free the simulator."""
        self._env.close()

    def _observation(self, seen: dict[str, Any]) -> Observation:
        images = upright(seen["images"], self._layout) if "images" in seen else ()
        return Observation(
            images=dict(zip(self._layout.cameras.names, images, strict=False)),
            state={STATE: seen["state"]} if "state" in seen else {},
            instruction=seen["instruction"],
        )
