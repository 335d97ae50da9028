"""Environments with Gymnasium's interface, for custom loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodyrl.envs import ENVS
from embodyrl.envs.protocol import Env, EnvContext, SavesState
from embodyrl.envs.settings import EnvSettings, EnvSplit
from embodyrl.errors import ConfigError, EnvError
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_context, env_spec
from embodyrl.plan.episodes import eval_start
from embodyrl.plan.initial_states import select_reset_ids
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.types import ActionKind, EnvSpec, EpisodeStart


class SingleEnv(gymnasium.Env[dict[str, Any], Any]):
    """One environment of embodyrl with the interface of Gymnasium.

    Observations: `images` [C, H, W, 3] uint8 (with cameras), `state` [S] float32 (with a state) and
    `instruction`, the task as text. Actions [A]: numbers in -1..1, or categories. `info["success"]`: goal reached.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    # As a class attribute, because Gymnasium's wrappers read it before the first frame is rendered.
    render_mode = "rgb_array"

    def __init__(self, cfg: Config, settings: EnvSettings, context: EnvContext, split: EnvSplit | None = None) -> None:
        """Build the simulator in this process.

        Args:
            cfg: config of the run.
            settings: settings of the environment.
            context: arguments for building the environment.
            split: tasks and initial states; default `env.eval`.

        Raises:
            ConfigError: the config sets an inference delay.
        """
        if settings.delay[1]:
            raise ConfigError(
                "env.control.latency_steps delays chunks, but this environment executes one action per step, without "
                "delay. Add env.control.latency_steps=0."
            )
        self.env: Env = ENVS.get(cfg.env.env_type).make(settings, context)
        self.layout: EnvSpec = self.env.spec
        """Spec of the environment: tasks, cameras, sizes, gripper."""
        self._split = split or cfg.env.eval
        self.max_episode_steps = self._split.max_episode_steps
        """Number of steps after which an episode is truncated."""
        self._ids = list(select_reset_ids(self.layout, self._split))
        self.action_space = _build_action_space(self.layout)
        self.observation_space = _build_observation_space(self.layout)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode (see `gymnasium.Env.reset`).

        Args:
            seed: seed that selects the initial state and seeds the simulator.
            options: `{"task": 0}` for a task of the environment, `{"reset_id": 17}` for one initial state,
                `{"episode": 3}` for an episode of `embodyrl eval` with these settings, counted from 0.

        Raises:
            ConfigError: the task or state does not exist.
        """
        super().reset(seed=seed)
        reset_id, episode_seed = self._choose_start(dict(options or {}))
        start = EpisodeStart(
            reset_id=reset_id,
            seed=episode_seed,
            max_episode_steps=self._split.max_episode_steps,
            ignore_terminations=self._split.ignore_terminations,
        )
        self.env.reset([0], [start])
        return self._observe(), {"reset_id": reset_id, "task": self.layout.task_of(reset_id)[0], "seed": start.seed}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one action (see `gymnasium.Env.step`).

        Raises:
            EnvError: the function of `reward.path` failed.
        """
        # A chunk of one action in one environment.
        chunk = np.asarray(action, np.float32).reshape(1, 1, -1)
        result = self.env.step_chunk([0], chunk)
        if result.reward_errors:
            raise EnvError(f"reward.path: the function failed. {result.reward_errors[0]}. Correct the function.")
        terminated, truncated = bool(result.terminated[0, 0]), bool(result.truncated[0, 0])
        info = {"success": bool(result.success[0, 0])}
        return self._observe(), float(result.reward[0, 0]), terminated, truncated, info

    def save_state(self) -> Any:
        """Return a copy of the episode's state for `load_state`; requires `layout.simulator.saves_state`."""
        if not isinstance(self.env, SavesState) or not self.layout.simulator.saves_state:
            raise EnvError(
                f"env '{self.layout.name}' cannot save its state. Check `layout.simulator.saves_state` first."
            )
        return self.env.save(0)

    def load_state(self, state: Any) -> dict[str, Any]:
        """Restore a saved state of the current episode, and return the observation."""
        assert isinstance(self.env, SavesState), "save_state, which returned the state, has checked this"
        self.env.load(0, state)
        return self._observe()

    def render(self) -> Any:
        """Return a video frame [H, W, 3] uint8."""
        return self.env.render(0)

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()

    def _choose_start(self, options: dict[str, Any]) -> tuple[int, int]:
        """Return the reset id and the seed of the next episode."""
        remaining = dict(options)
        if [*remaining] == ["episode"] and _is_number_below(remaining["episode"], math.inf):
            return eval_start(self.layout, self._split, int(remaining["episode"]))[1:]
        task, reset_id = remaining.pop("task", None), remaining.pop("reset_id", None)
        fits = reset_id is None or (
            _is_number_below(reset_id, self.layout.num_reset_ids) and task in (None, self.layout.task_of(reset_id)[0])
        )
        choices = [
            candidate_id for candidate_id in self._ids if task is None or self.layout.task_of(candidate_id)[0] == task
        ]
        if remaining or not choices or not fits:
            raise ConfigError(
                f"env '{self.layout.name}': reset takes options task (0 to {len(self.layout.tasks) - 1}), reset_id "
                f"(0 to {self.layout.num_reset_ids - 1}, of this task) or episode (from 0), not {options}."
            )
        chosen = int(self.np_random.choice(choices)) if reset_id is None else int(reset_id)
        return chosen, int(self.np_random.integers(2**31))

    def _observe(self) -> dict[str, Any]:
        spec = self.layout
        images = np.zeros((len(spec.cameras.names), *spec.cameras.size, 3), np.uint8)
        state = np.zeros(spec.state_dim, np.float32)
        self.env.observe([0], images[None], state[None])
        observation: dict[str, Any] = {"instruction": self.env.instruction(0)}
        return observation | ({"images": images} if len(images) else {}) | ({"state": state} if len(state) else {})


def make_env(env: str, *overrides: str, num_envs: int | None = None, config_dirs: Sequence[Path] = ()) -> Any:
    """Create a Gymnasium environment from an environment of embodyrl.

    >>> table = make_env("tabletop", "env.eval.task_ids=[0]")
    >>> observation, info = table.reset(seed=0)
    >>> observation["instruction"]
    'touch the red block'

    Args:
        env: an option of `env=`, for example tabletop or libero_object.
        overrides: arguments as for `embodyrl eval`; `env.eval.*` selects tasks and initial states.
        num_envs: None: a `SingleEnv`; else a `gymnasium.vector.SyncVectorEnv` of this size.
        config_dirs: folders with further options, as for `--config-dir`.

    Raises:
        ConfigError: unknown environment or setting, or a text task, which has no steps.
        MissingDependencyError: the simulator is not installed.
    """
    arguments = (f"env={env}", "model=random", *overrides)
    if num_envs == 0:
        raise ConfigError("num_envs=0: a vector environment has at least 1 environment. Use None for a single one.")
    if num_envs is not None:
        return gymnasium.vector.SyncVectorEnv([lambda: make_env(env, *overrides, config_dirs=config_dirs)] * num_envs)
    cfg = load_config("eval", arguments, config_dirs=config_dirs)
    _check_steps(cfg)
    context = env_context(cfg)
    # As in a run, `spec` reports missing packages and rejected settings before `make` imports the simulator.
    spec = ENVS.get(cfg.env.env_type).spec(cfg.env, context)
    return SingleEnv(cfg, cfg.env, replace(context, known_spec=spec))


def build_env_of_plan(run_plan: RunPlan) -> SingleEnv:
    """Return the environment of a run, with the cameras of its policy."""
    _check_steps(run_plan.cfg)
    return SingleEnv(run_plan.cfg, run_plan.env_settings, run_plan.context)


def _is_number_below(value: Any, limit: float) -> bool:
    """Return True for an integer from 0 to below `limit`."""
    return isinstance(value, int | np.integer) and 0 <= int(value) < limit


def _check_steps(cfg: Config) -> None:
    if cfg.reads_rows:
        raise ConfigError(
            f"env '{env_spec(cfg).name}' is a text task without steps. Train on text tasks with `embodyrl.GRPO`; show "
            "replies with `embodyrl view` or `report`."
        )
    check_components(cfg)


def _build_action_space(spec: EnvSpec) -> spaces.Space[Any]:
    if spec.action.kind is ActionKind.discrete:
        return spaces.Discrete(spec.action.sizes[0])
    if spec.action.kind is ActionKind.multi_discrete:
        return spaces.MultiDiscrete(np.asarray(spec.action.sizes))
    low, high = (np.asarray(bound, np.float32) for bound in spec.action.bounds)
    return spaces.Box(low, high, dtype=np.float32)


def _build_observation_space(spec: EnvSpec) -> spaces.Dict:
    texts = spec.instructions or spec.tasks
    characters = frozenset("".join(texts)) or frozenset(" ")
    max_length = max(map(len, texts), default=1)
    entries: dict[str, spaces.Space[Any]] = {
        "instruction": spaces.Text(max(1, max_length), min_length=0, charset=characters)
    }
    if spec.cameras.names:
        entries["images"] = spaces.Box(0, 255, (len(spec.cameras.names), *spec.cameras.size, 3), np.uint8)
    if spec.state_dim:
        entries["state"] = spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32)
    return spaces.Dict(entries)
